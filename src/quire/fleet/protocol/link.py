"""What every connection to a member is: session after session, until it is closed.

Subclasses connect to the other end: a quire member, or an OpenAI server.
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

BEAT_S = 1.0
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
LOADING_S = 30.0
"""For so long a member that was never reached may be unreachable without a warning: it may be loading."""
BROKE = "the connection broke"


class LinkToMember(Protocol):
    """A gateway's connection to one member."""

    address: str
    is_openai: bool
    """The other end is an OpenAI server: it has no fingerprint, and lacks features of quire."""

    def send(self, message: ToMember) -> None:
        """Send a message, if the member is connected."""

    def end(self, why: str) -> None:
        """Close the session."""


@dataclass(frozen=True, slots=True)
class LinkListener:
    """Callbacks of a link."""

    on_message: Callable[[LinkToMember, ToGateway], None]
    """The first message of each session is Welcome. Raises MessageError for an invalid one: the link is closed."""
    lost: Callable[[LinkToMember, str], None]
    """After a Welcome that was accepted: the session is over."""


class ReconnectingLink(ABC):
    """Connects to an address again and again, until it is closed: soon if all was well, else later."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._task: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()
        self.is_open = False
        """The member has responded, and was not lost since."""
        self.problem = "not tried yet"
        """Why it is not open."""
        self._is_trusted = True
        """No invalid message in this session so far."""

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._run(), name=f"quire-link {self.address}")

    async def close(self) -> None:
        """Close for good."""
        self.problem = "this gateway leaves it"
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s, logged, was_connected, began_s = FIRST_DELAY_S, "", False, monotonic()
        while True:
            is_fine = await self._run_session()
            was_connected = was_connected or is_fine
            may_load = self.problem == BROKE and not was_connected and monotonic() - began_s < LOADING_S
            if self.problem != logged and not may_load:
                logged = self.problem
                log.warning("cannot reach member %s: %s", self.address, logged)
            delay_s = FIRST_DELAY_S if is_fine else min(MAX_DELAY_S, delay_s * 2)
            await asyncio.sleep(delay_s)

    @abstractmethod
    def end(self, why: str) -> None:
        """End this session."""

    def distrust(self, why: str) -> None:
        """The same, because of an invalid message: the link does not reconnect at once."""
        self._is_trusted = False
        self.end(why)

    @abstractmethod
    async def _run_session(self) -> bool:
        """One session; whether the member responded, and sent nothing invalid."""
