"""What stands between a client and an engine, wherever it steps: a thread, a worker, or another machine."""

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.core.digests import Namespace
from quire.core.events import RequestEvent
from quire.core.prefix_tree import Divergence
from quire.core.request import Request
from quire.errors import QuireError

Listener = Callable[[Sequence[RequestEvent]], None]
Answered = Callable[[QuireError | None], None]
"""Told once what became of a submission: None if it was taken, else why not."""
OnExplained = Callable[[Divergence | QuireError], None]
"""Told once why a prompt is not in the cache, or why that cannot be said."""
OnFailure = Callable[[BaseException], None]


class EnginePort(Protocol):
    """Where requests go."""

    def submit(self, request: Request, answered: Answered) -> None:
        """Queue a request; `answered` gets None, or why it was refused."""
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        ...

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], told: OnExplained) -> None:
        """Ask why a prompt is not in the cache; `told` is called once, whatever happens."""
        ...
