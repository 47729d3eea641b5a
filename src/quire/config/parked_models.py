"""Models that a server knows by name, and loads when they are asked for: `[models.NAME]` in the settings file.

[models.coder]
model = "org/name:Q4_K_M"
aliases = ["claude-*"]
max_model_len = 32768
sampling = { temperature = 0.2 }
memory = "6GiB"
keep = true

Those that were named on a command line are of the same kind, and kept.
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
"""What may be said of each, here and in a model's own files."""
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
class ParkedModel:
    """One model that a server has."""

    name: str
    """What clients call it."""
    model: str
    """A directory, a .gguf file or a hub id."""
    aliases: tuple[str, ...] = ()
    max_sequence_tokens: int | None = None
    """None: as for all models."""
    memory_bytes: int | None = None
    """None: decided by its size and the memory of all."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What a request that says nothing gets."""
    is_kept: bool = False
    """Loaded at the start, and never unloaded."""
    idle_s: float | None = None
    """Unloaded when nobody has used it for so long; None: as for all models."""


def parked_models(tables: object, where: str) -> tuple[ParkedModel, ...]:
    """The models of a settings file, in its order. Raises ConfigError."""
    if not isinstance(tables, dict) or len(tables) > MAX_MODELS:
        raise ConfigError(
            f"models must be up to {MAX_MODELS:,} tables such as [models.coder], {str(tables)[:60]!r} given by {where}"
        )
    return tuple(_parked(name, table, f"[models.{name[:60]}] in {where}") for name, table in tables.items())


def all_models(*several: Iterable[ParkedModel]) -> tuple[ParkedModel, ...]:
    """Of all sources together. Raises ConfigError if two have one name."""
    found: dict[str, ParkedModel] = {}
    for one in (one for models in several for one in models):
        if one.name in found:
            raise ConfigError(
                f"names of models must differ, {one.name!r} is given to {found[one.name].model} and {one.model}; say "
                "--served-model-name for one on the command line, or rename its table"
            )
        found[one.name] = one
    return tuple(found.values())


def _parked(name: str, table: object, where: str) -> ParkedModel:
    _read("its name", text("up to 128 characters without space, comma, = and *", MODEL_NAME), name, where)
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table with model = ..., {str(table)[:60]!r} given")
    strange = next((key for key in table if key not in KEYS), None)
    if strange is not None:
        raise ConfigError(f"{strange[:60]!r} in {where} is no key of a model; the keys are {', '.join(KEYS)}")
    if "model" not in table:
        raise ConfigError(f"{where} must say model, a directory, a .gguf file or a hub id; add it")
    said: dict[str, Any] = {key: _read(key, KINDS[key], raw, where) for key, raw in table.items() if key in KINDS}
    return ParkedModel(
        name,
        said["model"],
        tuple((said.get("aliases") or "").split(",")) if said.get("aliases") else (),
        said.get("max_model_len"),
        said.get("memory"),
        _sampling(table.get("sampling", {}), where),
        bool(said.get("keep")),
        said.get("idle_s"),
    )


def _read(key: str, kind: Kind, raw: object, where: str) -> Value:
    try:
        return kind.parse(raw)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{key} must be {kind.rule}; {str(raw)[:60]!r} given by {where}; change it") from error


def _sampling(given: object, where: str) -> Mapping[str, float]:
    if not isinstance(given, dict):
        raise ConfigError(f"sampling must be a table such as {{ temperature = 0.2 }}, {given!r:.60} given by {where}")
    for key, value in given.items():
        if key not in SAMPLING_LIMITS:
            known = ", ".join(SAMPLING_LIMITS)
            raise ConfigError(f"{key[:60]!r} in {where} is no default of sampling; they are {known}")
        low, high = SAMPLING_LIMITS[key]
        if type(value) not in (int, float) or not low <= value <= high or (key == "top_k" and type(value) is not int):
            kind = "whole number" if key == "top_k" else "number"
            raise ConfigError(
                f"{key} must be a {kind} from {low:g} to {high:g}; {value!r:.60} given by {where}; change it"
            )
    return MappingProxyType(dict(given))
