"""Converts one member's KV events into updates of the block index. Holds no socket and no clock.

    published ─► receive_batch ────► in order? ─┬─ yes ─► names of our own ─► index
    responses ─► receive_response ─►            └─ no: held back; `want` is what to request from the member

Names are the router's own, made of a parent's name and tokens, so members need share no secret: a member's hash of a
block is only looked up. Each batch has a number. A missing one is requested; if the member no longer keeps it, or at
the beginning, a snapshot of its cache is. A new incarnation of a member holds no blocks of the one before.

Other servers have no snapshots: their blocks are known since the last gap that could not be closed.

The sender decides how long a batch is, so `receive_*` only opens it, and applies its first blocks; `work` applies some
more, for as long as `has_work`. Storage is bounded by the size that the member reported: names by twice its blocks,
waiting batches by their bytes. A member that names more blocks than that is not trusted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec

from quire.errors import MessageError
from quire.fleet.kv_events.batches import (
    BlockHash,
    ClearedBlocks,
    ReceivedEvent,
    RemovedBlocks,
    StoredRun,
    open_batch,
    read_kv_event,
)
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.block_names import names_of, root_name
from quire.worker.child.kv_snapshot import OWN, KVAnswer, Position, SnapshotPiece, decode_kv_answer

MAX_HELD = 1000
"""Batches that wait for one before them; later ones are requested again."""
MAX_HELD_BYTES = 16 << 20
"""Of these together."""
MAX_NAMES = 1 << 19
"""Of one member, however many blocks it has: further blocks are skipped."""
SLICE_BLOCKS = 256
"""Applied at once."""
FEW_NAMES = 1024
"""Removed one by one."""
BYTES_A_BLOCK = 64
"""An event of so many bytes takes about as long to read as a block to apply."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class MissingRange(Enum):
    """What to request from a member."""

    NOTHING = "nothing"
    REPLAY = "replay"
    """All batches from `next_number` on."""
    SNAPSHOT = "snapshot"


class EventReader:
    """Updates an index with one member's blocks. Its messages raise MessageError alone, and do no harm then."""

    num_parts = 0
    """Parts of responses: while some come, the request is not repeated."""
    num_positions = 0
    """Responses with the member's position."""
    num_applied = 0
    """Blocks that were stored or removed."""
    num_orphans = 0
    """Blocks that were skipped because the one before them is not known."""
    num_incarnations = 0
    """Restarts of the member that were seen."""
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
        """Blocks of another size are hit by no prompt that goes there."""
        self._num_blocks = num_blocks
        """The number of blocks that the member reported; None: it did not."""
        self.is_trusted = True
        """The member has not named more blocks than it can have."""
        self._pending: deque[msgspec.Raw] = deque()
        """Events to apply."""
        self._event: Iterator[int] | None = None
        """The one under way: each step applies some blocks, and returns how many."""
        self.has_snapshots = has_snapshots
        """The member supports quire's own requests."""
        self._names_by_hash: dict[BlockHash, int] = {}
        """The member's hash of a block -> its name here."""
        self._incarnation: bytes | None = None
        self._has_base = not has_snapshots
        """All batches before `next_number` have been applied, to the snapshot before them."""
        self._held: dict[int, bytes] = {}
        self._num_held_bytes = 0
        self._published_number = 0
        """The member has published all batches before this one."""
        self._last_s = 0.0
        self._piece: tuple[int, int] | None = None
        """The snapshot under way: its number, and its next piece."""
        self.next_number = 0
        """Of the batch to apply next."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the member holds, as far as is known."""
        return len(self._names_by_hash)

    @property
    def has_work(self) -> bool:
        """A message was received and is not applied yet."""
        return self._event is not None or bool(self._pending) or self._has_next

    @property
    def _has_next(self) -> bool:
        """The next batch was held back."""
        return self._has_base and self.next_number in self._held

    @property
    def has_gap(self) -> bool:
        """A batch is known to be missing: the request should not wait."""
        return not self._has_base or (bool(self._held) and not self._has_next)

    @property
    def want(self) -> MissingRange:
        """What to request now, or after the response to the previous request."""
        if not self._has_base:
            return MissingRange.SNAPSHOT
        is_behind = bool(self._held) or self._published_number > self.next_number
        return MissingRange.REPLAY if is_behind and not self._has_next else MissingRange.NOTHING

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive_batch(self, frames: Sequence[bytes]) -> None:
        """A published batch: topic, number, batch."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            raise MessageError(f"expected a topic, a number and a batch, got {len(frames)} frames")
        self._take_batch(frames[0], int.from_bytes(frames[1], "big"), frames[2])
        self.work()

    def receive_response(self, frames: Sequence[bytes]) -> bool:
        """A part of a response; whether it is the last one. Some members leave the topic out."""
        if not 3 <= len(frames) <= 4 or frames[0]:
            raise MessageError(f"expected an empty frame and two or three others, got {len(frames)} frames")
        if frames[1] == OWN and len(frames) == 3:
            is_last = self._take_own(decode_kv_answer(frames[2]))
            self.work()
            return is_last
        if len(frames[-2]) != NUMBER_BYTES:
            raise MessageError(f"expected a batch number of {NUMBER_BYTES} bytes, got {len(frames[-2])}")
        self.num_parts += 1
        if frames[-2] == END:
            return True
        self._take_batch(frames[1] if len(frames) == 4 else None, int.from_bytes(frames[-2], "big"), frames[-1])
        self.work()
        return False

    def replay_ended(self, first: int) -> None:
        """The response to a replay from this number is complete. If it brought nothing, it never will."""
        if self.want is not MissingRange.REPLAY or self.next_number != first:
            return
        self.num_replays_short += 1
        if self.has_snapshots:
            self._has_base = False
        else:
            self._forget()
            self.next_number = min(self._held, default=self._published_number)
            self.work()

    # -- the order of batches ------------------------------------------------------------------------------------------

    def _take_batch(self, incarnation: bytes | None, number: int, batch: bytes) -> None:
        if number >> 63:
            raise MessageError(f"expected a batch number below 2**63, got {number}")
        self._note_incarnation(incarnation)
        if self._has_base and number < self.next_number and not self._is_of_new_incarnation(batch):
            return  # received before
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

    def _note_incarnation(self, incarnation: bytes | None) -> None:
        if incarnation is None or incarnation == self._incarnation:
            return
        if self._incarnation is not None:
            self._begin_anew()
        self._incarnation = incarnation

    def _is_of_new_incarnation(self, batch: bytes) -> bool:
        """Whether numbers have restarted: a lower one, of a later time. With snapshots the topic shows it."""
        if self.has_snapshots or open_batch(batch).at_s <= self._last_s:
            return False
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._forget()
        self.num_incarnations += 1
        self._has_base = not self.has_snapshots
        self._held, self._num_held_bytes, self._piece = {}, 0, None
        self.next_number = self._published_number = 0

    # -- quire's own responses -----------------------------------------------------------------------------------------

    def _take_own(self, answer: KVAnswer) -> bool:
        self._note_incarnation(answer.incarnation)
        if isinstance(answer, Position):
            self._published_number = answer.number
            self.num_positions += 1
            return False
        self.num_parts += 1
        if isinstance(answer, SnapshotPiece):
            self._take_piece(answer)
            return False
        if not self._has_base:
            if answer.num_pieces == 0:
                self._forget()
            if answer.num_pieces == 0 or self._piece == (answer.number, answer.num_pieces):
                self._based_at(answer.number)
            self._piece = None
        return True

    def _take_piece(self, piece: SnapshotPiece) -> None:
        if self._has_base:
            return  # of a snapshot that was requested twice
        if piece.index == 0:
            self._forget()
            self._piece = (piece.number, 0)
        if self._piece != (piece.number, piece.index):
            self._piece = None  # one is missing: the end will not match
            return
        self._piece = None
        self._pending += open_batch(piece.batch).events
        self._piece = (piece.number, piece.index + 1)

    def _based_at(self, number: int) -> None:
        self._has_base, self.next_number = True, number
        for past in [at for at in self._held if at < number]:
            self._let_go(past)

    # -- updates of the index ------------------------------------------------------------------------------------------

    def _open(self, batch: bytes) -> None:
        self.next_number += 1
        try:
            opened = open_batch(batch)
        except MessageError:
            self._begin_without()
            raise
        self._last_s = opened.at_s
        self._pending += opened.events

    def sweep(self, now_s: float) -> None:
        """Sweep the index of forgotten blocks: as fast as it is filled, independent of requests."""
        self._index.sweep(now_s)

    def work(self) -> None:
        """Apply some of what was received. Raises MessageError for what is invalid."""
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
        """A batch could not be read: restart from a snapshot, or from nothing."""
        self._has_base, self._piece = not self.has_snapshots, None
        if self._has_base:
            self._forget()
        self._pending.clear()
        self._event = None

    def _applied(self, event: ReceivedEvent) -> Iterator[int]:
        """Each step applies a part of an event: the number of its blocks."""
        match event:
            case StoredRun():
                yield from self._stored(event)
            case RemovedBlocks(hashes):
                for at in range(0, len(hashes), SLICE_BLOCKS):
                    some = hashes[at : at + SLICE_BLOCKS]
                    names = [self._names_by_hash.pop(one) for one in some if one in self._names_by_hash]
                    self._index.removed(self.member, names)
                    yield len(some)
            case ClearedBlocks():
                self._clear()

    def _stored(self, run: StoredRun) -> Iterator[int]:
        if run.parent is None:
            before: int | None = root_name(self._model, run.adapter, run.cache_group)
        else:
            before = self._names_by_hash.get(run.parent)
        if before is None or run.block_size != self._block_size:
            self.num_orphans += len(run.hashes)
            return
        for at in range(0, len(run.hashes), SLICE_BLOCKS):
            hashes = run.hashes[at : at + SLICE_BLOCKS]
            tokens = run.token_ids[at * run.block_size : (at + SLICE_BLOCKS) * run.block_size]
            if len(self._names_by_hash) + sum(one not in self._names_by_hash for one in hashes) > self._max_names:
                self._refuse_more()
                return
            names = names_of(before, tokens, run.block_size)
            self._names_by_hash.update(zip(hashes, names, strict=True))
            self._index.stored(self.member, names)
            before = names[-1]
            yield len(hashes)

    @property
    def _max_names(self) -> int:
        return MAX_NAMES if self._num_blocks is None else min(MAX_NAMES, 2 * self._num_blocks)

    def _refuse_more(self) -> None:
        """A member that names more blocks than it has is not trusted; of a very large one the rest is skipped."""
        if self._num_blocks is None or self._max_names == MAX_NAMES:
            return
        self.is_trusted = False
        self._begin_without()
        rule = f"expected names of up to twice its {self._num_blocks} blocks, got more; ignoring its KV events"
        raise MessageError(rule, code="too_many_names")

    def _forget(self) -> None:
        """The member holds nothing, and pending events are dropped."""
        self._pending.clear()
        self._event = None
        self._clear()

    def _clear(self) -> None:
        """Where nothing was known, expected blocks may still come. A few names are removed one by one: that is cheaper
        than a bit of the index."""
        names, self._names_by_hash = self._names_by_hash, {}
        if len(names) > FEW_NAMES:
            self._index.cleared(self.member)
        elif names:
            self._index.removed(self.member, [*names.values()])
