"""The served models by name. A model that is not loaded is listed, too.

To the API a model is an `EngineClient`: an engine in this process, or a supervised worker.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from time import time
from typing import Any

from quire.api.http.errors import ApiError, invalid, shortened
from quire.api.http.limits import LOADING_RETRY_S
from quire.api.models.park_moves import Stage
from quire.client.engines.client import EngineClient, EngineStats, FleetStats
from quire.errors import ConfigError, EngineDeadError, RequestTooLargeError
from quire.observe.metrics import UNMETERED, TokenMeters


@dataclass(slots=True)
class ModelEntry:
    """One model and its public name."""

    name: str
    root: str = ""
    """The path or hub id from which the model is loaded. Shown only to the operator."""
    created: int = field(default_factory=lambda: int(time()))
    engine_client: EngineClient | None = None
    stage: Stage = Stage.AWAY
    """The state in the `ModelManager`, if the model is loaded on demand."""
    is_required: bool = True
    """The server is not ready without this model."""
    loaded_share: float | None = None
    """The fraction that is loaded, during loading."""
    meters: TokenMeters = UNMETERED
    """Called with the model's output tokens as they arrive."""

    @property
    def is_ready(self) -> bool:
        return self.engine_client is not None and self.engine_client.is_alive and self.engine_client.is_ready

    @property
    def is_dead(self) -> bool:
        """The engine has stopped and will not restart by itself."""
        return self.engine_client is not None and not self.engine_client.is_alive

    @property
    def state(self) -> str:
        """`loading`, `ready`, `busy`, `restarting` or `failed`; on-demand models also `unloaded` and `unloading`."""
        if self.engine_client is None or self.stage is Stage.LEAVING:
            return str(self.stage.value)
        if not self.is_ready:
            return "failed" if self.is_dead else "restarting"
        return "busy" if self.engine_client.is_busy else "ready"

    def report_progress(self, _label: str, done_bytes: int, total_bytes: int) -> None:
        """Record the fraction that is loaded."""
        self.loaded_share = done_bytes / total_bytes if total_bytes else None

    def open(self) -> EngineClient:
        """Return the client. Raises an error with the reason if the model is loading or its engine has stopped."""
        if self.engine_client is None:
            message = f"the model {self.name} is still loading; try again"
            raise ApiError(503, "model_loading", message, retry_after_s=LOADING_RETRY_S)
        if not self.engine_client.is_alive:
            raise EngineDeadError(f"the engine of {self.name} has stopped")
        return self.engine_client

    def stats(self) -> EngineStats | None:
        """Return the counters of the engine, if available."""
        return None if self.engine_client is None else self.engine_client.stats()

    def fleet_stats(self) -> FleetStats | None:
        """Return the statistics of the fleet members that run the model; None: it runs on this machine."""
        return None if self.engine_client is None else self.engine_client.fleet_stats()

    def card(self) -> dict[str, Any]:
        """Return the model's entry in `/v1/models`."""
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
    """Prefix errors about too long prompts with a text that clients match."""
    try:
        yield
    except RequestTooLargeError as error:
        raise RequestTooLargeError(f"This model's maximum context length is {limit} tokens; {error}") from error


class Models:
    """The served models, in the order of the command line. They stay loaded; `ModelManager` loads on demand."""

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
        """Set when all models are loaded; does not change afterwards."""

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._by_name.values())

    @property
    def is_ready(self) -> bool:
        """Whether all required models can serve a request now."""
        return all(model.is_ready for model in self if model.is_required)

    def using(self, entry: ModelEntry, _tenant: str, /) -> AbstractAsyncContextManager[EngineClient]:
        """Return a context with the model's client; entering it waits until the model is loaded."""
        return nullcontext(entry.open())

    @property
    def num_gateways(self) -> int:
        """The number of gateways with the same members, this one included; they divide the quotas of a key."""
        clients = [model.engine_client for model in self]
        return max((client.num_gateways for client in clients if client is not None), default=1)

    def check_waiting(self, entry: ModelEntry, _tenant: str, /) -> None:
        """Raise if waiting is refused: the model cannot load, too many wait, or the tenant caused too many loads."""
        entry.open()

    def drain(self) -> None:
        """Prepare for shutdown: load no more models, and refuse requests that wait for one."""

    @property
    def max_sequence_tokens(self) -> int | None:
        """The longest context of all models; None if none is loaded."""
        if self._max_sequence_tokens is not None:
            return self._max_sequence_tokens
        clients = [model.engine_client for model in self]
        longest = max((client.text.max_sequence_tokens for client in clients if client is not None), default=None)
        if None not in clients:
            self._max_sequence_tokens = longest
        return longest

    def named(self, name: str | None) -> ModelEntry:
        """Return the model that a request names; the name is optional if there is only one model."""
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
