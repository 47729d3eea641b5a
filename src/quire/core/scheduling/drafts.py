"""Speculative decoding: how many draft tokens (predicted next tokens) a step verifies in addition to known tokens.

Drafts never change the output: a draft token is accepted only if it is the token that would have been sampled. They
cost other sequences little, because they use only tokens of the step and blocks that no running sequence needs. Drafts
must be likely enough (`acceptance_rates`) to be worth their time (`step_cost`). If several tenants share a step, drafts
may extend it only a little; otherwise one tenant's repetitive text would slow down the steps of all others.
"""

from collections.abc import Callable
from math import inf

from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.acceptance_rates import UNKNOWN, Draft
from quire.core.scheduling.placement import Placement
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.sequence import Sequence, table_of

Propose = Callable[[Sequence, int], Draft]
"""A function (sequence, limit) that returns a draft of at most `limit` tokens."""
OnEnd = Callable[[Sequence], None]
"""A callback for every finished sequence."""
MAX_DRAFTS = 15
"""Maximum number of draft tokens of one sequence per step: `FEW_TOKENS` less the last known token."""
MAX_SLOWDOWN = 1.1
"""Limit on the duration of a step with drafts, relative to the step without, if several tenants share it."""
MAX_LIKELIHOOD = 0.9
"""If a draft token must be at least this likely to pay off, no drafts are searched: such drafts are too rare."""


def ignore_end(_sequence: Sequence) -> None:
    """Do nothing: the default of `OnEnd`."""


def draft_budget(
    propose: Propose | None, placement: Placement, memory: KVMemory, config: SchedulerConfig
) -> "DraftBudget | None":
    """Return the draft budget of the step being planned; None without `propose`, or if no draft can pay off in it."""
    num_running = len(placement.running)
    if propose is None:
        return None
    if config.step_cost is not None and config.step_cost.min_acceptance(num_running, num_running) >= MAX_LIKELIHOOD:
        return None
    return DraftBudget(propose, placement, memory, config)


class DraftBudget:
    """The tokens, time and blocks that one step has left for drafts after all known tokens of running sequences."""

    def __init__(self, propose: Propose, placement: Placement, memory: KVMemory, config: SchedulerConfig) -> None:
        self._propose = propose
        self._memory = memory
        self._cost = config.step_cost
        self._max_sequence_tokens = config.max_sequence_tokens
        self._num_sequences = len(placement.running)
        self._num_fed = sum(sequence.num_uncomputed for sequence in placement.running)
        self._num_left = config.max_step_tokens - self._num_fed
        self._limit_s = inf
        if self._cost is not None and len({sequence.request.tenant for sequence in placement.running}) > 1:
            self._limit_s = MAX_SLOWDOWN * self._cost.seconds(self._num_fed)
        self._num_blocks = memory.pool.num_free - placement.needs().num_blocks

    def take(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Return drafts to feed after the next `num_tokens`; none unless these are the sequence's last known tokens."""
        table, num_known, request = table_of(sequence), len(sequence.tokens), sequence.request
        if table.num_computed + num_tokens < num_known or request.has_stop_texts:
            return ()  # accepted drafts after a stop string would be wasted
        num_output_left = request.params.max_tokens - sequence.num_output_tokens
        # A step always samples one token, so a draft of the very last token is useless.
        limit = min(self._num_left, num_output_left - 1, self._max_sequence_tokens - num_known - 1)
        drafts = self._worthwhile_drafts(sequence, limit) if limit > 0 else ()
        num_blocks_needed = self._memory.num_blocks_needed
        num_blocks = num_blocks_needed(table, num_tokens + len(drafts)) - num_blocks_needed(table, num_tokens)
        if num_blocks > max(0, self._num_blocks):
            return ()
        self._num_fed += len(drafts)
        self._num_left -= len(drafts)
        self._num_blocks -= num_blocks
        return drafts

    def _worthwhile_drafts(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Return the leading draft tokens that are likely enough; a token counts only if all before it are accepted."""
        cost, num_fed, num_sequences = self._cost, self._num_fed, self._num_sequences
        if cost is None:
            return self._propose(sequence, limit).token_ids[:limit]
        draft = self._propose(sequence, min(limit, MAX_DRAFTS))
        sequence.draft_source = draft.source
        token_likelihood = sequence.acceptance_rates.get(draft.source, UNKNOWN).likelihood(len(sequence.tokens))
        likelihood, count = token_likelihood, 0
        while count < len(draft.token_ids) and likelihood >= cost.min_acceptance(num_fed + count, num_sequences):
            if cost.seconds(num_fed + count + 1) > self._limit_s:
                break
            likelihood *= token_likelihood
            count += 1
        return draft.token_ids[:count]
