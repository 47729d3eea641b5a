"""The served models by name, including models that are not loaded.

The API uses a loaded model through its `EngineClient`: an engine in this process, a worker, or a fleet's members.
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


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """Progress of one part of a model's loading: a download, a conversion, or reading its weights."""

    label: str
    done_bytes: int
    total_bytes: int


@dataclass(slots=True)
class ModelEntry:
    """One served model: its public name, its state, and its client while it is loaded."""

    name: str
    root: str = ""
    """The path or hub id from which the model is loaded. Shown only to the operator."""
    created: int = field(default_factory=lambda: int(time()))
    engine_client: EngineClient | None = None
    stage: Stage = Stage.UNLOADED
    """Where the model is between unloaded and ready; set by the `ModelManager`."""
    is_required: bool = True
    """Whether the server is ready only if this model is."""
    load_progress: LoadStatus | None = None
    """Progress of the current part of loading; None: the model is not being loaded."""
    meters: TokenMeters = UNMETERED
    """Called with the model's output tokens as they arrive."""

    @property
    def is_ready(self) -> bool:
        return self.engine_client is not None and self.engine_client.is_alive and self.engine_client.is_ready

    @property
    def is_dead(self) -> bool:
        """Whether the engine has stopped and will not restart by itself."""
        return self.engine_client is not None and not self.engine_client.is_alive

    @property
    def state(self) -> str:
        """`unloaded`, `loading`, `ready`, `busy`, `restarting`, `failed` or `unloading`."""
        if self.engine_client is None or self.stage is Stage.UNLOADING:
            return str(self.stage.value)
        if not self.is_ready:
            return "failed" if self.is_dead else "restarting"
        return "busy" if self.engine_client.is_busy else "ready"

    def report_progress(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Record the progress of loading; a total of 0 clears it."""
        self.load_progress = LoadStatus(label, done_bytes, total_bytes) if total_bytes else None

    @property
    def loaded_share(self) -> float | None:
        """During loading: the fraction of the current part that is done."""
        progress = self.load_progress
        return None if progress is None else progress.done_bytes / progress.total_bytes

    def open(self) -> EngineClient:
        """Return the client. Raises ApiError if the model is not loaded, EngineDeadError if its engine has stopped."""
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
def prefix_context_errors(limit: int) -> Iterator[None]:
    """Prefix errors about prompts that are too long with the text by which clients detect them."""
    try:
        yield
    except RequestTooLargeError as error:
        raise RequestTooLargeError(f"This model's maximum context length is {limit} tokens; {error}") from error


class Models:
    """The served models, in the order of the command line. All stay loaded; the subclass `ModelManager` unloads."""

    def __init__(self, models: Iterable[ModelEntry], aliases: Mapping[str, str] | None = None) -> None:
        self._by_name = {model.name: model for model in models}
        self._aliases = aliases or {}
        missing = next((name for name in self._aliases.values() if name not in self._by_name), None)
        if missing is not None:
            raise ConfigError(
                f"expected aliases to name served models ({self._names}), got {missing!r}; correct or remove the alias",
                ("alias",),
            )
        self._max_sequence_tokens: int | None = None
        """Computed when all models are loaded, and constant afterwards; None: not all are loaded yet."""

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._by_name.values())

    @property
    def is_ready(self) -> bool:
        """Whether all required models can serve a request now."""
        return all(model.is_ready for model in self if model.is_required)

    def using(self, entry: ModelEntry, _tenant: str, /) -> AbstractAsyncContextManager[EngineClient]:
        """Return a context with the model's client; raises if it is not loaded, `ModelManager` waits for it instead."""
        return nullcontext(entry.open())

    @property
    def num_gateways(self) -> int:
        """The number of gateways with the same members, this one included; they divide the quotas of a key."""
        clients = [model.engine_client for model in self]
        return max((client.num_gateways for client in clients if client is not None), default=1)

    def check_waiting(self, entry: ModelEntry, _tenant: str, /) -> None:
        """Raise if the model is not loaded; `ModelManager` raises only if the request may not wait for the model."""
        entry.open()

    def drain(self) -> None:
        """Prepare for shutdown: `ModelManager` loads no more models, and refuses requests that wait for one."""

    @property
    def max_sequence_tokens(self) -> int | None:
        """The largest context length of the loaded models; None: no model is loaded."""
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
        model = self._by_name.get(name) or self._model_of_alias(name)
        if model is None:
            message = f"there is no model {shortened(name)}; this server has: {self._names}"
            raise ApiError(404, "model_not_found", message, "model")
        return model

    def _model_of_alias(self, name: str) -> ModelEntry | None:
        target = next((target for alias, target in self._aliases.items() if fnmatchcase(name, alias)), None)
        return None if target is None else self._by_name[target]

    @property
    def _names(self) -> str:
        return ", ".join(self._by_name)
