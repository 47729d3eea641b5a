"""A member's KV events for gateways: its addresses stay while its workers come and go.

    worker ─ PUB ──► SUB ─ member ─ PUB ──► gateways                      changes of the cache
    worker ─ ROUTER ◄► DEALER ─ member ─ ROUTER ◄► gateways               missed batches, and snapshots

A worker sends to its member alone, through a folder that no other user may enter. The member's own sockets have keys
and authenticate gateways: KV events carry token ids, which are prompts.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

import zmq
import zmq.asyncio

from quire.errors import ConfigError
from quire.fleet.protocol.keys import MemberKeys, check_clear, secure_member, sent_now
from quire.worker.kv_event_settings import KVEventSettings
from quire.worker.parent.spawned_worker import private_folder

MAX_QUESTION_BYTES = 1024
"""Longer messages of gateways are dropped."""
MAX_QUEUED = 20_000
"""Messages that one gateway may leave unread before it loses some, which it detects by their numbers."""
UNSPECIFIED = ("*", "0.0.0.0", "[::]")  # noqa: S104 - names for "every interface", not an address to bind


@dataclass(frozen=True, slots=True)
class MemberEndpoints:
    """The addresses of a member. Those left empty are derived from where it listens."""

    listen: str
    events: str = ""
    replay: str = ""

    def resolved(self) -> "MemberEndpoints":
        """All three; unspecified ports are free ones."""
        return MemberEndpoints(
            self.listen, self.events or _beside(self.listen, "events"), self.replay or _beside(self.listen, "replay")
        )


def _beside(address: str, name: str) -> str:
    if address.startswith("tcp://"):
        return f"{address.rpartition(':')[0]}:*"
    return f"{address}.{name}"


def as_seen_from(endpoint: str, member: str) -> str:
    """A member that listens everywhere cannot know its address: its gateway does."""
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or host not in UNSPECIFIED or not member.startswith("tcp://"):
        return endpoint
    return f"{member.rpartition(':')[0]}:{port}"


class EventRelay:
    """Forwards the KV events of the current worker."""

    def __init__(self, events: str, replay: str) -> None:
        self._bound = (events, replay)
        self.events, self.replay = events, replay
        """Addresses for gateways; with the bound ports, once it runs."""
        self._held = ExitStack()
        folder = private_folder(self._held)
        self.inside = KVEventSettings(
            f"ipc://{folder / 'events'}", f"ipc://{folder / 'replay'}", has_incarnation_topic=True
        )
        """The settings for a worker."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, context: zmq.asyncio.Context, keys: MemberKeys | None) -> None:
        """Listen; with keys, in a context that has an authenticator. Raises ConfigError."""
        for address in self._bound:
            check_clear(address, has_keys=keys is not None)
        events_out = _bound(context.socket(zmq.PUB), self._bound[0], keys)
        replay_out = _bound(context.socket(zmq.ROUTER), self._bound[1], keys)
        self.events, self.replay = (
            bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode() for socket in (events_out, replay_out)
        )
        events_in, replay_in = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket, address in ((events_in, self.inside.endpoint), (replay_in, self.inside.replay_endpoint)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # a new worker does not get requests for the one before
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            socket.connect(address)
        events_in.subscribe(b"")
        self._tasks = [
            asyncio.create_task(_pass_on(events_in, events_out), name="quire-events"),
            asyncio.create_task(_pass_on(replay_in, replay_out), name="quire-replays"),
            asyncio.create_task(_pass_on(replay_out, replay_in, num_frames=3), name="quire-replay-questions"),
        ]

    async def close(self) -> None:
        """Stop forwarding."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._held.close()


def _bound(socket: zmq.asyncio.Socket, address: str, keys: MemberKeys | None) -> zmq.asyncio.Socket:
    secure_member(socket, keys)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        rule = f"expected a free address for KV events such as tcp://127.0.0.1:7001, got {address}: {error}"
        raise ConfigError(f"{rule}; choose others with --events and --replay", ("events", "replay")) from error
    return socket


async def _pass_on(source: zmq.asyncio.Socket, target: zmq.asyncio.Socket, num_frames: int | None = None) -> None:
    """Frame by frame: what cannot be sent now is lost, and its reader will notice the gap."""
    while True:
        frames = await source.recv_multipart()
        if num_frames is None or len(frames) == num_frames:
            sent_now(target.send_multipart(frames, zmq.DONTWAIT))
        await asyncio.sleep(0)  # tokens use the same loop
