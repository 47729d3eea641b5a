"""Publishes KV-cache events for routers, in vLLM's format: msgpack over a ZMQ publisher.

    PUB     [topic][number: 8 bytes, big-endian][batch]           one batch for each step that changed the cache
    ROUTER  a client requests batches from a number on and receives all of them that are kept, then an end mark;
            or it requests all cached blocks, in quire's own format: `kv_snapshot`

A batch is [seconds, events, rank]. Publishing never blocks a step: a slow subscriber loses batches, and detects it by
the gap in their numbers. Runs in the worker, between steps.
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
"""The data-parallel rank, always 0. Always sent, because subscribers decode three elements."""
MEDIUM = "GPU"
"""vLLM's name for the memory in which a model computes; used for any device."""
HASH_MASK = (1 << 63) - 1
"""Keeps 63 bits, because some subscribers decode hashes as signed 64-bit integers."""
END = (-1).to_bytes(8, "big", signed=True)

_encode = msgspec.msgpack.Encoder().encode


class KVEventPublisher:
    """Collects the cache events of a step, and publishes them after it."""

    def __init__(self, settings: KVEventSettings) -> None:
        self._settings = settings
        # Tells subscribers to drop the blocks of the previous worker. Sent with the first batch, because subscribers
        # need time to reconnect.
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
        # Above its mark a ROUTER socket drops messages silently: allow all kept batches twice, and some more.
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
        """Collect an event. Called by the memory during a step."""
        self._events.append(event)

    def publish(self, now_s: float) -> None:
        """Publish the collected events as one batch, and respond to requests on the replay socket."""
        if self._events:
            events, self._events, self._first = [*self._first, *self._events], [], ()
            batch = self._batch(now_s, events)
            self._kept.append((self._next_number, batch))
            # A PUB socket drops messages for slow subscribers and never blocks.
            self._out.send_multipart([self.topic, _number(self._next_number), batch], zmq.DONTWAIT)
            self._next_number += 1
        self._answer()
        self._send_snapshot()

    def follow(self, stored_events: StoredEvents) -> None:
        """Enable snapshots; `stored_events` iterates over all cached blocks."""
        self.snapshots.stored_events = stored_events

    @property
    def has_work(self) -> bool:
        """Whether a snapshot is in progress; if so, `publish` should be called soon even without events."""
        return self.snapshots.has_work

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def _batch(self, now_s: float, events: Sequence[KVEvent]) -> bytes:
        return encode_kv_batch(now_s, events, self._settings.encoding)

    def _answer(self) -> None:
        replay = self.replay
        while replay.poll(0):
            frames = replay.recv_multipart()
            if 3 <= len(frames) <= 4:  # one more frame if a fleet member forwarded the request
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
        """Send one piece, so that the next step is not delayed for long."""
        response = self.snapshots.next_answer(self.topic, self._next_number)
        if response is not None:
            self._reply(*response)

    def _reply(self, answer: KVAnswer, routes: Sequence[Route]) -> None:
        for route in routes:
            _send(self.replay, [*route, b"", OWN, encode_kv_answer(answer)])


def _attach(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Like vLLM: bind wildcard, local, ipc and inproc endpoints; connect to all others."""
    is_ours = any(mark in endpoint for mark in ("*", "::", "ipc://", "inproc://", "127.0.0.1", "localhost", "0.0.0.0"))  # noqa: S104
    (socket.bind if is_ours else socket.connect)(endpoint)


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.Again:
        return  # the client requests more than it reads


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def block_hash(digest: bytes) -> int:
    """Return the 63-bit hash of a block for subscribers, from its digest."""
    return int.from_bytes(digest[-8:], "big") & HASH_MASK


def _as_map(event: KVEvent) -> Mapping[str, Any]:
    """Fields that would always have their default values are omitted."""
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
                # For routers that must not match blocks of different tenants.
                "cache_salt": event.cache_group,
            }
        case BlockRemoved():
            hashes = [block_hash(digest) for digest in event.digests]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: KVEvent) -> list[Any]:
    """The event for subscribers released before mid-2026: its tag, then its fields by position."""
    fields = dict(_as_map(event))
    fields.pop("cache_salt", None)
    return list(fields.values())


def _extra_keys(event: BlockStored) -> list[list[str]]:
    keys = [key for key in (event.adapter, event.cache_group) if key]
    return [keys for _ in event.digests]


_ENCODERS = {"map": _as_map, "array": _as_array}


def encode_kv_batch(now_s: float, events: Sequence[KVEvent], encoding: Encoding = "map") -> bytes:
    """Encode the cache events of one step as a published batch."""
    encoder = _ENCODERS[encoding]
    return _encode([now_s, [encoder(event) for event in events], RANK])
