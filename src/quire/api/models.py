"""The models that are served, by the name clients use. One may still be loading, or gone: its card is shown anyway.

The API knows a model as an `EngineClient`. What it wants beyond that is an `EngineStatus`: whether the model can answer
now, and what its worker counts. An engine in this process and a supervised worker both fit it.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol, runtime_checkable

from quire.api.http.errors import ApiError, invalid, shortened
from quire.api.http.limits import LOADING_RETRY_S
from quire.client.client import EngineClient
from quire.errors import EngineDeadError, RequestTooLargeError


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine counts about itself, as far as it can tell from here."""

    num_blocks: int = 0
    block_size: int = 0
    kv_usage: float = 0.0
    """Share of blocks in use, 0 to 1."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    num_restarts: int = 0
    step_sizes: tuple[tuple[str, int], ...] = ()
    """Steps that computed at most so many tokens, bound after bound."""
    num_step_tokens: int = 0


@runtime_checkable
class EngineStatus(Protocol):
    """What stands behind a front and can be asked about."""

    @property
    def is_ready(self) -> bool:
        """It would answer now."""
        ...

    def stats(self) -> EngineStats | None:
        """What it counts; None if it cannot tell."""
        ...

    async def clear_cache(self) -> None:
        """Forget every cached block that nobody uses."""
        ...


@dataclass(slots=True)
class ModelEntry:
    """One model under its public name."""

    name: str
    root: str = ""
    """What was loaded: a path or a hub id. Shown to nobody but its owner."""
    created: int = field(default_factory=lambda: int(time()))
    engine_client: EngineClient | None = None
    engine_status: EngineStatus | None = None
    clear_cache: Callable[[], Awaitable[None]] | None = None
    """Forget all cached blocks, where that can be reached."""

    @property
    def is_ready(self) -> bool:
        """It would answer now."""
        if self.engine_client is None or not self.engine_client.is_alive:
            return False
        return self.engine_status is None or self.engine_status.is_ready

    @property
    def is_dead(self) -> bool:
        """It was there and will not come back by itself."""
        return self.engine_client is not None and not self.engine_client.is_alive

    def open(self) -> EngineClient:
        """The front, or why there is none yet."""
        if self.engine_client is None:
            message = f"the model {self.name} is still loading; try again"
            raise ApiError(503, "model_loading", message, retry_after_s=LOADING_RETRY_S)
        if not self.engine_client.is_alive:
            raise EngineDeadError(f"the engine of {self.name} has stopped")
        return self.engine_client

    def stats(self) -> EngineStats | None:
        """What its engine counts, if it can tell."""
        return self.engine_status.stats() if self.engine_status is not None and self.engine_client is not None else None

    def card(self) -> dict[str, Any]:
        """As `/v1/models` lists it."""
        text = self.engine_client.text if self.engine_client is not None else None
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "quire",
            "root": self.name,
            "parent": None,
            "max_model_len": text.max_sequence_tokens if text else None,
            "meta": {"n_vocab": text.vocabulary_size if text else None, "is_ready": self.is_ready},
            "permission": [],
        }


@contextmanager
def within_context(model: ModelEntry) -> Iterator[None]:
    """What does not fit is said in the words that clients look for, then in ours."""
    try:
        yield
    except RequestTooLargeError as error:
        limit = model.open().text.max_sequence_tokens
        raise RequestTooLargeError(f"This model's maximum context length is {limit} tokens; {error}") from error


class Models:
    """All of them, in the order they were named."""

    def __init__(self, models: Iterable[ModelEntry]) -> None:
        self._by_name = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._by_name.values())

    @property
    def is_ready(self) -> bool:
        """All would answer now."""
        return all(model.is_ready for model in self)

    def named(self, name: str | None) -> ModelEntry:
        """The model a request asks for. Where there is one only, its name may be left out."""
        if name is None:
            if len(self._by_name) == 1:
                return next(iter(self))
            raise invalid(f"a request must name a model: {self._names}", "model", "missing_parameter")
        found = self._by_name.get(name)
        if found is None:
            message = f"there is no model {shortened(name)}; this server has: {self._names}"
            raise ApiError(404, "model_not_found", message, "model")
        return found

    @property
    def _names(self) -> str:
        return ", ".join(self._by_name)
