"""Relays KV events from a member's current worker to gateways, at addresses that do not change with the worker.

    worker ─ PUB ──► SUB ─ member ─ PUB ──► gateways                      cache changes
    worker ─ ROUTER ◄► DEALER ─ member ─ ROUTER ◄► gateways               missed batches and snapshots

The worker's sockets are in a folder that other users cannot access. The member's sockets authenticate gateways with
keys, because KV events contain token ids and thus prompts.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

import zmq
import zmq.asyncio

from quire.errors import ConfigError
from quire.fleet.protocol.keys import MemberKeys, check_keys, secure_member, set_options, was_sent
from quire.worker.kv_event_settings import KVEventSettings
from quire.worker.parent.spawned_worker import private_folder

MAX_REQUEST_BYTES = 1024
"""Maximum size of a gateway's request; a gateway that sends more is disconnected."""
MAX_QUEUED = 20_000
"""High-water mark per gateway: a slower gateway loses batches, which it detects by the batch numbers."""
WILDCARD_HOSTS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - names for "every interface", not an address to bind


@dataclass(frozen=True, slots=True)
class MemberEndpoints:
    """The endpoints of a member. Empty ones are derived from `listen`."""

    listen: str
    events: str = ""
    replay: str = ""

    def resolved(self) -> "MemberEndpoints":
        """Return a copy with all endpoints; over TCP, empty ones get any free port."""
        return MemberEndpoints(
            self.listen, self.events or _sibling(self.listen, "events"), self.replay or _sibling(self.listen, "replay")
        )


def _sibling(address: str, name: str) -> str:
    if address.startswith("tcp://"):
        return f"{address.rpartition(':')[0]}:*"
    return f"{address}.{name}"


def with_member_host(endpoint: str, member: str) -> str:
    """Replace a wildcard host in a member's endpoint with the host of `member`, the address that the gateway uses."""
    scheme, _, host_and_port = endpoint.partition("://")
    host, _, port = host_and_port.rpartition(":")
    if scheme != "tcp" or host not in WILDCARD_HOSTS or not member.startswith("tcp://"):
        return endpoint
    return f"{member.rpartition(':')[0]}:{port}"


class EventRelay:
    """Forwards the KV events of the current worker to gateways."""

    def __init__(self, events: str, replay: str) -> None:
        self._addresses = (events, replay)
        self.events, self.replay = events, replay
        """Endpoints for gateways; after `start` with the bound ports."""
        self._resources = ExitStack()
        folder = private_folder(self._resources)
        self.worker_settings = KVEventSettings(
            f"ipc://{folder / 'events'}", f"ipc://{folder / 'replay'}", has_incarnation_topic=True
        )
        """KV-event settings for the worker."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, context: zmq.asyncio.Context, keys: MemberKeys | None) -> None:
        """Bind and start to forward. With keys, the context must have an authenticator. Raises ConfigError."""
        for address in self._addresses:
            check_keys(address, has_keys=keys is not None)
        events_out = _bind(context.socket(zmq.PUB), self._addresses[0], keys)
        replay_out = _bind(context.socket(zmq.ROUTER), self._addresses[1], keys)
        self.events, self.replay = (
            bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode() for socket in (events_out, replay_out)
        )
        events_in, replay_in, settings = context.socket(zmq.SUB), context.socket(zmq.DEALER), self.worker_settings
        for socket, address in ((events_in, settings.endpoint), (replay_in, settings.replay_endpoint)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # queue no requests while the worker is replaced
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            socket.connect(address)
        events_in.subscribe(b"")
        self._tasks = [
            asyncio.create_task(_forward(events_in, events_out), name="quire-events"),
            asyncio.create_task(_forward(replay_in, replay_out), name="quire-replays"),
            asyncio.create_task(_forward(replay_out, replay_in, num_frames=3), name="quire-replay-requests"),
        ]

    async def close(self) -> None:
        """Stop forwarding events."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._resources.close()


def _bind(socket: zmq.asyncio.Socket, address: str, keys: MemberKeys | None) -> zmq.asyncio.Socket:
    secure_member(socket, keys)
    set_options(socket, address, (zmq.SNDHWM, MAX_QUEUED), (zmq.MAXMSGSIZE, MAX_REQUEST_BYTES))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        message = f"expected a free address for KV events such as tcp://127.0.0.1:7001, got {address}: {error}"
        raise ConfigError(f"{message}; choose others with --events and --replay", ("events", "replay")) from error
    return socket


async def _forward(source: zmq.asyncio.Socket, target: zmq.asyncio.Socket, num_frames: int | None = None) -> None:
    """Forward messages (with `num_frames` frames, if set). Drop any that cannot be sent: subscribers detect the gap."""
    while True:
        frames = await source.recv_multipart()
        if num_frames is None or len(frames) == num_frames:
            was_sent(target.send_multipart(frames, zmq.DONTWAIT))
        await asyncio.sleep(0)  # let other tasks run, which forward tokens
