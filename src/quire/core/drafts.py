"""Drafts: guesses at the tokens that follow, which a step checks beside computing what is known.

A guess changes no answer: it is right exactly if it is the token that would have been chosen in its place. And it costs
nobody anything: drafts get the tokens of a step and the blocks of the pool that no running sequence has a use for.
"""

from collections.abc import Callable

from quire.core.kv_memory import KVMemory
from quire.core.placement import Placement
from quire.core.request import Sequence, table_of
from quire.core.scheduler_config import SchedulerConfig

Propose = Callable[[Sequence, int], tuple[int, ...]]
"""A sequence, and a number -> at most so many tokens that may follow those it knows."""


class DraftRoom:
    """What one step has left for drafts when everybody has had computed what they know."""

    __slots__ = ("_max_sequence_tokens", "_memory", "_num_blocks", "_num_tokens", "_propose")

    def __init__(self, propose: Propose, placement: Placement, memory: KVMemory, config: SchedulerConfig) -> None:
        self._propose = propose
        self._memory = memory
        self._max_sequence_tokens = config.max_sequence_tokens
        self._num_tokens = config.max_step_tokens - sum(one.num_uncomputed for one in placement.running)
        self._num_blocks = memory.num_free_blocks - placement.needs().num_blocks

    def take(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Drafts to feed behind the next `num_tokens` of a sequence; none unless those are the last it knows."""
        table, num_known = table_of(sequence), len(sequence.tokens)
        if table.num_computed + num_tokens < num_known:
            return ()
        num_left = sequence.request.params.max_tokens - sequence.num_output_tokens
        # One token is chosen anyway: a guess at the last one would be checked for nothing.
        limit = min(self._num_tokens, num_left - 1, self._max_sequence_tokens - num_known - 1)
        drafts = self._propose(sequence, limit)[:limit] if limit > 0 else ()
        needed = self._memory.num_blocks_needed
        num_blocks = needed(table, num_tokens + len(drafts)) - needed(table, num_tokens)
        if num_blocks > max(0, self._num_blocks):
            return ()
        self._num_tokens -= len(drafts)
        self._num_blocks -= num_blocks
        return drafts
