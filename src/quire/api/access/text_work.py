"""Text as one caller may have it worked on: beside the event loop, in the caller's own turn.

Nothing whose size a client decides runs on the loop, where everybody would wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from quire.api.http.limits import ON_LOOP_BYTES
from quire.client.text_pool import TextPool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextWork:
    """The text threads, in one tenant's name."""

    _pool: TextPool
    _tenant: str

    async def run(self, work: Callable[[], T]) -> T:
        """In a thread, when it is this tenant's turn."""
        return await self._pool.run(self._tenant, work)

    async def pause(self) -> None:
        """Let this tenant's work that is under way end first."""
        await self._pool.pause(self._tenant)

    async def sized(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Small things at once, large ones in a thread: handing over costs more than a small thing takes."""
        return work() if num_bytes <= ON_LOOP_BYTES else await self.run(work)
