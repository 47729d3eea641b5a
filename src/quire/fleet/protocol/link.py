"""What every connection to a member is: tried again and again, one meeting after the other, until it is closed.

What is at the other end is told by the classes that extend it: a member of quire's own, or an OpenAI server.
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
"""For so long it is no trouble that a member which nobody has met yet is not there: it loads, perhaps."""
BROKE = "the connection broke"


class LinkToMember(Protocol):
    """What is needed of a connection."""

    address: str
    is_stranger: bool
    """What is at its other end is not quire: it has no fingerprint, and cannot do all that quire can."""

    def send(self, message: ToMember) -> None:
        """Say something, if the member is still there."""
        ...

    def end(self, why: str) -> None:
        """Break it off."""
        ...


@dataclass(frozen=True, slots=True)
class LinkListener:
    """Who hears what a link has to say."""

    hear: Callable[[LinkToMember, ToGateway], None]
    """The first message of each meeting is Welcome. Raises MessageError for what cannot be: the link is closed."""
    lost: Callable[[LinkToMember, str], None]
    """After a Welcome that was taken in: nothing more comes of this meeting."""


class MeetingLink(ABC):
    """Meets whoever is at an address again and again, until it is closed: soon if all was well, else later."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._task: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()
        self.is_open = False
        """Somebody has answered, and was not lost since."""
        self.problem = "not tried yet"
        """Why it is not open."""
        self._is_honest = True
        """In this meeting, as far as it has come."""

    def start(self) -> None:
        """Begin to try."""
        self._task = asyncio.create_task(self._run(), name=f"quire-link {self.address}")

    async def close(self) -> None:
        """For good."""
        self.problem = "this gateway leaves it"
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s, said, has_met, began_s = FIRST_DELAY_S, "", False, monotonic()
        while True:
            is_fine = await self._meet()
            has_met = has_met or is_fine
            may_load = self.problem == BROKE and not has_met and monotonic() - began_s < LOADING_S
            if self.problem != said and not may_load:
                said = self.problem
                log.warning("member %s cannot be asked: %s", self.address, said)
            delay_s = FIRST_DELAY_S if is_fine else min(MAX_DELAY_S, delay_s * 2)
            await asyncio.sleep(delay_s)

    @abstractmethod
    def end(self, why: str) -> None:
        """This meeting is over."""

    def distrust(self, why: str) -> None:
        """The same, because of what came: it is not tried again at once."""
        self._is_honest = False
        self.end(why)

    @abstractmethod
    async def _meet(self) -> bool:
        """One meeting; whether somebody answered, and said nothing that cannot be."""
