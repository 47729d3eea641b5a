"""N-gram speculation: if the last few tokens occurred before, propose the tokens that followed them then.

    … t7 t8 t9 t4 t2 … t7 t8 t9 │ t4 t2 …       the last three tokens occurred before: t4 t2 is the draft

The longest n-gram is searched first, the latest occurrence first, in the sequence's own tokens and then in the latest
outputs of its cache group. Outputs of other cache groups are never searched, because response times would reveal their
contents. Outputs are stored per namespace, like blocks, so n-grams reveal nothing that the prefix cache does not.

Tokens are stored as bytes, four per token, because searching bytes takes microseconds and an index would need more
memory than the tokens.
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
"""Length of the longest n-gram that is searched; shorter ones follow, down to 1."""
OTHERS = 16
"""A draft's source is the length of the n-gram, plus this if it was found in the output of another request."""
WINDOW_BYTES = 32_768 * TOKEN_BYTES
"""How far back a sequence's own tokens are searched."""
ANSWER_BYTES = 16_384 * TOKEN_BYTES
"""Maximum size of the recent outputs stored per namespace."""
MAX_GROUPS = 256
"""Maximum number of namespaces with stored outputs; beyond it, the least recently updated one is dropped."""
_BETWEEN = b"\xff" * TOKEN_BYTES
"""Separator of two outputs. No token has this id, so no n-gram extends over two outputs."""


class Ngrams:
    """Proposes drafts for one engine's sequences."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Namespace, bytearray] = OrderedDict()

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """Return a draft of at most `limit` tokens."""
        own = _own_bytes(sequence)
        answers = self._answers.get(sequence.request.namespace, b"")
        end = len(own) - TOKEN_BYTES  # excludes the n-gram at the end itself
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
        """Store the output of a finished sequence for drafts of other sequences in its namespace."""
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
    """Return the offset after the last occurrence of `run` that starts on a token border; None if there is none."""
    at = tokens.rfind(run, first, end)
    while at > 0 and at % TOKEN_BYTES:
        at = tokens.rfind(run, first, at + len(run) - 1)
    return None if at < 0 else at + len(run)


def _repeated(following: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Return `limit` tokens of `following`, repeated as often as needed."""
    return (following * -(-limit // len(following)))[:limit]


def _tokens(data: bytes | bytearray) -> tuple[int, ...]:
    return tuple(array("I", bytes(data[: len(data) - len(data) % TOKEN_BYTES])))


def make_scheduler(config: SchedulerConfig, memory: KVMemory, *, guesses: bool) -> Scheduler:
    """Make a scheduler, with n-gram drafts if `guesses` is set and the model has no recurrent state to roll back."""
    if not guesses or memory.states is not None:
        return Scheduler(config, memory)
    ngrams = Ngrams()
    return Scheduler(config, memory, ngrams.propose, ngrams.ended)
