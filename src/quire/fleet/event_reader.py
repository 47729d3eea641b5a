"""One member's KV events, turned into what the index of blocks is told. Holds no socket and no clock.

    published ─► hear_news ──► in order? ─┬─ yes ─► names of our own ─► index
    answers ──► hear_answer ──►           └─ no: held back; `want` says what to ask the member for

Names are the router's own, made of a parent's name and tokens, so members need share no secret: what a member calls a
block is only looked up. Each batch has a number. One that is missing is asked for; if the member keeps it no more, or
at the beginning, a snapshot of all it holds is. A member that begins a new incarnation holds nothing of the one before.

Members of other makes have no snapshots: of them is known what was heard since the last gap that could not be closed.
"""

from collections.abc import Sequence
from enum import Enum

from quire.errors import MessageError
from quire.fleet.event_batches import BlockHash, ClearedBlocks, HeardEvent, RemovedBlocks, StoredRun, decode_batch
from quire.fleet.index import BlockIndex
from quire.fleet.names import names_of, root_name
from quire.worker.kv_snapshot import OWN, KVAnswer, Position, SnapshotPiece, decode_kv_answer

MAX_HELD = 1000
"""Batches that wait for one before them; what comes beyond is asked for later."""
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

    def __init__(self, index: BlockIndex, member: str, model: str, *, has_snapshots: bool = True) -> None:
        self._index = index
        self._member = member
        self._model = model
        self.has_snapshots = has_snapshots
        """The member answers questions of our own."""
        self._theirs: dict[BlockHash, int] = {}
        """What the member calls a block -> its name here."""
        self._incarnation: bytes | None = None
        self._has_base = not has_snapshots
        """All batches before `next_number` have been applied, to whatever there was before them."""
        self._held: dict[int, bytes] = {}
        self._told_number = 0
        """The member says that all batches before this one are out."""
        self._last_s = 0.0
        self._piece: tuple[int, int] | None = None
        """The snapshot under way: its number, and its next piece."""
        self.next_number = 0
        """Of the batch that is to be applied next."""
        self.num_parts = 0
        """Of answers to what was wanted: an answer that still comes is not asked for again."""
        self.num_positions = 0
        """Answers to where the member stands."""
        self.num_orphans = 0
        """Blocks that were left out because the one before them is not known."""
        self.num_incarnations = 0
        """Times the member was seen to have begun anew."""
        self.num_replays_short = 0
        """Gaps that the member could not fill."""

    @property
    def num_blocks(self) -> int:
        """What the member holds, as far as it is known."""
        return len(self._theirs)

    @property
    def has_gap(self) -> bool:
        """Something is known to be missing: asking should not wait."""
        return not self._has_base or bool(self._held)

    @property
    def want(self) -> Want:
        """What is to be asked now, or as soon as what was asked before has been answered."""
        if not self._has_base:
            return Want.SNAPSHOT
        return Want.REPLAY if self._held or self._told_number > self.next_number else Want.NOTHING

    # -- what comes ----------------------------------------------------------------------------------------------------

    def hear_news(self, frames: Sequence[bytes]) -> None:
        """A published batch: topic, number, batch."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            raise MessageError(f"a published batch has a topic, a number and a batch, {len(frames)} parts came")
        self._hear_batch(frames[0], int.from_bytes(frames[1], "big"), frames[2])

    def hear_answer(self, frames: Sequence[bytes]) -> bool:
        """A part of an answer; whether it is the last one. Some members leave the topic out."""
        if not 3 <= len(frames) <= 4 or frames[0]:
            raise MessageError(f"an answer has an empty part and two or three others, {len(frames)} parts came")
        if frames[1] == OWN and len(frames) == 3:
            return self._hear_own(decode_kv_answer(frames[2]))
        if len(frames[-2]) != NUMBER_BYTES:
            raise MessageError(f"a batch's number has {NUMBER_BYTES} bytes, {len(frames[-2])} came")
        self.num_parts += 1
        if frames[-2] == END:
            return True
        self._hear_batch(frames[1] if len(frames) == 4 else None, int.from_bytes(frames[-2], "big"), frames[-1])
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
            self._go_on()

    # -- the order of batches ------------------------------------------------------------------------------------------

    def _hear_batch(self, incarnation: bytes | None, number: int, batch: bytes) -> None:
        if number >> 63:
            raise MessageError(f"the number of a batch must be below 2**63, {number} came")
        self._meet(incarnation)
        if self._has_base and number < self.next_number and not self._is_of_new_incarnation(batch):
            return  # heard before
        if not self._has_base or number > self.next_number:
            if len(self._held) < MAX_HELD:
                self._held[number] = batch
            return
        self._apply(batch)
        self._go_on()

    def _go_on(self) -> None:
        """Apply what was held back for as far as it goes."""
        while self._held and (batch := self._held.pop(self.next_number, None)) is not None:
            self._apply(batch)

    def _meet(self, incarnation: bytes | None) -> None:
        if incarnation is None or incarnation == self._incarnation:
            return
        if self._incarnation is not None:
            self._begin_anew()
        self._incarnation = incarnation

    def _is_of_new_incarnation(self, batch: bytes) -> bool:
        """Whether numbers have begun again: one that is lower, of a later time. Incarnations with names tell it."""
        if self.has_snapshots or decode_batch(batch).at_s <= self._last_s:
            return False
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._forget()
        self.num_incarnations += 1
        self._has_base = not self.has_snapshots
        self._held, self._piece = {}, None
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
        for event in decode_batch(piece.batch).events:
            self._tell(event)
        self._piece = (piece.number, piece.index + 1)

    def _based_at(self, number: int) -> None:
        self._has_base, self.next_number = True, number
        self._held = {at: batch for at, batch in self._held.items() if at >= number}
        self._go_on()

    # -- what the index is told ----------------------------------------------------------------------------------------

    def _apply(self, batch: bytes) -> None:
        self.next_number += 1
        try:
            heard = decode_batch(batch)
        except MessageError:
            # What it said is not known: begin from a snapshot, or from nothing.
            self._has_base = not self.has_snapshots
            if self._has_base:
                self._forget()
            raise
        self._last_s = heard.at_s
        for event in heard.events:
            self._tell(event)

    def _tell(self, event: HeardEvent) -> None:
        match event:
            case StoredRun():
                self._store(event)
            case RemovedBlocks(hashes):
                names = [self._theirs.pop(one) for one in hashes if one in self._theirs]
                self._index.removed(self._member, names)
            case ClearedBlocks():
                self._forget()

    def _store(self, run: StoredRun) -> None:
        if run.parent is None:
            before: int | None = root_name(self._model, run.adapter, run.cache_group)
        else:
            before = self._theirs.get(run.parent)
        if before is None:
            self.num_orphans += len(run.hashes)
            return
        names = names_of(before, run.token_ids, run.block_size)
        self._theirs.update(zip(run.hashes, names, strict=True))
        self._index.stored(self._member, names)

    def _forget(self) -> None:
        """The member holds nothing. Where nothing was known, what is believed to come may still come."""
        if self._theirs:
            self._theirs = {}
            self._index.cleared(self._member)
