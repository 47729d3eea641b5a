"""Converts one member's KV events into updates of the block index. Has no socket and no clock.

    published ─► receive_batch ────► in order? ─┬─ yes ─► router's block names ─► index
    responses ─► receive_response ─►            └─ no: held back; `missing` is the data to request next

The router hashes a block's tokens and its parent's name to its own block names, so it needs no shared hash seed with
members: a member's block hash is only a lookup key. Batches are numbered. The subscriber requests missing batches; at
the start, and if the member no longer has them, it requests a snapshot of the cache. A restarted member (a new
incarnation) has an empty cache.

Other servers have no snapshots: after a gap that cannot be filled, the reader forgets their blocks and starts empty.

A batch may be long, so `receive_*` only opens it and applies its first blocks; the caller calls `work` to apply more
while `has_work`. Memory is bounded: names by twice the number of blocks that the member reported, held batches by
their bytes. A member that reports more stored blocks than the first bound is no longer trusted.
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
from quire.worker.child.kv_snapshot import QUIRE_TOPIC, KVAnswer, Position, SnapshotPiece, decode_kv_answer

MAX_HELD = 1000
"""Maximum number of batches that wait for an earlier batch. Further ones are dropped and requested again."""
MAX_HELD_BYTES = 16 << 20
"""Maximum total size of the held batches."""
MAX_NAMES = 1 << 19
"""Maximum block names of a member, even if it has more blocks; further blocks are skipped."""
SLICE_BLOCKS = 256
"""Blocks applied per call of `work`."""
FEW_NAMES = 1024
"""Up to this number, a member's names are removed one by one; more are cleared in bulk."""
BYTES_PER_BLOCK = 64
"""Event size whose parsing takes about as long as applying one block."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class MissingRange(Enum):
    """The kind of data to request from a member."""

    NOTHING = "nothing"
    REPLAY = "replay"
    """All batches from `next_number`."""
    SNAPSHOT = "snapshot"


class EventReader:
    """Updates an index with one member's blocks. Invalid messages raise MessageError and leave the reader usable."""

    num_parts = 0
    """Response parts received; while this number grows, the subscriber does not repeat its request."""
    num_positions = 0
    """Responses received with the member's position (its next batch number)."""
    num_applied = 0
    """Stored and removed blocks applied to the index."""
    num_orphans = 0
    """Stored blocks skipped because their parent is unknown or their block size is wrong."""
    num_incarnations = 0
    """Restarts of the member detected."""
    num_replays_short = 0
    """Replays that did not fill the gap."""

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
        """The member's block size; stored blocks of another size are ignored."""
        self._num_blocks = num_blocks
        """Cache size in blocks that the member reported; None if it reported none."""
        self.is_trusted = True
        """False once the member has reported more stored blocks than its cache can hold."""
        self._pending: deque[msgspec.Raw] = deque()
        self._event: Iterator[int] | None = None
        """The event in progress, an iterator of `_apply`."""
        self.has_snapshots = has_snapshots
        """Whether the member supports quire's snapshot and position requests."""
        self._names_by_hash: dict[BlockHash, int] = {}
        """The member's block hash -> the router's block name."""
        self._incarnation: bytes | None = None
        self._has_base = not has_snapshots
        """Whether the index reflects a snapshot (if the member has any) and all batches before `next_number`."""
        self._held_batches: dict[int, bytes] = {}
        self._num_held_bytes = 0
        self._published_number = 0
        """Number of the next batch that the member will publish, from its latest position response."""
        self._last_time_s = 0.0
        self._piece: tuple[int, int] | None = None
        """The snapshot in progress: its batch number and the index of its next piece."""
        self.next_number = 0
        """Number of the next batch to apply."""

    @property
    def num_blocks(self) -> int:
        """Known cached blocks of the member."""
        return len(self._names_by_hash)

    @property
    def has_work(self) -> bool:
        """Whether received events are not applied yet."""
        return self._event is not None or bool(self._pending) or self._has_next

    @property
    def _has_next(self) -> bool:
        """Whether the next batch to apply is among the held batches."""
        return self._has_base and self.next_number in self._held_batches

    @property
    def has_gap(self) -> bool:
        """Whether a batch or the snapshot is known to be missing, so that it should be requested at once."""
        return not self._has_base or (bool(self._held_batches) and not self._has_next)

    @property
    def missing(self) -> MissingRange:
        """The data to request next, after the response to any previous request."""
        if not self._has_base:
            return MissingRange.SNAPSHOT
        is_behind = bool(self._held_batches) or self._published_number > self.next_number
        return MissingRange.REPLAY if is_behind and not self._has_next else MissingRange.NOTHING

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive_batch(self, frames: Sequence[bytes]) -> None:
        """Handle a published message: topic, batch number, batch. Raises MessageError."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            raise MessageError(f"expected a topic, a number and a batch, got {len(frames)} frames")
        self._take_batch(frames[0], int.from_bytes(frames[1], "big"), frames[2])
        self.work()

    def receive_response(self, frames: Sequence[bytes]) -> bool:
        """Handle one part of a response; return whether it is the last part. Some servers send no topic frame."""
        if not 3 <= len(frames) <= 4 or frames[0]:
            raise MessageError(f"expected an empty frame and two or three others, got {len(frames)} frames")
        if frames[1] == QUIRE_TOPIC and len(frames) == 3:
            is_last = self._take_quire_response(decode_kv_answer(frames[2]))
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

    def end_replay(self, first_number: int) -> None:
        """Handle the end of a replay from this batch. If the batch did not arrive, the member no longer has it: start
        again from a snapshot, or from an empty cache."""
        if self.missing is not MissingRange.REPLAY or self.next_number != first_number:
            return
        self.num_replays_short += 1
        if self.has_snapshots:
            self._has_base = False
        else:
            self._forget()
            self.next_number = min(self._held_batches, default=self._published_number)
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
        if number in self._held_batches:
            self._pop_held(number)
        self._open_next(batch)

    def _hold(self, number: int, batch: bytes) -> None:
        has_room = len(self._held_batches) < MAX_HELD and self._num_held_bytes + len(batch) <= MAX_HELD_BYTES
        if has_room and number not in self._held_batches:
            self._held_batches[number] = batch
            self._num_held_bytes += len(batch)

    def _pop_held(self, number: int) -> bytes:
        batch = self._held_batches.pop(number)
        self._num_held_bytes -= len(batch)
        return batch

    def _note_incarnation(self, incarnation: bytes | None) -> None:
        if incarnation is None or incarnation == self._incarnation:
            return
        if self._incarnation is not None:
            self._start_incarnation()
        self._incarnation = incarnation

    def _is_of_new_incarnation(self, batch: bytes) -> bool:
        """Whether a batch with a lower number but a later time shows a restart, for members without snapshots (a quire
        member's topic identifies the incarnation). If so, reset."""
        if self.has_snapshots or open_batch(batch).time_s <= self._last_time_s:
            return False
        self._start_incarnation()
        return True

    def _start_incarnation(self) -> None:
        self._forget()
        self.num_incarnations += 1
        self._has_base = not self.has_snapshots
        self._held_batches, self._num_held_bytes, self._piece = {}, 0, None
        self.next_number = self._published_number = 0

    # -- quire's own responses -----------------------------------------------------------------------------------------

    def _take_quire_response(self, response: KVAnswer) -> bool:
        self._note_incarnation(response.incarnation)
        if isinstance(response, Position):
            self._published_number = response.number
            self.num_positions += 1
            return False
        self.num_parts += 1
        if isinstance(response, SnapshotPiece):
            self._take_piece(response)
            return False
        if not self._has_base:
            if response.num_pieces == 0:
                self._forget()
            if response.num_pieces == 0 or self._piece == (response.number, response.num_pieces):
                self._set_base(response.number)
            self._piece = None
        return True

    def _take_piece(self, piece: SnapshotPiece) -> None:
        if self._has_base:
            return  # part of a duplicate snapshot
        if piece.index == 0:
            self._forget()
            self._piece = (piece.number, 0)
        if self._piece != (piece.number, piece.index):
            self._piece = None  # a piece is missing: the SnapshotEnd will not match
            return
        self._piece = None
        self._pending += open_batch(piece.batch).events
        self._piece = (piece.number, piece.index + 1)

    def _set_base(self, number: int) -> None:
        self._has_base, self.next_number = True, number
        for old_number in [held_number for held_number in self._held_batches if held_number < number]:
            self._pop_held(old_number)

    # -- updates of the index ------------------------------------------------------------------------------------------

    def _open_next(self, batch: bytes) -> None:
        self.next_number += 1
        try:
            opened_batch = open_batch(batch)
        except MessageError:
            self._restart()
            raise
        self._last_time_s = opened_batch.time_s
        self._pending += opened_batch.events

    def sweep(self, now_s: float) -> None:
        """Remove stale blocks from the index, so that this also happens without requests. Call it after `work`."""
        self._index.sweep(now_s)

    def work(self) -> None:
        """Apply about `SLICE_BLOCKS` received blocks. Raises MessageError for invalid events."""
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
                self._open_next(self._pop_held(self.next_number))

    def _read(self, raw: msgspec.Raw) -> int:
        try:
            event = read_kv_event(raw)
        except MessageError:
            self._restart()
            raise
        self._event = None if event is None else self._apply(event)
        return 1 + len(memoryview(raw)) // BYTES_PER_BLOCK

    def _restart(self) -> None:
        """Restart from a snapshot, or from an empty cache, because a batch could not be read."""
        self._has_base, self._piece = not self.has_snapshots, None
        if self._has_base:
            self._forget()
        self._pending.clear()
        self._event = None

    def _apply(self, event: ReceivedEvent) -> Iterator[int]:
        """Apply an event in parts, one per `next`; yield the number of blocks of each part."""
        match event:
            case StoredRun():
                yield from self._apply_stored(event)
            case RemovedBlocks(hashes):
                for start in range(0, len(hashes), SLICE_BLOCKS):
                    part = hashes[start : start + SLICE_BLOCKS]
                    names = [self._names_by_hash.pop(digest) for digest in part if digest in self._names_by_hash]
                    self._index.remove_blocks(self.member, names)
                    yield len(part)
            case ClearedBlocks():
                self._clear()

    def _apply_stored(self, run: StoredRun) -> Iterator[int]:
        if run.parent is None:
            parent_name: int | None = root_name(self._model, run.adapter, run.cache_group)
        else:
            parent_name = self._names_by_hash.get(run.parent)
        if parent_name is None or run.block_size != self._block_size:
            self.num_orphans += len(run.hashes)
            return
        for start in range(0, len(run.hashes), SLICE_BLOCKS):
            hashes = run.hashes[start : start + SLICE_BLOCKS]
            tokens = run.token_ids[start * run.block_size : (start + SLICE_BLOCKS) * run.block_size]
            if len(self._names_by_hash) + sum(digest not in self._names_by_hash for digest in hashes) > self._max_names:
                self._reject_names()
                return
            names = names_of(parent_name, tokens, run.block_size)
            self._names_by_hash.update(zip(hashes, names, strict=True))
            self._index.add_blocks(self.member, names)
            parent_name = names[-1]
            yield len(hashes)

    @property
    def _max_names(self) -> int:
        return MAX_NAMES if self._num_blocks is None else min(MAX_NAMES, 2 * self._num_blocks)

    def _reject_names(self) -> None:
        """Raise MessageError and stop trusting the member, unless `MAX_NAMES` is the limit: then skip the blocks."""
        if self._num_blocks is None or self._max_names == MAX_NAMES:
            return
        self.is_trusted = False
        self._restart()
        message = f"expected at most twice its {self._num_blocks} blocks, got more; ignoring its KV events"
        raise MessageError(message, code="too_many_names")

    def _forget(self) -> None:
        """Drop pending events, and all blocks of the member."""
        self._pending.clear()
        self._event = None
        self._clear()

    def _clear(self) -> None:
        """Remove the member's blocks from the index: a few one by one, which is cheaper than a new bit. Without known
        blocks, do nothing, because the member may still store the blocks that the router expects."""
        names, self._names_by_hash = self._names_by_hash, {}
        if len(names) > FEW_NAMES:
            self._index.clear_blocks(self.member)
        elif names:
            self._index.remove_blocks(self.member, [*names.values()])
