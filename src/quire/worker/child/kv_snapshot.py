"""Two questions that the field's replay socket does not know, and how a worker answers them.

    SNAPSHOT    every block that is cached now, in pieces of bounded size, then the number of the batch to go on with
    POSITION    which batch comes next, and of which incarnation of the publisher

A router that comes late, or has missed more than is kept, needs the first; one that may have missed the last batch of
all, after which none came, the second. A snapshot is the truth of one moment; its pieces are made one at a time, each
between two steps. Who asks meanwhile gets the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from quire.core.events import BlockStored
from quire.errors import MessageError

SNAPSHOT, POSITION = b"quire snapshot", b"quire position"
"""Not of eight bytes: such a question is a number."""
OWN = b"quire"
"""Stands where other answers have their topic."""
PIECE_BLOCKS = 512
MAX_WAITING = 256

Route = tuple[bytes, ...]
"""The frames before an answer: to whom it goes."""
StoredEvents = Callable[[], Iterator[BlockStored]]


class _Answer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    incarnation: bytes
    """The topic of the publisher's batches: another one in another incarnation, where it is made to tell that."""
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    """Of the batch to go on with."""


class Position(_Answer, frozen=True):
    """All batches before this number are out."""


class SnapshotPiece(_Answer, frozen=True):
    """Some of the blocks that were cached when all batches before this number were out."""

    index: int
    """Counted from 0 in each snapshot."""
    batch: bytes
    """As they are published: all are stored, parents before their children."""


class SnapshotEnd(_Answer, frozen=True):
    """There were so many pieces."""

    num_pieces: int


KVAnswer = Position | SnapshotPiece | SnapshotEnd

encode_kv_answer = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(KVAnswer)


def decode_kv_answer(data: bytes) -> KVAnswer:
    """What a publisher answers. Raises MessageError."""
    try:
        return _answers.decode(data)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes of a publisher of KV events are no answer: {error}") from error


class SnapshotSender:
    """Makes one snapshot after the other for those who wait."""

    def __init__(self, encode_batch: Callable[[Sequence[BlockStored]], bytes]) -> None:
        self.stored_events: StoredEvents | None = None
        """All that is cached now; None: nobody can tell, and questions stay without an answer."""
        self._encode_batch = encode_batch
        self._waiting: dict[Route, None] = {}
        self._asking: Sequence[Route] = ()
        """Who gets the one under way."""
        self._left: Iterator[BlockStored] | None = None
        self._number = self._num_pieces = 0

    @property
    def has_work(self) -> bool:
        """Somebody waits."""
        return self._left is not None or bool(self._waiting)

    def ask(self, route: Route) -> None:
        """Answer this one, with the next that is begun."""
        if self.stored_events is not None and len(self._waiting) < MAX_WAITING:
            self._waiting[route] = None

    def next_answer(self, incarnation: bytes, number: int) -> tuple[KVAnswer, Sequence[Route]] | None:
        """A little more, and for whom it is. All batches before `number` are out; nothing has changed since."""
        if self._left is None:
            if not self._waiting or self.stored_events is None:
                return None
            self._asking, self._waiting = tuple(self._waiting), {}
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
            return SnapshotEnd(incarnation, self._number, self._num_pieces), self._asking
        self._num_pieces += 1
        piece = SnapshotPiece(incarnation, self._number, self._num_pieces - 1, self._encode_batch(events))
        return piece, self._asking
