"""Runs a measurement on the fastest event loop there is: the client must not be what it measures.

With uvloop an event is noticed about twice as soon as with the standard library's loop, which is taken where there is
no other.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it to its end."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """How a loop is made here."""
    try:
        import uvloop  # noqa: PLC0415 - not everywhere
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
