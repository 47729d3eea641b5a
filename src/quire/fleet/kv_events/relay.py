"""Relays KV events from a member's current worker to gateways, at addresses that stay when the worker is replaced.

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
from quire.fleet.protocol.keys import MemberKeys, check_clear, secure_member, sent_now, set_options
from quire.worker.kv_event_settings import KVEventSettings
from quire.worker.parent.spawned_worker import private_folder

MAX_QUESTION_BYTES = 1024
"""Maximum size of a gateway's request; a gateway that sends more is disconnected."""
MAX_QUEUED = 20_000
"""High-water mark per gateway: a slower gateway loses batches, which it detects by the batch numbers."""
UNSPECIFIED = ("*", "0.0.0.0", "[::]")  # noqa: S104 - names for "every interface", not an address to bind


@dataclass(frozen=True, slots=True)
class MemberEndpoints:
    """The endpoints of a member. Empty ones are derived from `listen`."""

    listen: str
    events: str = ""
    replay: str = ""

    def resolved(self) -> "MemberEndpoints":
        """Fill empty endpoints; over TCP they get any free port."""
        return MemberEndpoints(
            self.listen, self.events or _beside(self.listen, "events"), self.replay or _beside(self.listen, "replay")
        )


def _beside(address: str, name: str) -> str:
    if address.startswith("tcp://"):
        return f"{address.rpartition(':')[0]}:*"
    return f"{address}.{name}"


def as_seen_from(endpoint: str, member: str) -> str:
    """Replace a wildcard host by the host of the gateway's `member` address, which the member itself cannot know."""
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or host not in UNSPECIFIED or not member.startswith("tcp://"):
        return endpoint
    return f"{member.rpartition(':')[0]}:{port}"


class EventRelay:
    """Forwards the KV events of the current worker to gateways."""

    def __init__(self, events: str, replay: str) -> None:
        self._bound = (events, replay)
        self.events, self.replay = events, replay
        """Endpoints for gateways; after `start` with the bound ports."""
        self._held = ExitStack()
        folder = private_folder(self._held)
        self.inside = KVEventSettings(
            f"ipc://{folder / 'events'}", f"ipc://{folder / 'replay'}", has_incarnation_topic=True
        )
        """KV-event settings for the worker."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, context: zmq.asyncio.Context, keys: MemberKeys | None) -> None:
        """Bind and start to forward. With keys, the context must have an authenticator. Raises ConfigError."""
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
            socket.setsockopt(zmq.IMMEDIATE, 1)  # queue no requests while the worker is replaced
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            socket.connect(address)
        events_in.subscribe(b"")
        self._tasks = [
            asyncio.create_task(_pass_on(events_in, events_out), name="quire-events"),
            asyncio.create_task(_pass_on(replay_in, replay_out), name="quire-replays"),
            asyncio.create_task(_pass_on(replay_out, replay_in, num_frames=3), name="quire-replay-questions"),
        ]

    async def close(self) -> None:
        """Stop forwarding events."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._held.close()


def _bound(socket: zmq.asyncio.Socket, address: str, keys: MemberKeys | None) -> zmq.asyncio.Socket:
    secure_member(socket, keys)
    set_options(socket, address, (zmq.SNDHWM, MAX_QUEUED), (zmq.MAXMSGSIZE, MAX_QUESTION_BYTES))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        rule = f"expected a free address for KV events such as tcp://127.0.0.1:7001, got {address}: {error}"
        raise ConfigError(f"{rule}; choose others with --events and --replay", ("events", "replay")) from error
    return socket


async def _pass_on(source: zmq.asyncio.Socket, target: zmq.asyncio.Socket, num_frames: int | None = None) -> None:
    """Forward messages (of `num_frames` frames, if set). Drop those that cannot be sent: subscribers detect the gap."""
    while True:
        frames = await source.recv_multipart()
        if num_frames is None or len(frames) == num_frames:
            sent_now(target.send_multipart(frames, zmq.DONTWAIT))
        await asyncio.sleep(0)  # let the tasks run that forward tokens
