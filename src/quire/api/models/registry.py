"""The models that are served, by the name clients use. One may still be loading, or gone: its card is shown anyway.

To the API a model is an `EngineClient`: an engine in this process, or a supervised worker.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from time import time
from typing import Any, Protocol

from quire.api.http.errors import ApiError, invalid, shortened
from quire.api.http.limits import LOADING_RETRY_S
from quire.api.models.park_moves import Stage
from quire.client.engines.client import EngineClient, EngineStats, FleetStats
from quire.errors import ConfigError, EngineDeadError, RequestTooLargeError
from quire.observe.metrics import UNMETERED, TokenMeters


@dataclass(slots=True)
class ModelEntry:
    """One model under its public name."""

    name: str
    root: str = ""
    """What was loaded: a path or a hub id. Shown only to the operator."""
    created: int = field(default_factory=lambda: int(time()))
    engine_client: EngineClient | None = None
    stage: Stage = Stage.AWAY
    """Where its park has it, if it has one."""
    is_required: bool = True
    """A server without it is not ready."""
    loaded_share: float | None = None
    """How much of it is loaded, while it loads."""
    meters: TokenMeters = UNMETERED
    """Called with its tokens as they come."""

    @property
    def is_ready(self) -> bool:
        return self.engine_client is not None and self.engine_client.is_alive and self.engine_client.is_ready

    @property
    def is_dead(self) -> bool:
        """It was there and will not come back by itself."""
        return self.engine_client is not None and not self.engine_client.is_alive

    @property
    def state(self) -> str:
        """`loading`, `ready`, `busy`, `restarting` or `failed`; in a park also `unloaded` and `unloading`."""
        if self.engine_client is None or self.stage is Stage.LEAVING:
            return str(self.stage.value)
        if not self.is_ready:
            return "failed" if self.is_dead else "restarting"
        return "busy" if self.engine_client.is_busy else "ready"

    def report_progress(self, _label: str, done_bytes: int, total_bytes: int) -> None:
        """Record how much of it is loaded."""
        self.loaded_share = done_bytes / total_bytes if total_bytes else None

    def open(self) -> EngineClient:
        """Its client. Raises the reason if there is none yet."""
        if self.engine_client is None:
            message = f"the model {self.name} is still loading; try again"
            raise ApiError(503, "model_loading", message, retry_after_s=LOADING_RETRY_S)
        if not self.engine_client.is_alive:
            raise EngineDeadError(f"the engine of {self.name} has stopped")
        return self.engine_client

    def stats(self) -> EngineStats | None:
        """Counts of its engine, if available."""
        return None if self.engine_client is None else self.engine_client.stats()

    def fleet_stats(self) -> FleetStats | None:
        """Of the members that compute it, if it is not computed here."""
        return None if self.engine_client is None else self.engine_client.fleet_stats()

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
            "meta": {
                "n_vocab": text.vocabulary_size if text else None,
                "is_ready": self.is_ready,
                "state": self.state,
                "loaded_share": None if self.loaded_share is None else round(self.loaded_share, 3),
            },
            "permission": [],
        }


@contextmanager
def within_context(limit: int) -> Iterator[None]:
    """Prefix errors of prompts that do not fit with the text that clients match."""
    try:
        yield
    except RequestTooLargeError as error:
        raise RequestTooLargeError(f"This model's maximum context length is {limit} tokens; {error}") from error


class Park(Protocol):
    """Loads models when they are requested."""

    @property
    def is_started(self) -> bool:
        """The sizes of the models are known."""

    def using(self, entry: ModelEntry, tenant: str, /) -> AbstractAsyncContextManager[EngineClient]:
        """The model's front, for as long as this tenant needs it; waits until it is there."""

    def check_waiting(self, entry: ModelEntry, tenant: str, /) -> None:
        """Refuse a request that would wait in vain, or beside too many, or for one load too many of its tenant."""

    def drain(self) -> None:
        """The server shuts down: no model is loaded any more, and requests that wait for one are refused."""


class Models:
    """All of them, in the order they were named."""

    park: Park | None = None
    """None: all are here for good."""

    def __init__(self, models: Iterable[ModelEntry], aliases: Mapping[str, str] | None = None) -> None:
        self._by_name = {model.name: model for model in models}
        self._aliases = aliases or {}
        missing = next((one for one in self._aliases.values() if one not in self._by_name), None)
        if missing is not None:
            raise ConfigError(
                f"expected aliases of served models ({self._names}), got {missing!r}; change it or leave it out",
                ("alias",),
            )
        self._max_sequence_tokens: int | None = None
        """Known for good once all are there."""

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._by_name.values())

    @property
    def is_ready(self) -> bool:
        """All required models can serve a request now."""
        is_started = self.park is None or self.park.is_started
        return is_started and all(model.is_ready for model in self if model.is_required)

    def using(self, model: ModelEntry, tenant: str) -> AbstractAsyncContextManager[EngineClient]:
        """The model's front, for as long as this tenant needs it; waits until it is there."""
        return nullcontext(model.open()) if self.park is None else self.park.using(model, tenant)

    @property
    def num_gateways(self) -> int:
        """Servers among which the quotas of a key are divided: those before the same members as this one."""
        clients = [model.engine_client for model in self]
        return max((client.num_gateways for client in clients if client is not None), default=1)

    def check_waiting(self, model: ModelEntry, tenant: str) -> None:
        """Refuse a request that would wait in vain, or beside too many, or for one load too many of its tenant."""
        if self.park is None:
            model.open()
        elif model.stage is not Stage.HERE:
            self.park.check_waiting(model, tenant)

    @property
    def max_sequence_tokens(self) -> int | None:
        """The longest sequence that any of them takes; None while none is there."""
        if self._max_sequence_tokens is not None:
            return self._max_sequence_tokens
        clients = [model.engine_client for model in self]
        longest = max((client.text.max_sequence_tokens for client in clients if client is not None), default=None)
        if None not in clients:
            self._max_sequence_tokens = longest
        return longest

    def named(self, name: str | None) -> ModelEntry:
        """The model that a request names. Where there is only one, the name may be left out."""
        if name is None:
            if len(self._by_name) == 1:
                return next(iter(self))
            raise invalid(f"expected a model in the request, one of: {self._names}", "model", "missing_parameter")
        found = self._by_name.get(name) or self._aliased(name)
        if found is None:
            message = f"there is no model {shortened(name)}; this server has: {self._names}"
            raise ApiError(404, "model_not_found", message, "model")
        return found

    def _aliased(self, name: str) -> ModelEntry | None:
        model = next((model for alias, model in self._aliases.items() if fnmatchcase(name, alias)), None)
        return None if model is None else self._by_name[model]

    @property
    def _names(self) -> str:
        return ", ".join(self._by_name)
