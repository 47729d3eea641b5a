"""Publishes KV-cache events for routers, in vLLM's format: msgpack over a ZMQ publisher.

    PUB     [topic][number: 8 bytes, big-endian][batch]           one batch for each step that changed the cache
    ROUTER  a client requests the batches from some number on, and receives those that are still kept, then END;
            or it requests all cached blocks, in quire's own format: `kv_snapshot`

A batch is [time in seconds, events, rank]. Publishing never blocks a step: a slow subscriber loses batches, and detects
the gap in their numbers. This code runs in the worker, between steps.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

import msgspec
import zmq

from quire.core.digests import block_hash
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.errors import ConfigError
from quire.worker.child.kv_snapshot import (
    POSITION,
    QUIRE_TOPIC,
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
END = (-1).to_bytes(8, "big", signed=True)

_encode = msgspec.msgpack.Encoder().encode


class KVEventPublisher:
    """Collects the cache events of a step, and publishes them after it."""

    def __init__(self, settings: KVEventSettings) -> None:
        self._settings = settings
        # Tells subscribers to drop the blocks of the previous worker. Sent with the first batch, because subscribers
        # need time to reconnect.
        self._first_events: tuple[KVEvent, ...] = (AllBlocksCleared(),)
        self._events: list[KVEvent] = []
        self._kept_batches: deque[tuple[int, bytes]] = deque(maxlen=settings.num_kept_batches)
        self._next_number = 0
        self.topic = token_hex(8).encode() if settings.has_incarnation_topic else settings.topic.encode()
        self.snapshots = SnapshotSender(lambda stored: self._batch(0.0, stored))
        self._context = zmq.Context()
        self._publish_socket = self._context.socket(zmq.PUB)
        self._publish_socket.setsockopt(zmq.SNDHWM, settings.high_water_mark)
        self.replay_socket = self._context.socket(zmq.ROUTER)
        # A ROUTER socket drops messages above its high-water mark silently: allow twice all kept batches, plus more.
        self.replay_socket.setsockopt(zmq.SNDHWM, 2 * settings.num_kept_batches + 1000)
        try:
            _attach(self._publish_socket, settings.endpoint)
            if settings.replay_endpoint:
                self.replay_socket.bind(settings.replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"expected free addresses for kv_events such as tcp://127.0.0.1:5557, got {settings.endpoint!r} and "
                f"{settings.replay_endpoint!r}: {error}; choose others"
            ) from error

    def emit(self, event: KVEvent) -> None:
        """Collect an event. Called by the memory during a step."""
        self._events.append(event)

    def publish(self, now_s: float) -> None:
        """Publish the collected events as one batch, and respond to requests on the replay socket."""
        if self._events:
            events, self._events, self._first_events = [*self._first_events, *self._events], [], ()
            batch = self._batch(now_s, events)
            self._kept_batches.append((self._next_number, batch))
            # A PUB socket drops messages for slow subscribers and never blocks.
            self._publish_socket.send_multipart([self.topic, _number_frame(self._next_number), batch], zmq.DONTWAIT)
            self._next_number += 1
        self._handle_requests()
        self._send_snapshot()

    def enable_snapshots(self, stored_events: StoredEvents) -> None:
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

    def _handle_requests(self) -> None:
        socket = self.replay_socket
        while socket.poll(0):
            frames = socket.recv_multipart()
            if 3 <= len(frames) <= 4:  # one more frame if a fleet member forwarded the request
                self._handle_request(tuple(frames[:-2]), frames[-1])

    def _handle_request(self, route: Route, request: bytes) -> None:
        if request == SNAPSHOT:
            self.snapshots.request(route)
        elif request == POSITION:
            self._send_response(Position(self.topic, self._next_number), (route,))
        elif len(request) == 8:
            first = int.from_bytes(request, "big")
            for number, batch in self._kept_batches:
                if number >= first:
                    _send(self.replay_socket, [*route, b"", self.topic, _number_frame(number), batch])
            _send(self.replay_socket, [*route, b"", b"", END, b""])

    def _send_snapshot(self) -> None:
        """Send only one piece of the snapshot, so that the next step is not delayed for long."""
        response = self.snapshots.next_answer(self.topic, self._next_number)
        if response is not None:
            self._send_response(*response)

    def _send_response(self, response: KVAnswer, routes: Sequence[Route]) -> None:
        for route in routes:
            _send(self.replay_socket, [*route, b"", QUIRE_TOPIC, encode_kv_answer(response)])


def _attach(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Like vLLM: bind wildcard, local, ipc and inproc endpoints; connect to all others."""
    binds = any(mark in endpoint for mark in ("*", "::", "ipc://", "inproc://", "127.0.0.1", "localhost", "0.0.0.0"))  # noqa: S104
    (socket.bind if binds else socket.connect)(endpoint)


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.Again:
        return  # the client does not read its responses fast enough


def _number_frame(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _as_map(event: KVEvent) -> Mapping[str, Any]:
    """Return the event as a map, without fields that would always have their default values."""
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
    """Return the event in the format for subscribers released before mid-2026: its tag, then its fields by position."""
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
