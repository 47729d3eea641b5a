"""Divide a server's memory among its models, once at startup, so that a reloaded model has the same KV capacity.
All models of one server, those loaded on demand included, are called its park.

    required memory of a model    weights + KV cache + activations and libraries
    if all models fit together    the remaining memory is divided equally among them

Reads file sizes. Only models that stay loaded (`is_kept`) are fetched from the Hub; a request never starts a download.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.checkpoints import Progress, quiet
from quire.checkpoints.gguf.parts import PART_NAME, part_paths
from quire.checkpoints.hub.files import HubName, find_local
from quire.checkpoints.names import local_path
from quire.config import MEMORY_SHARE, ModelSettings
from quire.config.home import expand_home
from quire.config.machine import memory_budget_bytes, memory_for_models_bytes
from quire.config.parked_models import OnDemandModel
from quire.errors import CheckpointError, ConfigError

PROCESS_BYTES = 1 << 29
"""Memory of one model's worker process for libraries and for activations of a step."""
MIN_KV_BYTES = 1 << 30
KV_SHARE = 0.25
"""Minimum KV cache size as a fraction of the weights."""
AUXILIARY_PREFIX = "mmproj"
"""Prefix of names of GGUF files that are only parts of a model, such as vision projectors."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The location and required memory of one model."""

    path: Path | None
    """The model's file or directory; None: not on this machine."""
    needed_bytes: int
    problem: str = ""
    """Why the model cannot be loaded; empty: it can be loaded."""


@dataclass(frozen=True, slots=True)
class ParkPlan:
    """Memory of the server, and location and required memory of each model."""

    memory_bytes: int
    by_name: Mapping[str, ModelPlan]


def plan_park(models: Sequence[OnDemandModel], settings: ModelSettings, progress: Progress = quiet) -> ParkPlan:
    """Locate each model and compute its memory. Raises CheckpointError or ConfigError for models that stay loaded."""
    total_bytes = settings.memory_bytes or memory_budget_bytes(MEMORY_SHARE)
    locations = [_locate(model, settings.memory_bytes, progress) for model in models]
    weights = [_weight_bytes(path) if isinstance(path, Path) else 0 for path in locations]
    needs = divide_memory(total_bytes, models, weights)
    by_name = {
        model.name: ModelPlan(location, need) if isinstance(location, Path) else ModelPlan(None, need, location)
        for model, location, need in zip(models, locations, needs, strict=True)
    }
    return ParkPlan(total_bytes, by_name)


def divide_memory(total_bytes: int, models: Sequence[OnDemandModel], weights: Sequence[int]) -> list[int]:
    """Return the memory of each model. If all models fit together with enough KV cache, or if all stay loaded, each
    gets its weights and an equal part of the remaining memory. Otherwise each gets its required memory, at most
    `total_bytes`. Raises ConfigError if the models that stay loaded do not fit together."""
    limits = [model.memory_bytes for model in models]
    needs = [
        min(total_bytes, weight + max(MIN_KV_BYTES, int(weight * KV_SHARE)) + PROCESS_BYTES) if limit is None else limit
        for weight, limit in zip(weights, limits, strict=True)
    ]
    minimums = [weight if limit is None else limit for weight, limit in zip(weights, limits, strict=True)]
    part_bytes = (total_bytes - sum(minimums)) // max(1, limits.count(None))
    shared = [low + part_bytes if limit is None else limit for low, limit in zip(minimums, limits, strict=True)]
    is_roomy = part_bytes > 0 and all(share >= need for share, need in zip(shared, needs, strict=True))
    if is_roomy or (part_bytes > 0 and all(model.is_kept for model in models)):
        return shared
    loaded = [(model.name, need) for model, need in zip(models, needs, strict=True) if model.is_kept]
    if sum(need for _, need in loaded) > total_bytes or (loaded and len(loaded) == len(models)):
        expected = f"expected the models that stay loaded ({', '.join(name for name, _ in loaded)}) to fit into memory"
        sizes = f"all weights take {sum(minimums):,} bytes, got {total_bytes:,} bytes; raise --memory, or keep fewer"
        raise ConfigError(f"{expected} with KV cache; {sizes}", code="kept_models_too_large")
    return needs


def _locate(model: OnDemandModel, memory_bytes: int | None, progress: Progress) -> Path | str:
    """Return the file or directory of a model, or an error message. If a Hub repository has several files, the best one
    that fits into memory is chosen."""
    limit_bytes = model.memory_bytes or memory_bytes or memory_for_models_bytes()
    if model.is_kept:
        return local_path(model.model, progress, memory_bytes=limit_bytes)
    try:
        path = expand_home(model.model, "name the model by its full path")
        if path.exists():
            _weight_bytes(path)  # a file with an invalid name must not prevent other models from being served
            return path
        hub_name = HubName.parse(model.model)
        path_or_reason = None if hub_name is None else find_local(hub_name, limit_bytes)
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        return str(error)
    hint = f"fetch it with: quire pull {model.model}" if hub_name else "check its path in the settings"
    return path_or_reason or f"the model {model.name} is not on this machine; {hint}"


def _weight_bytes(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else part_paths(path)
    return sum(file.stat().st_size for file in files if file.exists())


def models_in(folder: Path) -> list[OnDemandModel]:
    """List the models of a folder: GGUF files and directories with a config.json. Raises ConfigError."""
    try:
        entries = sorted(expand_home(folder, "--models-folder to a full path").iterdir())
    except OSError as error:
        raise ConfigError(
            f"expected a readable folder as models_folder, cannot read {folder}: {error.strerror}; check the path",
            ("models_folder",),
        ) from error
    return [OnDemandModel(_public_name(path), str(path)) for path in entries if _is_model(path)]


def _public_name(path: Path) -> str:
    parts = PART_NAME.fullmatch(path.name)
    return parts["name"] if parts else path.name if path.is_dir() else path.stem


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file()
    parts = PART_NAME.fullmatch(path.name)
    is_later_part = parts is not None and int(parts["number"]) != 1
    return path.suffix.lower() == ".gguf" and not is_later_part and not path.name.startswith(AUXILIARY_PREFIX)


def settings_of(model: OnDemandModel, settings: ModelSettings, needed_bytes: int) -> ModelSettings:
    """Return the settings of one of several models, with its own memory and maximum sequence length."""
    max_sequence_tokens = model.max_sequence_tokens or settings.max_sequence_tokens
    return replace(settings, memory_bytes=needed_bytes, max_sequence_tokens=max_sequence_tokens)
