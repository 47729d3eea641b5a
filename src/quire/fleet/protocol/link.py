"""A link: a gateway's connection to one member. It runs one session after another until it is closed.

The subclasses of `ReconnectingLink` connect to quire members or to OpenAI servers.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from quire.fleet.protocol.messages import ToGateway, ToMember

log = logging.getLogger("quire.fleet")

HEARTBEAT_S = 1.0
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
LOADING_S = 30.0
"""For this long after the start, an unreachable member causes no warning, because it may be loading."""
CONNECTION_LOST = "the connection broke"


class LinkToMember(Protocol):
    """A gateway's connection to one member."""

    address: str
    is_openai: bool
    """Whether the member is an OpenAI server, which has no model fingerprint and lacks some features."""

    def send(self, message: ToMember) -> None:
        """Send a message, if the member is connected."""

    def end(self, reason: str) -> None:
        """Close the session, for this reason."""


@dataclass(frozen=True, slots=True)
class LinkListener:
    """Callbacks of a link."""

    on_message: Callable[[LinkToMember, ToGateway], None]
    """Called with each message; the first of a session is Welcome. If it raises MessageError, the session ends."""
    on_lost: Callable[[LinkToMember, str], None]
    """Called with the reason when a session ends, unless its Welcome was not accepted."""


class ReconnectingLink(ABC):
    """Reconnects until it is closed: soon after a healthy session, otherwise with growing delays."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._task: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()
        self.is_open = False
        """Whether a session is open: the member has responded and is not lost."""
        self.problem = "not tried yet"
        """Reason why no session is open."""
        self._is_trusted = True
        """False once this session has received an invalid message."""

    def start(self) -> None:
        """Start connecting to the member."""
        self._task = asyncio.create_task(self._run(), name=f"quire-link {self.address}")

    async def close(self) -> None:
        """End the session and do not reconnect."""
        self.problem = "the gateway closed the link"
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s, logged_problem, was_connected, start_s = FIRST_DELAY_S, "", False, monotonic()
        while True:
            is_healthy = await self._run_session()
            was_connected = was_connected or is_healthy
            may_be_loading = self.problem == CONNECTION_LOST and not was_connected and monotonic() - start_s < LOADING_S
            if self.problem != logged_problem and not may_be_loading:
                logged_problem = self.problem
                log.warning("cannot reach member %s: %s", self.address, logged_problem)
            delay_s = FIRST_DELAY_S if is_healthy else min(MAX_DELAY_S, delay_s * 2)
            await asyncio.sleep(delay_s)

    def end(self, reason: str) -> None:
        """End this session, because the member is silent or sent invalid messages. The first reason is logged."""
        if not self._is_over.is_set():
            self.problem = reason
        self._is_over.set()

    def distrust(self, reason: str) -> None:
        """End this session because of an invalid message; the delay before the next session grows."""
        self._is_trusted = False
        self.end(reason)

    @abstractmethod
    async def _run_session(self) -> bool:
        """Run one session; return whether the member responded and sent only valid messages."""
