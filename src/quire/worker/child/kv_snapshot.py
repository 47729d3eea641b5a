"""Two requests beyond those of vLLM's replay socket, and how a worker responds to them.

    SNAPSHOT    every block that is cached now, in pieces of bounded size, then the number of the batch to go on with
    POSITION    which batch comes next, and of which incarnation of the publisher

A router that starts late, or has missed more than is kept, needs the first; one that may have missed the last batch of
all, with none after it, the second. A snapshot shows one moment; its pieces are made one at a time, each
between two steps. A request that comes meanwhile gets the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from quire.core.events import BlockStored
from quire.errors import MessageError

SNAPSHOT, POSITION = b"quire snapshot", b"quire position"
"""Not of eight bytes: such a request is a number."""
OWN = b"quire"
"""In the place of the topic of other responses."""
PIECE_BLOCKS = 512
MAX_WAITING = 256

Route = tuple[bytes, ...]
"""The frames before a response: its address."""
StoredEvents = Callable[[], Iterator[BlockStored]]


class _Answer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    incarnation: bytes
    """The topic of the publisher's batches: a new one in each incarnation, if configured so."""
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    """Of the batch to continue with."""


class Position(_Answer, frozen=True):
    """All batches before this number were sent."""


class SnapshotPiece(_Answer, frozen=True):
    """Some of the blocks that were cached when all batches before this number were sent."""

    index: int
    """Counted from 0 in each snapshot."""
    batch: bytes
    """As they are published: all are stored, parents before their children."""


class SnapshotEnd(_Answer, frozen=True):
    """The number of pieces before it."""

    num_pieces: int


KVAnswer = Position | SnapshotPiece | SnapshotEnd

encode_kv_answer = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(KVAnswer)


def decode_kv_answer(data: bytes) -> KVAnswer:
    """A publisher's response. Raises MessageError."""
    try:
        return _answers.decode(data)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"malformed response of a KV event publisher ({len(data)} bytes): {error}") from error


class SnapshotSender:
    """Makes one snapshot after the other for routes that wait."""

    def __init__(self, encode_batch: Callable[[Sequence[BlockStored]], bytes]) -> None:
        self.stored_events: StoredEvents | None = None
        """All that is cached now; None: not available, and requests get no response."""
        self._encode_batch = encode_batch
        self._waiting: dict[Route, None] = {}
        self._recipients: Sequence[Route] = ()
        """The routes that get the one under way."""
        self._left: Iterator[BlockStored] | None = None
        self._number = self._num_pieces = 0

    @property
    def has_work(self) -> bool:
        """A route waits."""
        return self._left is not None or bool(self._waiting)

    def request(self, route: Route) -> None:
        """Send this route the next snapshot that begins."""
        if self.stored_events is not None and len(self._waiting) < MAX_WAITING:
            self._waiting[route] = None

    def next_answer(self, incarnation: bytes, number: int) -> tuple[KVAnswer, Sequence[Route]] | None:
        """A little more, and its routes. All batches before `number` were sent; nothing has changed since."""
        if self._left is None:
            if not self._waiting or self.stored_events is None:
                return None
            self._recipients, self._waiting = tuple(self._waiting), {}
            self._left, self._number, self._num_pieces = self.stored_events(), number, 0
        events: list[BlockStored] = []
        num_blocks = 0
        for event in self._left:
            events.append(event)
            num_blocks += len(event.digests)
            if num_blocks >= PIECE_BLOCKS:
                break
        if not events:
            self._left = None
            return SnapshotEnd(incarnation, self._number, self._num_pieces), self._recipients
        self._num_pieces += 1
        piece = SnapshotPiece(incarnation, self._number, self._num_pieces - 1, self._encode_batch(events))
        return piece, self._recipients
