"""The set of running sequences, and whether another sequence fits: places, tokens of this step, and blocks.

The scheduler decides which sequence to start and which to preempt. A place is one unit of `max_running`.
"""

from bisect import bisect_left, insort
from collections import Counter

from quire.core.digests import Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.memory.block_table import num_blocks_for
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.policy import may_displace, will_compute
from quire.core.scheduling.scheduler_config import Needs, SchedulerConfig
from quire.core.scheduling.sequence import Sequence, SequenceStatus, table_of
from quire.errors import InvariantError


class Placement:
    """The running sequences, and the places and blocks left for others."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory) -> None:
        self.running: list[Sequence] = []
        """Running sequences, most urgent first."""
        self.num_places = 0
        """Places in use: running sequences, and siblings that will branch off them."""
        self._config = config
        self._memory = memory
        self._num_watermark_blocks = int(config.watermark * memory.config.num_blocks)
        self._blocked: tuple[int, int] | None = None
        """The head of the queue that did not fit (its sequence id), and the number of free blocks at that time."""

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the running ones; its siblings take places, too."""
        self.num_places += 1 + len(sequence.siblings)
        insort(self.running, sequence, key=_urgency)

    def fork_if_due(self, sequence: Sequence) -> None:
        """If the sequence has reached the prompt's last token, fork its siblings (the request's other continuations).
        Each computes that token itself. The siblings run from now on, in the places that they already had.
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
        """Remove a sequence from the running ones; its place and those of its siblings become free."""
        at = bisect_left(self.running, sequence.key, key=_urgency)
        if self.running[at] is not sequence:
            rule = f"sequence {sequence.sequence_id} is not at its key's place"
            raise InvariantError(rule, code="sequence_misplaced")
        del self.running[at]
        self._blocked = None
        self.num_places -= 1 + len(sequence.siblings)

    def remove_sibling(self, *, has_place: bool) -> None:
        """Note that a sibling ended before it branched off, so that waiting sequences may fit now."""
        self._blocked = None
        self.num_places -= has_place

    def block(self, head: Sequence) -> None:
        """Note that the head of the queue does not fit (see `is_still_blocked`)."""
        self._blocked = head.sequence_id, self._memory.pool.num_free

    def is_still_blocked(self, head: Sequence) -> bool:
        """Return whether this head did not fit before, and since then no sequence stopped and no block became free.
        Repeating the lookup of a long prompt at every step would cost more than the step.
        """
        if self._blocked is None or not self.running:
            return False
        sequence_id, num_free = self._blocked
        return sequence_id == head.sequence_id and num_free >= self._memory.pool.num_free

    def needs(self) -> Needs:
        """Return the blocks and tokens that running sequences still need."""
        needs = Needs()
        for sequence in self.running:
            needs.with_one_more(sequence, self.num_blocks_wanted(sequence))
        return needs

    def can_start(self, head: Sequence) -> bool:
        """Return whether it is worth checking if the head fits: a place may be available, and the head is not known to
        be blocked."""
        return self.has_place(head) and not self.is_still_blocked(head)

    def has_place(self, head: Sequence) -> bool:
        """Return whether a place is free, or a running sequence may be preempted for the head."""
        is_free = self.num_places + 1 + len(head.siblings) <= self._config.max_running
        return is_free or any(may_displace(head, sequence) for sequence in self.running)

    def reaches(self, head: Sequence, needs: Needs) -> bool:
        """Return whether the step's token budget has tokens left for the head after all more urgent sequences."""
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
            num_blocks += sum(num_blocks_for(len(one.tokens), block_size) - num_shared for one in sequence.siblings)
        return num_blocks

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], besides: Sequence | None) -> Divergence:
        """Return the reason for the first cache miss of a prompt. It is COMPUTING if a running sequence other than
        `besides` has these tokens and has not computed them yet; otherwise the memory finds it."""
        found = self._memory.divergence(namespace, prompt, None if besides is None else besides.table)
        if found.reason is MissReason.TOO_SHORT:
            return found
        tokens = list(prompt[: found.num_cached_tokens + self._memory.config.block_size])
        is_computing = any(will_compute(one, namespace, tokens) for one in self.running if one is not besides)
        return Divergence(found.num_cached_tokens, MissReason.COMPUTING) if is_computing else found

    def _num_freed_by(self, victims: list[Sequence]) -> int:
        """Return how many blocks become free if all victims release theirs."""
        held = Counter(block for victim in victims for block in table_of(victim).blocks)
        return sum(self._memory.pool.ref_count[block] == count for block, count in held.items())


def _urgency(sequence: Sequence) -> tuple[float, int]:
    return sequence.key
