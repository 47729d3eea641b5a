"""The running sequences, and checks whether the step's token budget, the pool and `max_running` admit one more.

The scheduler decides which sequence to start and which to preempt. There are `max_running` *places* to run in.
"""

from bisect import bisect_left, insort
from collections import Counter

from quire.core.digests import Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.memory.block_table import num_blocks_for
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.policy import may_preempt, will_compute
from quire.core.scheduling.scheduler_config import Needs, SchedulerConfig
from quire.core.scheduling.sequence import Sequence, SequenceStatus, table_of
from quire.errors import InvariantError


class Placement:
    """The running sequences, and the places and blocks that are left for waiting sequences."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory) -> None:
        self.running: list[Sequence] = []
        """Running sequences, most urgent first."""
        self.num_places = 0
        """Places in use: one per running sequence and per sibling that it will fork (`fork_if_due`)."""
        self._config = config
        self._memory = memory
        self._num_watermark_blocks = int(config.watermark * memory.config.num_blocks)
        self._blocked: tuple[int, int] | None = None
        """Sequence id of the last head of the queue that did not fit, and the number of free blocks at that time."""

    def add(self, sequence: Sequence) -> None:
        """Add a running sequence, which takes a place for itself and one for each sibling."""
        self.num_places += 1 + len(sequence.siblings)
        insort(self.running, sequence, key=_urgency)

    def fork_if_due(self, sequence: Sequence) -> None:
        """Fork the siblings (the request's other continuations) once only the prompt's last token is not computed. Each
        sibling computes that token itself. It now runs, in the place that was already counted for it.
        """
        fork_point, table = sequence.fork_point, table_of(sequence)
        if fork_point is None or table.num_computed < fork_point:
            return
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            sibling.table = self._memory.fork(table, fork_point)
            sibling.num_charged = fork_point
            sibling.move(SequenceStatus.RUNNING)
            insort(self.running, sibling, key=_urgency)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running sequence; its place and those of its siblings become free."""
        index = bisect_left(self.running, sequence.key, key=_urgency)
        if self.running[index] is not sequence:
            message = f"expected sequence {sequence.sequence_id} at index {index} of the running sequences"
            raise InvariantError(message, code="sequence_misplaced")
        del self.running[index]
        self._blocked = None
        self.num_places -= 1 + len(sequence.siblings)

    def remove_sibling(self, *, has_place: bool) -> None:
        """Record that a sibling ended before its fork, so the head may fit now; `has_place`: its leader runs."""
        self._blocked = None
        self.num_places -= has_place

    def mark_blocked(self, head: Sequence) -> None:
        """Remember that the head of the queue does not fit (see `is_still_blocked`)."""
        self._blocked = head.sequence_id, self._memory.pool.num_free

    def is_still_blocked(self, head: Sequence) -> bool:
        """Return whether this head did not fit before, and no sequence stopped and no block became free since then.
        Without this shortcut, the cache lookup of a long prompt would be repeated at every step.
        """
        if self._blocked is None or not self.running:
            return False
        sequence_id, num_free = self._blocked
        return sequence_id == head.sequence_id and num_free >= self._memory.pool.num_free

    def needs(self) -> Needs:
        """Return the blocks and tokens that running sequences still need for their known tokens."""
        needs = Needs()
        for sequence in self.running:
            needs.add(sequence, self.num_blocks_wanted(sequence))
        return needs

    def may_fit(self, head: Sequence) -> bool:
        """Return False if the head certainly does not fit, because no place can be freed or `is_still_blocked` is true.
        Otherwise `fits` decides."""
        return self.has_place(head) and not self.is_still_blocked(head)

    def has_place(self, head: Sequence) -> bool:
        """Return whether a place is free, or a running sequence may be preempted for the head."""
        is_free = self.num_places + 1 + len(head.siblings) <= self._config.max_running
        return is_free or any(may_preempt(head, sequence) for sequence in self.running)

    def has_budget(self, head: Sequence, needs: Needs) -> bool:
        """Return whether the step's token budget leaves tokens for the head after all more urgent sequences."""
        budget = self._config.max_step_tokens - needs.num_tokens_before(head.key)
        return budget >= min(self._memory.config.block_size, len(head.tokens))

    def fits(self, head: Sequence, needs: Needs, victims: list[Sequence]) -> bool:
        """Return whether places and blocks suffice for the head if the victims are preempted.

        The blocks that the remaining sequences still need, and the watermark, stay free, unless nothing else runs.
        """
        num_places = self.num_places + 1 + len(head.siblings)
        num_places -= sum(1 + len(victim.siblings) for victim in victims)
        if num_places > self._config.max_running:
            return False
        num_blocks = self.num_blocks_wanted(head)
        if len(self.running) > len(victims):
            num_blocks += self._num_watermark_blocks + needs.num_blocks
            num_blocks -= sum(self.num_blocks_wanted(victim) for victim in victims)
        return num_blocks <= self._memory.pool.num_free + self._num_freed_by(victims)

    def num_blocks_wanted(self, sequence: Sequence) -> int:
        """Return how many more blocks a sequence and its siblings need for their known tokens."""
        num_blocks = self._memory.num_blocks_needed(table_of(sequence), sequence.num_uncomputed)
        if sequence.siblings:
            block_size = self._memory.config.block_size
            num_shared = (sequence.num_prompt_tokens - 1) // block_size
            num_blocks += sum(num_blocks_for(len(peer.tokens), block_size) - num_shared for peer in sequence.siblings)
        return num_blocks

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], excluded: Sequence | None) -> Divergence:
        """Return the reason for the first cache miss of a prompt: COMPUTING if a running sequence other than `excluded`
        will compute the next block, otherwise the reason that `KVMemory` reports."""
        divergence = self._memory.divergence(namespace, prompt, None if excluded is None else excluded.table)
        if divergence.reason is MissReason.TOO_SHORT:
            return divergence
        tokens = list(prompt[: divergence.num_cached_tokens + self._memory.config.block_size])
        is_computing = any(will_compute(other, namespace, tokens) for other in self.running if other is not excluded)
        return Divergence(divergence.num_cached_tokens, MissReason.COMPUTING) if is_computing else divergence

    def _num_freed_by(self, victims: list[Sequence]) -> int:
        """Return how many blocks become free if all victims release theirs."""
        num_references = Counter(block for victim in victims for block in table_of(victim).blocks)
        return sum(self._memory.pool.ref_count[block] == count for block, count in num_references.items())


def _urgency(sequence: Sequence) -> tuple[float, int]:
    return sequence.key
