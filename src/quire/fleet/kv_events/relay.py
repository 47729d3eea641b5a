"""Where gateways hear what a member holds: its addresses stay while its workers come and go.

    worker ─ PUB ──► SUB ─ member ─ PUB ──► gateways                      what is cached, as it changes
    worker ─ ROUTER ◄► DEALER ─ member ─ ROUTER ◄► gateways               what was missed, and snapshots

A worker speaks to its member alone, through a folder that nobody else may enter. The member's own sockets are those
that have keys and check who asks: KV events carry token ids, which are prompts.
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
"""Nothing longer is read from gateways here."""
MAX_QUEUED = 20_000
"""Messages that one gateway may leave unread before it loses some: it sees that by their numbers."""
UNSPECIFIED = ("*", "0.0.0.0", "[::]")  # noqa: S104 - names for "every interface", not an address to bind


@dataclass(frozen=True, slots=True)
class MemberPlaces:
    """Where a member is found. What is not given lies beside where it listens."""

    listen: str
    events: str = ""
    replay: str = ""

    def resolved(self) -> "MemberPlaces":
        """All three; ports that nobody chose are free ones."""
        return MemberPlaces(
            self.listen, self.events or _beside(self.listen, "events"), self.replay or _beside(self.listen, "replay")
        )


def _beside(address: str, name: str) -> str:
    if address.startswith("tcp://"):
        return f"{address.rpartition(':')[0]}:*"
    return f"{address}.{name}"


def as_seen_from(endpoint: str, member: str) -> str:
    """A member that listens everywhere cannot know what it is called: it is where its gateway has found it."""
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or host not in UNSPECIFIED or not member.startswith("tcp://"):
        return endpoint
    return f"{member.rpartition(':')[0]}:{port}"


class EventRelay:
    """Passes on what the worker of the moment says of its cache."""

    def __init__(self, events: str, replay: str) -> None:
        self._bound = (events, replay)
        self.events, self.replay = events, replay
        """Where it is heard and asked; with the ports it got, once it runs."""
        self._held = ExitStack()
        folder = private_folder(self._held)
        self.inside = KVEventSettings(
            f"ipc://{folder / 'events'}", f"ipc://{folder / 'replay'}", tells_incarnation=True
        )
        """What a worker has to be opened with."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, context: zmq.asyncio.Context, keys: MemberKeys | None) -> None:
        """Listen; with keys, in a context that has an authenticator. Raises ConfigError."""
        for address in self._bound:
            check_clear(address, has_keys=keys is not None)
        out = _bound(context.socket(zmq.PUB), self._bound[0], keys)
        asked = _bound(context.socket(zmq.ROUTER), self._bound[1], keys)
        self.events, self.replay = (
            bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode() for socket in (out, asked)
        )
        heard, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket, address in ((heard, self.inside.endpoint), (asking, self.inside.replay_endpoint)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # a worker that comes later is not asked what another was asked
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            socket.connect(address)
        heard.subscribe(b"")
        self._tasks = [
            asyncio.create_task(_pass_on(heard, out), name="quire-events"),
            asyncio.create_task(_pass_on(asking, asked), name="quire-replays"),
            asyncio.create_task(_pass_on(asked, asking, num_frames=3), name="quire-replay-questions"),
        ]

    async def close(self) -> None:
        """Say nothing any more."""
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
        raise ConfigError(
            f"a member tells what it holds at free addresses such as tcp://127.0.0.1:7001, {address} given: {error}; "
            "choose others with --events and --replay"
        ) from error
    return socket


async def _pass_on(source: zmq.asyncio.Socket, target: zmq.asyncio.Socket, num_frames: int | None = None) -> None:
    """Frame by frame, to whoever is there: what cannot be sent now is lost, and its reader will notice."""
    while True:
        frames = await source.recv_multipart()
        if num_frames is None or len(frames) == num_frames:
            sent_now(target.send_multipart(frames, zmq.DONTWAIT))
        await asyncio.sleep(0)  # tokens go by the same loop
