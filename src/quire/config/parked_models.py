"""Parked models: models that a server loads on demand, `[models.NAME]` in the settings file.

[models.coder]
model = "org/name:Q4_K_M"
aliases = ["claude-*"]
max_model_len = 32768
sampling = { temperature = 0.2 }
memory = "6GiB"
keep = true

Models from the command line have the same type, but are loaded at start and never unloaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.config.kinds import SIZE, SWITCH, Kind, Value, seconds, several, text, whole_number
from quire.errors import ConfigError

MAX_IDLE_S = 31_536_000.0
MAX_MODELS = 1000
MODEL_NAME = r"[^\s=,*\x00-\x1f]{1,128}"
SAMPLING_LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 100.0),
        "top_k": (0, (1 << 31) - 1),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-3, 1e3),
    }
)
"""Valid ranges of sampling defaults, here and in a model's own files."""
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "model": text("a directory, a .gguf file or a hub id", r"[^\0]+"),
        "aliases": several("NAMES", "other names without commas and spaces; * stands for any characters",
                           r"[^\s=,]{1,128}", str),
        "max_model_len": whole_number(2, 1 << 30),
        "memory": SIZE,
        "keep": SWITCH,
        "idle_s": seconds(MAX_IDLE_S),
    }
)  # fmt: skip
KEYS = (*KINDS, "sampling")


@dataclass(frozen=True, slots=True)
class OnDemandModel:
    """A model that a server loads on demand, or at start if `is_kept`."""

    name: str
    """Name of the model in requests."""
    model: str
    """A directory, a .gguf file or a hub id."""
    aliases: tuple[str, ...] = ()
    max_sequence_tokens: int | None = None
    """None: the server's `max_model_len`."""
    memory_bytes: int | None = None
    """None: derived from the model's size and the memory limit of all models."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Default sampling parameters for requests that omit them."""
    is_kept: bool = False
    """Loaded at start and never unloaded."""
    idle_s: float | None = None
    """Unloaded after this many seconds without a request; None: the server's `idle_s`."""


def parked_models(tables: object, where: str) -> tuple[OnDemandModel, ...]:
    """Parse the models of a settings file, in file order. Raises ConfigError."""
    if not isinstance(tables, dict) or len(tables) > MAX_MODELS:
        got = f"got {str(tables)[:60]!r} from {where}"
        raise ConfigError(f"expected at most {MAX_MODELS:,} tables such as [models.coder], {got}", ("models",))
    return tuple(_parse_model(name, table, f"[models.{name[:60]}] in {where}") for name, table in tables.items())


def all_models(*sources: Iterable[OnDemandModel]) -> tuple[OnDemandModel, ...]:
    """Combine the models of all sources. Raises ConfigError if two have the same name."""
    by_name: dict[str, OnDemandModel] = {}
    for model in (model for models in sources for model in models):
        if model.name in by_name:
            message = f"expected distinct names, got {model.name!r} for {by_name[model.name].model} and {model.model}"
            hint = "set --served-model-name for one on the command line, or rename its table"
            raise ConfigError(f"{message}; {hint}", code="duplicate_model_name")
        by_name[model.name] = model
    return tuple(by_name.values())


def _parse_model(name: str, table: object, where: str) -> OnDemandModel:
    _read("the model name", text("up to 128 characters without space, comma, = and *", MODEL_NAME), name, where)
    if not isinstance(table, dict):
        raise ConfigError(f"expected a table with model = ... as {where}, got {str(table)[:60]!r}", ("models",))
    unknown_key = next((key for key in table if key not in KEYS), None)
    if unknown_key is not None:
        message = f"unknown key {unknown_key[:60]!r} in {where}; the keys are {', '.join(KEYS)}"
        raise ConfigError(message, code="unknown_key")
    if "model" not in table:
        message = f"expected model in {where}: a directory, a .gguf file or a hub id; add it"
        raise ConfigError(message, code="model_missing")
    values: dict[str, Any] = {key: _read(key, KINDS[key], raw, where) for key, raw in table.items() if key in KINDS}
    return OnDemandModel(
        name,
        values["model"],
        tuple((values.get("aliases") or "").split(",")) if values.get("aliases") else (),
        values.get("max_model_len"),
        values.get("memory"),
        _sampling(table.get("sampling", {}), where),
        bool(values.get("keep")),
        values.get("idle_s"),
    )


def _read(key: str, kind: Kind, raw: object, where: str) -> Value:
    try:
        return kind.parse(raw)
    except (ValueError, OverflowError) as error:
        message = f"expected {key} to be {kind.rule}, got {str(raw)[:60]!r} from {where}; change it"
        raise ConfigError(message, (key,)) from error


def _sampling(raw: object, where: str) -> Mapping[str, float]:
    if not isinstance(raw, dict):
        message = f"expected sampling to be a table such as {{ temperature = 0.2 }}, got {raw!r:.60} from {where}"
        raise ConfigError(message, ("sampling",))
    for key, value in raw.items():
        if key not in SAMPLING_LIMITS:
            names = ", ".join(SAMPLING_LIMITS)
            message = f"unknown sampling default {key[:60]!r} in {where}; the defaults are {names}"
            raise ConfigError(message, code="unknown_sampling_default")
        low, high = SAMPLING_LIMITS[key]
        if type(value) not in (int, float) or not low <= value <= high or (key == "top_k" and type(value) is not int):
            kind = "whole number" if key == "top_k" else "number"
            message = f"expected {key} to be a {kind} from {low:g} to {high:g}, got {value!r:.60} from {where}"
            raise ConfigError(f"{message}; change it", (key,))
    return MappingProxyType(dict(raw))
