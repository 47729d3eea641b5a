"""Two requests in addition to those of vLLM's replay socket, and a worker's responses.

    SNAPSHOT    all cached blocks, in pieces of bounded size, then the number of the next batch
    POSITION    the number of the next batch, and the publisher's incarnation

A router requests a snapshot if it starts late or has missed batches that are no longer kept. It requests the position
to detect that it missed the most recent batch. All pieces of a snapshot describe one point in time; one piece is sent
between two steps. A request that arrives during a snapshot gets the next snapshot.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from quire.core.events import BlockStored
from quire.engine.calls import wire_decoder

SNAPSHOT, POSITION = b"quire snapshot", b"quire position"
"""Never eight bytes long: an eight-byte request is a batch number."""
QUIRE_TOPIC = b"quire"
"""Sent in place of a topic, to distinguish these responses from batches."""
PIECE_BLOCKS = 512
MAX_WAITING = 256

Route = tuple[bytes, ...]
"""The routing frames before a response: the client's address."""
StoredEvents = Callable[[], Iterator[BlockStored]]


class _Answer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    incarnation: bytes
    """The topic of the publisher's batches. If so configured, it is new in each incarnation (process) of a worker."""
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    """Number of the next batch."""


class Position(_Answer, frozen=True):
    """All batches before this number were sent."""


class SnapshotPiece(_Answer, frozen=True):
    """Part of the blocks that were cached when all batches before this number had been sent."""

    index: int
    """Counted from 0 in each snapshot."""
    batch: bytes
    """A batch as published: only BlockStored events, parents before children."""


class SnapshotEnd(_Answer, frozen=True):
    """The end of a snapshot, with its number of pieces."""

    num_pieces: int


KVAnswer = Position | SnapshotPiece | SnapshotEnd

encode_kv_answer = msgspec.msgpack.Encoder().encode
decode_kv_answer: Callable[[bytes], KVAnswer] = wire_decoder(KVAnswer, "response of a KV event publisher")
"""Decode a publisher's response. Raises MessageError."""


class SnapshotSender:
    """Makes snapshots one after another, each for all routes that requested one before it began."""

    def __init__(self, encode_batch: Callable[[Sequence[BlockStored]], bytes]) -> None:
        self.stored_events: StoredEvents | None = None
        """Iterates over all cached blocks; None: snapshots are unavailable, and requests get no response."""
        self._encode_batch = encode_batch
        self._waiting_routes: dict[Route, None] = {}
        self._recipients: Sequence[Route] = ()
        """The routes of the snapshot in progress."""
        self._remaining_events: Iterator[BlockStored] | None = None
        self._number = self._num_pieces = 0

    @property
    def has_work(self) -> bool:
        """Whether a snapshot is in progress or requested."""
        return self._remaining_events is not None or bool(self._waiting_routes)

    def request(self, route: Route) -> None:
        """Send this route the next snapshot. Ignored if MAX_WAITING routes are waiting already."""
        if self.stored_events is not None and len(self._waiting_routes) < MAX_WAITING:
            self._waiting_routes[route] = None

    def next_answer(self, incarnation: bytes, number: int) -> tuple[KVAnswer, Sequence[Route]] | None:
        """Return the next response and its routes. All batches before `number` are sent; the cache is still as then."""
        if self._remaining_events is None:
            if not self._waiting_routes or self.stored_events is None:
                return None
            self._recipients, self._waiting_routes = tuple(self._waiting_routes), {}
            self._remaining_events, self._number, self._num_pieces = self.stored_events(), number, 0
        events: list[BlockStored] = []
        num_blocks = 0
        for event in self._remaining_events:
            events.append(event)
            num_blocks += len(event.digests)
            if num_blocks >= PIECE_BLOCKS:
                break
        if not events:
            self._remaining_events = None
            return SnapshotEnd(incarnation, self._number, self._num_pieces), self._recipients
        self._num_pieces += 1
        piece = SnapshotPiece(incarnation, self._number, self._num_pieces - 1, self._encode_batch(events))
        return piece, self._recipients
