"""KV-cache events for routers, in the format of vLLM: msgpack over a ZMQ publisher.

    PUB     [topic][number: 8 bytes, big-endian][batch]           one batch for each step that changed anything
    ROUTER  a client requests batches from a number on and gets every one that is still kept, then an end mark
            or requests all that is cached, in quire's own format: `kv_snapshot`

A batch is [seconds, events, rank]. Publishing never blocks a step: a slow reader loses batches, and sees that by
the gap in their numbers. Runs in the worker, between two steps.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

import msgspec
import zmq

from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.errors import ConfigError
from quire.worker.child.kv_snapshot import (
    OWN,
    POSITION,
    SNAPSHOT,
    KVAnswer,
    Position,
    Route,
    SnapshotSender,
    StoredEvents,
    encode_kv_answer,
)
from quire.worker.kv_event_settings import Encoding, KVEventSettings

RANK = 0
"""Of replicas that share one engine; there is one. Always sent, because readers decode three elements."""
MEDIUM = "GPU"
"""Other servers' word for the memory a model computes in, whatever that is."""
HASH_MASK = (1 << 63) - 1
"""Readers of signed integers exist: 63 bits fit them all."""
END = (-1).to_bytes(8, "big", signed=True)

_encode = msgspec.msgpack.Encoder().encode


class KVEventPublisher:
    """Collects what a step does to the cache and sends it when the step is over."""

    def __init__(self, settings: KVEventSettings) -> None:
        self._settings = settings
        # Readers must drop the blocks of the worker before this one; sent with the first batch, because a reader
        # needs a moment to reconnect.
        self._first: tuple[KVEvent, ...] = (AllBlocksCleared(),)
        self._events: list[KVEvent] = []
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.num_kept_batches)
        self._next_number = 0
        self.topic = token_hex(8).encode() if settings.has_incarnation_topic else settings.topic.encode()
        self.snapshots = SnapshotSender(lambda stored: self._batch(0.0, stored))
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.setsockopt(zmq.SNDHWM, settings.high_water_mark)
        self.replay = self._context.socket(zmq.ROUTER)
        # Beyond its mark a router drops silently: room for all that is kept, twice, and some.
        self.replay.setsockopt(zmq.SNDHWM, 2 * settings.num_kept_batches + 1000)
        try:
            _attach(self._out, settings.endpoint)
            if settings.replay_endpoint:
                self.replay.bind(settings.replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"kv_events must be addresses such as tcp://127.0.0.1:5557 that are free, {settings.endpoint!r} and "
                f"{settings.replay_endpoint!r} given: {error}; choose others"
            ) from error

    def emit(self, event: KVEvent) -> None:
        """Called by the memory in the middle of a step: only noted."""
        self._events.append(event)

    def publish(self, now_s: float) -> None:
        """Send what was noted as one batch, and respond to requests for earlier ones."""
        if self._events:
            events, self._events, self._first = [*self._first, *self._events], [], ()
            batch = self._batch(now_s, events)
            self._kept.append((self._next_number, batch))
            # A publisher drops for slow readers; it never waits.
            self._out.send_multipart([self.topic, _number(self._next_number), batch], zmq.DONTWAIT)
            self._next_number += 1
        self._answer()
        self._send_snapshot()

    def follow(self, stored_events: StoredEvents) -> None:
        """`stored_events` has all that is cached: from now on snapshots can be requested."""
        self.snapshots.stored_events = stored_events

    @property
    def has_work(self) -> bool:
        """A snapshot is under way: `publish` is to be called soon, even without events."""
        return self.snapshots.has_work

    def close(self) -> None:
        """Release the addresses."""
        self._context.destroy(linger=0)

    def _batch(self, now_s: float, events: Sequence[KVEvent]) -> bytes:
        return encode_kv_batch(now_s, events, self._settings.encoding)

    def _answer(self) -> None:
        replay = self.replay
        while replay.poll(0):
            frames = replay.recv_multipart()
            if 3 <= len(frames) <= 4:  # one more where a member has forwarded the request
                self._answer_one(tuple(frames[:-2]), frames[-1])

    def _answer_one(self, route: Route, question: bytes) -> None:
        if question == SNAPSHOT:
            self.snapshots.request(route)
        elif question == POSITION:
            self._reply(Position(self.topic, self._next_number), (route,))
        elif len(question) == 8:
            first = int.from_bytes(question, "big")
            for number, batch in self._kept:
                if number >= first:
                    _send(self.replay, [*route, b"", self.topic, _number(number), batch])
            _send(self.replay, [*route, b"", b"", END, b""])

    def _send_snapshot(self) -> None:
        """One piece, because a step waits."""
        response = self.snapshots.next_answer(self.topic, self._next_number)
        if response is not None:
            self._reply(*response)

    def _reply(self, answer: KVAnswer, routes: Sequence[Route]) -> None:
        for route in routes:
            _send(self.replay, [*route, b"", OWN, encode_kv_answer(answer)])


def _attach(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """The usual convention: connect to readers that bind; otherwise bind."""
    is_ours = any(mark in endpoint for mark in ("*", "::", "ipc://", "inproc://", "127.0.0.1", "localhost", "0.0.0.0"))  # noqa: S104
    (socket.bind if is_ours else socket.connect)(endpoint)


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.Again:
        return  # it requested more than it reads


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def block_hash(digest: bytes) -> int:
    """A block's name for readers outside."""
    return int.from_bytes(digest[-8:], "big") & HASH_MASK


def _as_map(event: KVEvent) -> Mapping[str, Any]:
    """Fields with default values are left out."""
    match event:
        case BlockStored():
            parent = event.parent_digest
            return {
                "type": "BlockStored",
                "block_hashes": [block_hash(digest) for digest in event.digests],
                "parent_block_hash": None if parent is None else block_hash(parent),
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": event.adapter or None,
                "extra_keys": _extra_keys(event),
                # Read by routers that keep one tenant's blocks from counting as another's.
                "cache_salt": event.cache_group,
            }
        case BlockRemoved():
            hashes = [block_hash(digest) for digest in event.digests]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: KVEvent) -> list[Any]:
    """The same for readers of before mid-2026: the tag, then fields by position."""
    fields = dict(_as_map(event))
    fields.pop("cache_salt", None)
    return list(fields.values())


def _extra_keys(event: BlockStored) -> list[list[str]]:
    keys = [key for key in (event.adapter, event.cache_group) if key]
    return [keys for _ in event.digests]


_ENCODERS = {"map": _as_map, "array": _as_array}


def encode_kv_batch(now_s: float, events: Sequence[KVEvent], encoding: Encoding = "map") -> bytes:
    """What one step did to the cache, as readers outside get it."""
    encoder = _ENCODERS[encoding]
    return _encode([now_s, [encoder(event) for event in events], RANK])
