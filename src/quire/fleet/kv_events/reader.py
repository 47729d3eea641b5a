"""Converts one member's KV events into updates of the block index. Has no socket and no clock.

    published ─► receive_batch ────► in order? ─┬─ yes ─► router's block names ─► index
    responses ─► receive_response ─►            └─ no: held back; `want` is the request to send to the member

The router hashes a block's tokens and its parent's name to its own block names, so it needs no shared hash seed with
members: a member's block hash is only a lookup key. Batches are numbered. The subscriber requests missing batches; at
the start, and if the member no longer has them, it requests a snapshot of the cache. A restarted member (a new
incarnation) has an empty cache.

Other servers have no snapshots: after a gap that cannot be filled, the reader forgets their blocks and starts empty.

A batch may be long, so `receive_*` only opens it and applies its first blocks; the caller calls `work` to apply more
while `has_work`. Memory is bounded: names by twice the number of blocks that the member reported, held batches by
their bytes. A member that reports more stored blocks than that bound is no longer trusted.
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
"""Maximum batches held back until an earlier batch arrives. Further ones are dropped and requested again."""
MAX_HELD_BYTES = 16 << 20
"""Maximum total size of the held batches."""
MAX_NAMES = 1 << 19
"""Maximum names kept per member, even if it has more blocks; further blocks are skipped."""
SLICE_BLOCKS = 256
"""Blocks applied per call of `work`."""
FEW_NAMES = 1024
"""Up to this many names are removed one by one; more are cleared in bulk."""
BYTES_A_BLOCK = 64
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
        """The event in progress: each `next` applies some blocks and returns their number."""
        self.has_snapshots = has_snapshots
        """Whether the member supports quire's snapshot and position requests."""
        self._names_by_hash: dict[BlockHash, int] = {}
        """The member's block hash -> the router's block name."""
        self._incarnation: bytes | None = None
        self._has_base = not has_snapshots
        """Whether the index reflects a snapshot (if the member has any) and all batches before `next_number`."""
        self._held: dict[int, bytes] = {}
        self._num_held_bytes = 0
        self._published_number = 0
        """Number of the next batch that the member will publish, from its latest position response."""
        self._last_s = 0.0
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
        """Whether the next batch is among the held batches."""
        return self._has_base and self.next_number in self._held

    @property
    def has_gap(self) -> bool:
        """Whether a batch or the snapshot is known to be missing, so that it should be requested at once."""
        return not self._has_base or (bool(self._held) and not self._has_next)

    @property
    def want(self) -> MissingRange:
        """The data to request next, after the response to any previous request."""
        if not self._has_base:
            return MissingRange.SNAPSHOT
        is_behind = bool(self._held) or self._published_number > self.next_number
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
        """Note the end of a replay from batch `first`. If that batch did not arrive, the member no longer has it: start
        again from a snapshot, or from an empty cache."""
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
        """Whether a batch with a lower number but a later time shows a restart, for members without snapshots (a quire
        member's topic identifies the incarnation). If so, reset."""
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
        """Remove stale blocks from the index, at the rate at which it is filled, independent of requests."""
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
        """Restart from a snapshot, or from an empty cache, because a batch could not be read."""
        self._has_base, self._piece = not self.has_snapshots, None
        if self._has_base:
            self._forget()
        self._pending.clear()
        self._event = None

    def _applied(self, event: ReceivedEvent) -> Iterator[int]:
        """Apply an event in parts; yield the number of blocks of each part."""
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
        """Raise MessageError and stop trusting the member, unless `MAX_NAMES` is the limit: then skip the blocks."""
        if self._num_blocks is None or self._max_names == MAX_NAMES:
            return
        self.is_trusted = False
        self._begin_without()
        rule = f"expected names of up to twice its {self._num_blocks} blocks, got more; ignoring its KV events"
        raise MessageError(rule, code="too_many_names")

    def _forget(self) -> None:
        """Drop pending events, and all blocks of the member."""
        self._pending.clear()
        self._event = None
        self._clear()

    def _clear(self) -> None:
        """Remove the member's blocks from the index; one by one if few, which is cheaper than a new bit. If none are
        known, do nothing, because blocks that the router expects may still be stored."""
        names, self._names_by_hash = self._names_by_hash, {}
        if len(names) > FEW_NAMES:
            self._index.cleared(self.member)
        elif names:
            self._index.removed(self.member, [*names.values()])
