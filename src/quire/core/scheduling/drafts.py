"""Drafts: guesses at the tokens that follow, which a step checks beside computing what is known.

A guess changes no answer: it is right exactly if it is the token that would have been chosen in its place. And it costs
others little: drafts get the tokens of a step and the blocks of the pool that no running sequence has a use for, only
as many as are likely enough (`acceptance_rates`) to pay for the time they take (`step_cost`), and where tenants share a
step they make it a little longer at most: one tenant's repetitive text would pay for steps that all others wait for.
"""

from collections.abc import Callable
from math import inf

from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.acceptance_rates import UNKNOWN, Draft
from quire.core.scheduling.placement import Placement
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.sequence import Sequence, table_of

Propose = Callable[[Sequence, int], Draft]
"""A sequence, and a number -> at most so many tokens that may follow those it has."""
Ended = Callable[[Sequence], None]
"""Called with every sequence that is over."""
MAX_DRAFTS = 15
"""Of one sequence in one step: with its last known token they are as many as count as a few."""
MAX_SLOWDOWN = 1.25
"""How many times as long a step of several tenants may take with its drafts."""
SUREST = 0.9
"""Where a guess must be surer than this, none is searched: so sure is hardly one, and searching takes time too."""


def ignore_ended(_sequence: Sequence) -> None:
    """Where the end of a sequence has no use."""


def draft_room(
    propose: Propose | None, placement: Placement, memory: KVMemory, config: SchedulerConfig
) -> "DraftBudget | None":
    """What the next step has for drafts; None without guesses, or if hardly one could pay among so many sequences."""
    num_running = len(placement.running)
    if propose is None:
        return None
    if config.step_cost is not None and config.step_cost.least_likelihood(num_running, num_running) >= SUREST:
        return None
    return DraftBudget(propose, placement, memory, config)


class DraftBudget:
    """What one step has left for drafts beside all known tokens of the running sequences."""

    __slots__ = ("_cost", "_limit_s", "_max_sequence_tokens", "_memory", "_num_blocks", "_num_fed", "_num_left",
                 "_num_sequences", "_propose")  # fmt: skip

    def __init__(self, propose: Propose, placement: Placement, memory: KVMemory, config: SchedulerConfig) -> None:
        self._propose = propose
        self._memory = memory
        self._cost = config.step_cost
        self._max_sequence_tokens = config.max_sequence_tokens
        self._num_sequences = len(placement.running)
        self._num_fed = sum(one.num_uncomputed for one in placement.running)
        self._num_left = config.max_step_tokens - self._num_fed
        self._limit_s = inf
        if self._cost is not None and len({one.request.tenant for one in placement.running}) > 1:
            self._limit_s = MAX_SLOWDOWN * self._cost.seconds(self._num_fed)
        self._num_blocks = memory.num_free_blocks - placement.needs().num_blocks

    def take(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Drafts to feed behind the next `num_tokens` of a sequence; none unless those are the last it has."""
        table, num_known, request = table_of(sequence), len(sequence.tokens), sequence.request
        if table.num_computed + num_tokens < num_known or request.has_stop_texts:
            return ()  # behind a text that ends it, right guesses would be computed for nothing
        num_wanted = request.params.max_tokens - sequence.num_output_tokens
        # One token is chosen anyway: a guess at the last one would be checked for nothing.
        limit = min(self._num_left, num_wanted - 1, self._max_sequence_tokens - num_known - 1)
        drafts = self._worthwhile(sequence, limit) if limit > 0 else ()
        needed = self._memory.num_blocks_needed
        num_blocks = needed(table, num_tokens + len(drafts)) - needed(table, num_tokens)
        if num_blocks > max(0, self._num_blocks):
            return ()
        self._num_fed += len(drafts)
        self._num_left -= len(drafts)
        self._num_blocks -= num_blocks
        return drafts

    def _worthwhile(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """The first tokens of a guess that are likely enough, each if all before it are right."""
        cost, num_fed, num_sequences = self._cost, self._num_fed, self._num_sequences
        if cost is None:
            return self._propose(sequence, limit).token_ids[:limit]
        guess = self._propose(sequence, min(limit, MAX_DRAFTS))
        sequence.guess_source = guess.source
        each = sequence.acceptance_rates.get(guess.source, UNKNOWN).likelihood(len(sequence.tokens))
        likelihood, count = each, 0
        while count < len(guess.token_ids) and likelihood >= cost.least_likelihood(num_fed + count, num_sequences):
            if cost.seconds(num_fed + count + 1) > self._limit_s:
                break
            likelihood *= each
            count += 1
        return guess.token_ids[:count]
