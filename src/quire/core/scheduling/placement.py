"""Which sequences run, and whether one more fits: places, this step's tokens, and blocks.

The scheduler decides which to start, and which to preempt.
"""

from bisect import bisect_left, insort
from collections import Counter

from quire.core.digests import Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.memory.block_table import num_blocks_for
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.policy import may_displace, will_compute
from quire.core.scheduling.scheduler_config import Blocked, Needs, SchedulerConfig
from quire.core.scheduling.sequence import Sequence, SequenceStatus, table_of
from quire.errors import InvariantError


class Placement:
    """The sequences that run, and what is left for others."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory) -> None:
        self.running: list[Sequence] = []
        """In order of urgency."""
        self.num_places = 0
        """Places taken of `max_running`: running sequences and the siblings they will have."""
        self._config = config
        self._memory = memory
        self._num_watermark_blocks = int(config.watermark * memory.config.num_blocks)
        self._blocked: Blocked | None = None

    def add(self, sequence: Sequence) -> None:
        """It runs from now on; its siblings have their places as well."""
        self.num_places += 1 + len(sequence.siblings)
        insort(self.running, sequence, key=_urgency)

    def fork_if_due(self, sequence: Sequence) -> None:
        """At the prompt's last token its siblings branch off, each to compute that token for itself. They run from now
        on, in the places they had.
        """
        point, table = sequence.fork_point, table_of(sequence)
        if point is None or table.num_computed < point:
            return
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            sibling.table = self._memory.fork(table, point)
            sibling.num_charged = point
            sibling.move(SequenceStatus.RUNNING)
            insort(self.running, sibling, key=_urgency)

    def remove(self, sequence: Sequence) -> None:
        """It runs no more; the places of it and its siblings are free."""
        at = bisect_left(self.running, sequence.key, key=_urgency)
        if self.running[at] is not sequence:
            rule = f"sequence {sequence.sequence_id} is not at its key's place"
            raise InvariantError(rule, code="sequence_misplaced")
        del self.running[at]
        self._blocked = None
        self.num_places -= 1 + len(sequence.siblings)

    def remove_sibling(self, *, has_place: bool) -> None:
        """A sibling ended before it branched off: sequences that wait with it, or behind it, need less."""
        self._blocked = None
        self.num_places -= has_place

    def block(self, head: Sequence) -> None:
        """The head of the queue does not fit: see `is_still_blocked`."""
        self._blocked = Blocked(head.sequence_id, self._memory.num_free_blocks)

    def is_still_blocked(self, head: Sequence) -> bool:
        """Whether the head did not fit lately and nothing has changed that could help: none stopped running and no
        block came free. Matching a long prompt anew at every step would cost more than the step.
        """
        return (
            self._blocked is not None
            and bool(self.running)
            and self._blocked.sequence_id == head.sequence_id
            and self._blocked.num_free_blocks >= self._memory.num_free_blocks
        )

    def needs(self) -> Needs:
        """What running sequences still need."""
        return Needs.of(self.running, self.num_blocks_wanted)

    def can_start(self, head: Sequence) -> bool:
        """Whether it is worth checking if the head fits: it may have a place, and something has changed since it did
        not."""
        return self.has_place(head) and not self.is_still_blocked(head)

    def has_place(self, head: Sequence) -> bool:
        """Whether there is a place, or a running sequence that might give one up."""
        is_free = self.num_places + 1 + len(head.siblings) <= self._config.max_running
        return is_free or any(may_displace(head, sequence) for sequence in self.running)

    def reaches(self, head: Sequence, needs: Needs) -> bool:
        """Whether this step's budget reaches the head after all that are more urgent."""
        budget = self._config.max_step_tokens - needs.num_tokens_before(head.key)
        return budget >= min(self._memory.config.block_size, len(head.tokens))

    def fits(self, head: Sequence, needs: Needs, victims: list[Sequence]) -> bool:
        """Whether there are places and blocks for the head if these give up theirs.

        Set aside is what those that stay still need, and the watermark; that is waived while nothing else runs.
        """
        num_places = self.num_places + 1 + len(head.siblings)
        num_places -= sum(1 + len(victim.siblings) for victim in victims)
        if num_places > self._config.max_running:
            return False
        num_blocks = self.num_blocks_wanted(head)
        if len(self.running) > len(victims):
            num_blocks += self._num_watermark_blocks + needs.num_blocks
            num_blocks -= sum(self.num_blocks_wanted(victim) for victim in victims)
        return num_blocks <= self._memory.num_free_blocks + self._num_freed_by(victims)

    def num_blocks_wanted(self, sequence: Sequence) -> int:
        """Blocks it still needs for the tokens it has; with siblings, for theirs as well."""
        num_blocks = self._memory.num_blocks_needed(table_of(sequence), sequence.num_uncomputed)
        if sequence.siblings:
            block_size = self._memory.config.block_size
            num_shared = (sequence.num_prompt_tokens - 1) // block_size
            num_blocks += sum(num_blocks_for(len(one.tokens), block_size) - num_shared for one in sequence.siblings)
        return num_blocks

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], besides: Sequence | None) -> Divergence:
        """Why the next token of this prompt is not in the cache: because a running sequence, `besides` aside, has it
        and has not computed it yet, or the memory's own reason."""
        found = self._memory.divergence(namespace, prompt, None if besides is None else besides.table)
        if found.reason is MissReason.TOO_SHORT:
            return found
        tokens = list(prompt[: found.num_cached_tokens + self._memory.config.block_size])
        is_computing = any(will_compute(one, namespace, tokens) for one in self.running if one is not besides)
        return Divergence(found.num_cached_tokens, MissReason.COMPUTING) if is_computing else found

    def _num_freed_by(self, victims: list[Sequence]) -> int:
        """Blocks that no table holds once all of these have let go."""
        held = Counter(block for victim in victims for block in table_of(victim).blocks)
        return sum(self._memory.pool.ref_count[block] == count for block, count in held.items())


def _urgency(sequence: Sequence) -> tuple[float, int]:
    return sequence.key
