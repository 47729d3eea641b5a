"""One member's KV events, turned into what the index of blocks is told. Holds no socket and no clock.

    published ─► hear_news ──► in order? ─┬─ yes ─► names of our own ─► index
    answers ──► hear_answer ──►           └─ no: held back; `want` says what to ask the member for

Names are the router's own, made of a parent's name and tokens, so members need share no secret: what a member calls a
block is only looked up. Each batch has a number. One that is missing is asked for; if the member keeps it no more, or
at the beginning, a snapshot of all it holds is. A member that begins a new incarnation holds nothing of the one before.

Members of other makes have no snapshots: of them is known what was heard since the last gap that could not be closed.

What a batch costs its sender decides, so `hear_*` only open it, and apply its first blocks; `work` applies some more,
for as long as `has_work`. What is kept is bounded by what the member says it has: names by twice its blocks, batches
that wait by their bytes. One that names more blocks than that is not to be trusted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec

from quire.errors import MessageError
from quire.fleet.kv_events.batches import (
    BlockHash,
    ClearedBlocks,
    HeardEvent,
    RemovedBlocks,
    StoredRun,
    open_batch,
    read_kv_event,
)
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.block_names import names_of, root_name
from quire.worker.child.kv_snapshot import OWN, KVAnswer, Position, SnapshotPiece, decode_kv_answer

MAX_HELD = 1000
"""Batches that wait for one before them; what comes beyond is asked for later."""
MAX_HELD_BYTES = 16 << 20
"""Of these together."""
MAX_NAMES = 1 << 19
"""Of one member, however many blocks it has: what comes beyond is left out."""
SLICE_BLOCKS = 256
"""Applied at once."""
FEW_NAMES = 1024
"""Taken back one by one."""
BYTES_A_BLOCK = 64
"""An event of so many bytes takes about as long to read as a block to apply."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class Want(Enum):
    """What a member has to be asked for."""

    NOTHING = "nothing"
    REPLAY = "replay"
    """All batches from `next_number` on."""
    SNAPSHOT = "snapshot"


class EventReader:
    """Tells an index what one member holds. Its messages raise MessageError alone, and do no harm then."""

    num_parts = 0
    """Of answers to what was wanted: an answer that still comes is not asked for again."""
    num_positions = 0
    """Answers to where the member stands."""
    num_applied = 0
    """Blocks that were stored or removed."""
    num_orphans = 0
    """Blocks that were left out because the one before them is not known."""
    num_incarnations = 0
    """Times the member was seen to have begun anew."""
    num_replays_short = 0
    """Gaps that the member could not fill."""

    def __init__(
        self,
        index: BlockIndex,
        member: str,
        model: str,
        block_size: int,
        num_blocks: int | None,
        *,
        has_snapshots: bool = True,
    ) -> None:
        self._index = index
        self.member = member
        self._model = model
        self._block_size = block_size
        """Blocks of another size are found by no prompt that goes there."""
        self._num_blocks = num_blocks
        """As many as the member says it has; None: it does not say."""
        self.is_trusted = True
        """The member has not named more blocks than it can have."""
        self._pending: deque[msgspec.Raw] = deque()
        """Events that are to be applied."""
        self._event: Iterator[int] | None = None
        """The one under way: each step applies some blocks, and says how many."""
        self.has_snapshots = has_snapshots
        """The member answers questions of our own."""
        self._theirs: dict[BlockHash, int] = {}
        """What the member calls a block -> its name here."""
        self._incarnation: bytes | None = None
        self._has_base = not has_snapshots
        """All batches before `next_number` have been applied, to whatever there was before them."""
        self._held: dict[int, bytes] = {}
        self._num_held_bytes = 0
        self._told_number = 0
        """The member says that all batches before this one are out."""
        self._last_s = 0.0
        self._piece: tuple[int, int] | None = None
        """The snapshot under way: its number, and its next piece."""
        self.next_number = 0
        """Of the batch that is to be applied next."""

    @property
    def num_blocks(self) -> int:
        """What the member holds, as far as it is known."""
        return len(self._theirs)

    @property
    def has_work(self) -> bool:
        """Something was heard and is not applied yet."""
        return self._event is not None or bool(self._pending) or self._has_next

    @property
    def _has_next(self) -> bool:
        """The batch whose turn it is was held back."""
        return self._has_base and self.next_number in self._held

    @property
    def has_gap(self) -> bool:
        """Something is known to be missing: asking should not wait."""
        return not self._has_base or (bool(self._held) and not self._has_next)

    @property
    def want(self) -> Want:
        """What is to be asked now, or as soon as what was asked before has been answered."""
        if not self._has_base:
            return Want.SNAPSHOT
        is_behind = bool(self._held) or self._told_number > self.next_number
        return Want.REPLAY if is_behind and not self._has_next else Want.NOTHING

    # -- what comes ----------------------------------------------------------------------------------------------------

    def hear_news(self, frames: Sequence[bytes]) -> None:
        """A published batch: topic, number, batch."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            raise MessageError(f"a published batch has a topic, a number and a batch, {len(frames)} parts came")
        self._hear_batch(frames[0], int.from_bytes(frames[1], "big"), frames[2])
        self.work()

    def hear_answer(self, frames: Sequence[bytes]) -> bool:
        """A part of an answer; whether it is the last one. Some members leave the topic out."""
        if not 3 <= len(frames) <= 4 or frames[0]:
            raise MessageError(f"an answer has an empty part and two or three others, {len(frames)} parts came")
        if frames[1] == OWN and len(frames) == 3:
            is_last = self._hear_own(decode_kv_answer(frames[2]))
            self.work()
            return is_last
        if len(frames[-2]) != NUMBER_BYTES:
            raise MessageError(f"a batch's number has {NUMBER_BYTES} bytes, {len(frames[-2])} came")
        self.num_parts += 1
        if frames[-2] == END:
            return True
        self._hear_batch(frames[1] if len(frames) == 4 else None, int.from_bytes(frames[-2], "big"), frames[-1])
        self.work()
        return False

    def replay_ended(self, first: int) -> None:
        """All that the member still had from this number on has come. If it has brought nothing, it never will."""
        if self.want is not Want.REPLAY or self.next_number != first:
            return
        self.num_replays_short += 1
        if self.has_snapshots:
            self._has_base = False
        else:
            self._forget()
            self.next_number = min(self._held, default=self._told_number)
            self.work()

    # -- the order of batches ------------------------------------------------------------------------------------------

    def _hear_batch(self, incarnation: bytes | None, number: int, batch: bytes) -> None:
        if number >> 63:
            raise MessageError(f"the number of a batch must be below 2**63, {number} came")
        self._meet(incarnation)
        if self._has_base and number < self.next_number and not self._is_of_new_incarnation(batch):
            return  # heard before
        if not self._has_base or number > self.next_number:
            self._hold(number, batch)
            return
        if number in self._held:
            self._let_go(number)
        self._open(batch)

    def _hold(self, number: int, batch: bytes) -> None:
        has_room = len(self._held) < MAX_HELD and self._num_held_bytes + len(batch) <= MAX_HELD_BYTES
        if has_room and number not in self._held:
            self._held[number] = batch
            self._num_held_bytes += len(batch)

    def _let_go(self, number: int) -> bytes:
        batch = self._held.pop(number)
        self._num_held_bytes -= len(batch)
        return batch

    def _meet(self, incarnation: bytes | None) -> None:
        if incarnation is None or incarnation == self._incarnation:
            return
        if self._incarnation is not None:
            self._begin_anew()
        self._incarnation = incarnation

    def _is_of_new_incarnation(self, batch: bytes) -> bool:
        """Whether numbers have begun again: one that is lower, of a later time. Incarnations with names tell it."""
        if self.has_snapshots or open_batch(batch).at_s <= self._last_s:
            return False
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._forget()
        self.num_incarnations += 1
        self._has_base = not self.has_snapshots
        self._held, self._num_held_bytes, self._piece = {}, 0, None
        self.next_number = self._told_number = 0

    # -- answers of our own --------------------------------------------------------------------------------------------

    def _hear_own(self, answer: KVAnswer) -> bool:
        self._meet(answer.incarnation)
        if isinstance(answer, Position):
            self._told_number = answer.number
            self.num_positions += 1
            return False
        self.num_parts += 1
        if isinstance(answer, SnapshotPiece):
            self._hear_piece(answer)
            return False
        if not self._has_base:
            if answer.num_pieces == 0:
                self._forget()
            if answer.num_pieces == 0 or self._piece == (answer.number, answer.num_pieces):
                self._based_at(answer.number)
            self._piece = None
        return True

    def _hear_piece(self, piece: SnapshotPiece) -> None:
        if self._has_base:
            return  # of one that was asked for twice
        if piece.index == 0:
            self._forget()
            self._piece = (piece.number, 0)
        if self._piece != (piece.number, piece.index):
            self._piece = None  # one is missing: the end will not fit
            return
        self._piece = None
        self._pending += open_batch(piece.batch).events
        self._piece = (piece.number, piece.index + 1)

    def _based_at(self, number: int) -> None:
        self._has_base, self.next_number = True, number
        for past in [at for at in self._held if at < number]:
            self._let_go(past)

    # -- what the index is told ----------------------------------------------------------------------------------------

    def _open(self, batch: bytes) -> None:
        self.next_number += 1
        try:
            heard = open_batch(batch)
        except MessageError:
            self._begin_without()
            raise
        self._last_s = heard.at_s
        self._pending += heard.events

    def sweep(self, now_s: float) -> None:
        """Take some of what was forgotten out of the index: as fast as it is put in, whoever asks for anything."""
        self._index.sweep(now_s)

    def work(self) -> None:
        """Apply some of what was heard. Raises MessageError for what cannot be."""
        num_blocks = 0
        while num_blocks < SLICE_BLOCKS and self.has_work:
            if self._event is not None:
                num_done = next(self._event, None)
                if num_done is None:
                    self._event = None
                self.num_applied += num_done or 0
                num_blocks += num_done or 1
            elif self._pending:
                num_blocks += self._read(self._pending.popleft())
            else:
                num_blocks += 1
                self._open(self._let_go(self.next_number))

    def _read(self, raw: msgspec.Raw) -> int:
        try:
            event = read_kv_event(raw)
        except MessageError:
            self._begin_without()
            raise
        self._event = None if event is None else self._applied(event)
        return 1 + len(memoryview(raw)) // BYTES_A_BLOCK

    def _begin_without(self) -> None:
        """What a batch said is not known: begin from a snapshot, or from nothing."""
        self._has_base, self._piece = not self.has_snapshots, None
        if self._has_base:
            self._forget()
        self._pending.clear()
        self._event = None

    def _applied(self, event: HeardEvent) -> Iterator[int]:
        """Each step is a part of an event: how many blocks it was about."""
        match event:
            case StoredRun():
                yield from self._stored(event)
            case RemovedBlocks(hashes):
                for at in range(0, len(hashes), SLICE_BLOCKS):
                    some = hashes[at : at + SLICE_BLOCKS]
                    names = [self._theirs.pop(one) for one in some if one in self._theirs]
                    self._index.removed(self.member, names)
                    yield len(some)
            case ClearedBlocks():
                self._clear()

    def _stored(self, run: StoredRun) -> Iterator[int]:
        if run.parent is None:
            before: int | None = root_name(self._model, run.adapter, run.cache_group)
        else:
            before = self._theirs.get(run.parent)
        if before is None or run.block_size != self._block_size:
            self.num_orphans += len(run.hashes)
            return
        for at in range(0, len(run.hashes), SLICE_BLOCKS):
            hashes = run.hashes[at : at + SLICE_BLOCKS]
            tokens = run.token_ids[at * run.block_size : (at + SLICE_BLOCKS) * run.block_size]
            if len(self._theirs) + sum(one not in self._theirs for one in hashes) > self._max_names:
                self._refuse_more()
                return
            names = names_of(before, tokens, run.block_size)
            self._theirs.update(zip(hashes, names, strict=True))
            self._index.stored(self.member, names)
            before = names[-1]
            yield len(hashes)

    @property
    def _max_names(self) -> int:
        return MAX_NAMES if self._num_blocks is None else min(MAX_NAMES, 2 * self._num_blocks)

    def _refuse_more(self) -> None:
        """A member without room for what it says it holds is not believed; one that is too large is, in part."""
        if self._num_blocks is None or self._max_names == MAX_NAMES:
            return
        self.is_trusted = False
        self._begin_without()
        raise MessageError(
            f"expected names of up to twice its {self._num_blocks} blocks, got more; it is not believed any more"
        )

    def _forget(self) -> None:
        """The member holds nothing, whatever it was about to say."""
        self._pending.clear()
        self._event = None
        self._clear()

    def _clear(self) -> None:
        """Where nothing was known, what is believed to come may still come. A few names are taken back one by one: a
        bit of the index is worth more."""
        names, self._theirs = self._theirs, {}
        if len(names) > FEW_NAMES:
            self._index.cleared(self.member)
        elif names:
            self._index.removed(self.member, [*names.values()])
