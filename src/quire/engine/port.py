"""What stands between a client and an engine, wherever it steps: a thread, a worker, or another machine.

    submit · cancel · explain ─► engine ─► events, all through one listener

Whatever becomes of a request is an event of its id, a refusal too. Nothing else is told.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.core.digests import Namespace
from quire.core.events import RequestEvent
from quire.core.request import Request
from quire.core.share_types import Verdict

Listener = Callable[[Sequence[RequestEvent]], None]
OnFailure = Callable[[BaseException], None]


class EnginePort(Protocol):
    """Where requests go."""

    verdicts: Sequence[Verdict]
    """What tenants would be told that the queue turned away lately, as of the last events. Never changed, but replaced
    by others."""

    def submit(self, request: Request) -> None:
        """Queue a request: `Queued` or `Refused` is its first event."""
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        ...

    def clear_cache(self) -> None:
        """Forget every cached block that nobody uses."""
        ...

    def explain(self, question_id: str, namespace: Namespace, prompt: tuple[int, ...]) -> None:
        """Ask why a prompt is not in the cache: `Explained` or `Refused` is the one event of this id."""
        ...
