"""Guesses from earlier text: where the last few tokens stood already, what followed there may follow again.

    … t7 t8 t9 t4 t2 … t7 t8 t9 │ t4 t2 …       the last three tokens stood here before: these are the guess

Searched is the longest such run, the latest first, in the sequence's own tokens and then in the latest answers of its
cache group. Never in those of another: how long an answer takes would show one tenant what another's contain. So the
key of what is shared is the namespace of the blocks, and nothing is found that the prefix cache could not give away.

Tokens are kept as bytes, four for each, because searching bytes takes microseconds and an index would take more memory
than the tokens.
"""

from array import array
from collections import OrderedDict

from quire.core.digests import Namespace
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.sequence import Sequence

TOKEN_BYTES = 4
LONGEST_RUN = 4
"""Tokens of a run that is searched, and of its shorter ends down to one."""
OTHERS = 16
"""Added to the length of a run that was found in another answer: together they are a guess's source."""
WINDOW_BYTES = 32_768 * TOKEN_BYTES
"""How far back a sequence is searched."""
ANSWER_BYTES = 16_384 * TOKEN_BYTES
"""Of latest answers that are kept for one cache group."""
MAX_GROUPS = 256
"""Cache groups whose answers are kept, the latest."""
_BETWEEN = b"\xff" * TOKEN_BYTES
"""Between two answers: no token has this number, so no run goes from one into the next."""


class Ngrams:
    """Proposes drafts for one engine's sequences."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Namespace, bytearray] = OrderedDict()

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """At most so many tokens that may follow those of a sequence."""
        own = _own_bytes(sequence)
        answers = self._answers.get(sequence.request.namespace, b"")
        end = len(own) - TOKEN_BYTES  # the last run itself is not an earlier one
        for length in range(min(LONGEST_RUN, len(sequence.tokens)), 0, -1):
            run = bytes(own[-length * TOKEN_BYTES :])
            at = _last_place(own, run, max(0, end - WINDOW_BYTES), end)
            if at is not None:
                return Draft(_repeated(_tokens(own[at : at + limit * TOKEN_BYTES]), limit), length)
            at = _last_place(answers, run, 0, len(answers))
            if at is not None and (following := _tokens(answers[at : at + limit * TOKEN_BYTES].split(_BETWEEN)[0])):
                return Draft(following, OTHERS + length)
        return Draft()

    def ended(self, sequence: Sequence) -> None:
        """A sequence is over: others of its cache group may come to the same tokens."""
        tail = sequence.tokens[max(0, sequence.num_prompt_tokens - LONGEST_RUN) :]
        if sequence.num_output_tokens == 0:
            return
        namespace = sequence.request.namespace
        kept = self._answers.setdefault(namespace, bytearray())
        kept += array("I", tail).tobytes() + _BETWEEN
        del kept[: max(0, len(kept) - ANSWER_BYTES)]
        self._answers.move_to_end(namespace)
        if len(self._answers) > MAX_GROUPS:
            self._answers.popitem(last=False)


def _own_bytes(sequence: Sequence) -> bytearray:
    known = sequence.token_bytes
    known += array("I", sequence.tokens[len(known) // TOKEN_BYTES :]).tobytes()
    return known


def _last_place(tokens: bytes | bytearray, run: bytes, first: int, end: int) -> int | None:
    """Behind the last run of this kind: a place that is no border between tokens does not count."""
    at = tokens.rfind(run, first, end)
    while at > 0 and at % TOKEN_BYTES:
        at = tokens.rfind(run, first, at + len(run) - 1)
    return None if at < 0 else at + len(run)


def _repeated(following: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """What followed; where the sequence ends in it, it goes round."""
    return (following * -(-limit // len(following)))[:limit]


def _tokens(data: bytes | bytearray) -> tuple[int, ...]:
    return tuple(array("I", bytes(data[: len(data) - len(data) % TOKEN_BYTES])))


def make_scheduler(config: SchedulerConfig, memory: KVMemory, *, guesses: bool) -> Scheduler:
    """A scheduler whose sequences guess what follows, if that is wanted and can be taken back."""
    if not guesses or memory.states is not None:
        return Scheduler(config, memory)
    ngrams = Ngrams()
    return Scheduler(config, memory, ngrams.propose, ngrams.ended)
