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
MAX_NGRAM = 4
"""Length of the longest n-gram that is searched; shorter ones follow, down to 1."""
OTHER_REQUEST = 16
"""`Draft.source` is the length of the n-gram, plus this number if the draft is from the output of another request."""
WINDOW_BYTES = 32_768 * TOKEN_BYTES
"""Only this much of the end of a sequence's own tokens is searched."""
OUTPUT_BYTES = 16_384 * TOKEN_BYTES
"""Maximum size of the recent outputs stored per namespace."""
MAX_NAMESPACES = 256
"""Maximum number of namespaces with stored outputs; beyond it, the least recently updated one is dropped."""
_SEPARATOR = b"\xff" * TOKEN_BYTES
"""Separator between stored outputs. No token has this id, so no n-gram extends over two outputs."""


class Ngrams:
    """Proposes n-gram drafts for the sequences of one engine."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[Namespace, bytearray] = OrderedDict()

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """Return a draft of at most `limit` tokens."""
        own_tokens = _own_bytes(sequence)
        outputs = self._outputs.get(sequence.request.namespace, b"")
        end = len(own_tokens) - TOKEN_BYTES  # excludes the n-gram at the end itself
        for length in range(min(MAX_NGRAM, len(sequence.tokens)), 0, -1):
            ngram = bytes(own_tokens[-length * TOKEN_BYTES :])
            pos = _end_of_last_match(own_tokens, ngram, max(0, end - WINDOW_BYTES), end)
            if pos is not None:
                return Draft(_repeat(_tokens(own_tokens[pos : pos + limit * TOKEN_BYTES]), limit), length)
            pos = _end_of_last_match(outputs, ngram, 0, len(outputs))
            if pos is not None and (draft := _tokens(outputs[pos : pos + limit * TOKEN_BYTES].split(_SEPARATOR)[0])):
                return Draft(draft, OTHER_REQUEST + length)
        return Draft()

    def store_output(self, sequence: Sequence) -> None:
        """Store the output of a finished sequence for drafts of other sequences in its namespace."""
        new_tokens = sequence.tokens[max(0, sequence.num_prompt_tokens - MAX_NGRAM) :]
        if sequence.num_output_tokens == 0:
            return
        namespace = sequence.request.namespace
        outputs = self._outputs.setdefault(namespace, bytearray())
        outputs += array("I", new_tokens).tobytes() + _SEPARATOR
        del outputs[: max(0, len(outputs) - OUTPUT_BYTES)]
        self._outputs.move_to_end(namespace)
        if len(self._outputs) > MAX_NAMESPACES:
            self._outputs.popitem(last=False)


def _own_bytes(sequence: Sequence) -> bytearray:
    token_bytes = sequence.token_bytes
    token_bytes += array("I", sequence.tokens[len(token_bytes) // TOKEN_BYTES :]).tobytes()
    return token_bytes


def _end_of_last_match(tokens: bytes | bytearray, ngram: bytes, start: int, end: int) -> int | None:
    """Return the byte offset after the last `ngram` that starts on a token border in [start, end); None without one."""
    pos = tokens.rfind(ngram, start, end)
    while pos > 0 and pos % TOKEN_BYTES:
        pos = tokens.rfind(ngram, start, pos + len(ngram) - 1)
    return None if pos < 0 else pos + len(ngram)


def _repeat(tokens: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Return `limit` tokens: `tokens` repeated as often as needed."""
    return (tokens * -(-limit // len(tokens)))[:limit]


def _tokens(data: bytes | bytearray) -> tuple[int, ...]:
    return tuple(array("I", bytes(data[: len(data) - len(data) % TOKEN_BYTES])))


def make_scheduler(config: SchedulerConfig, memory: KVMemory, *, has_drafts: bool) -> Scheduler:
    """Make a scheduler, with n-gram drafts if `has_drafts` is set and the model has no recurrent state to roll back."""
    if not has_drafts or memory.states is not None:
        return Scheduler(config, memory)
    ngrams = Ngrams()
    return Scheduler(config, memory, ngrams.propose, ngrams.store_output)
