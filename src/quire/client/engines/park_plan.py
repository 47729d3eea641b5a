"""Divide a server's memory among its models, once at startup, so that a reloaded model has the same KV capacity.
The models of one server, some loaded on demand, are called its park.

    required memory of a model    weights + KV cache + steps and libraries
    if all models fit together    the remaining memory is divided equally among them

Reads file sizes. Only models that stay loaded (`is_kept`) are fetched from the Hub; a request never starts a download.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.checkpoints import Progress, quiet
from quire.checkpoints.gguf.parts import PART_NAME, part_paths
from quire.checkpoints.hub.files import HubName, found_here
from quire.checkpoints.names import local_path
from quire.config import MEMORY_SHARE, ModelSettings
from quire.config.home import expanded
from quire.config.machine import memory_for_models_bytes, share_of_memory_bytes
from quire.config.parked_models import OnDemandModel
from quire.errors import CheckpointError, ConfigError

PROCESS_BYTES = 1 << 29
"""Memory of one model's worker process for libraries and for activations of a step."""
LEAST_KV_BYTES = 1 << 30
KV_SHARE = 0.25
"""Minimum KV cache size as a fraction of the weights."""
NO_MODEL_PREFIX = "mmproj"
"""Prefix of GGUF files that belong to a model but are not models, such as vision projectors."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """The location and required memory of one model."""

    path: Path | None
    """Its file or directory; None: not on this machine."""
    needed_bytes: int
    problem: str = ""
    """Why the model cannot be loaded; empty: it can."""


@dataclass(frozen=True, slots=True)
class ParkPlan:
    """Memory of the server, and location and required memory of each model."""

    memory_bytes: int
    by_name: Mapping[str, Weighed]


def plan_park(models: Sequence[OnDemandModel], settings: ModelSettings, progress: Progress = quiet) -> ParkPlan:
    """Locate each model and compute its memory. Raises CheckpointError or ConfigError for models that stay loaded."""
    total_bytes = settings.memory_bytes or share_of_memory_bytes(MEMORY_SHARE)
    places = [_place(one, settings.memory_bytes, progress) for one in models]
    weights = [_weight_bytes(path) if isinstance(path, Path) else 0 for path in places]
    needs = divided(total_bytes, models, weights)
    weighed = {
        one.name: Weighed(place, need) if isinstance(place, Path) else Weighed(None, need, place)
        for one, place, need in zip(models, places, needs, strict=True)
    }
    return ParkPlan(total_bytes, weighed)


def divided(total_bytes: int, models: Sequence[OnDemandModel], weights: Sequence[int]) -> list[int]:
    """Return the memory of each model. If all models fit together with enough KV cache, each gets its weights and an
    equal part of the rest; so does each if all stay loaded, however small the part. Otherwise each gets its required
    memory, at most `total_bytes`. Raises ConfigError if the models that stay loaded do not fit together."""
    limits = [one.memory_bytes for one in models]
    needs = [
        min(total_bytes, own + max(LEAST_KV_BYTES, int(own * KV_SHARE)) + PROCESS_BYTES) if limit is None else limit
        for own, limit in zip(weights, limits, strict=True)
    ]
    least = [own if limit is None else limit for own, limit in zip(weights, limits, strict=True)]
    part_bytes = (total_bytes - sum(least)) // max(1, limits.count(None))
    shared = [one + part_bytes if limit is None else limit for one, limit in zip(least, limits, strict=True)]
    is_roomy = part_bytes > 0 and all(have >= need for have, need in zip(shared, needs, strict=True))
    if is_roomy or (part_bytes > 0 and all(one.is_kept for one in models)):
        return shared
    kept = [(one.name, need) for one, need in zip(models, needs, strict=True) if one.is_kept]
    if sum(need for _, need in kept) > total_bytes or (kept and len(kept) == len(models)):
        rule = f"expected the models that are kept ({', '.join(name for name, _ in kept)}) to fit into memory"
        sizes = f"all weights take {sum(least):,} bytes, got {total_bytes:,} bytes; raise --memory, or keep fewer"
        raise ConfigError(f"{rule} with room for KV; {sizes}", code="kept_models_too_large")
    return needs


def _place(model: OnDemandModel, memory_bytes: int | None, progress: Progress) -> Path | str:
    """Return the file or directory of a model, or the reason if there is none. If a repository has several files, the
    best that fits into memory is chosen."""
    limit_bytes = model.memory_bytes or memory_bytes or memory_for_models_bytes()
    if model.is_kept:
        return local_path(model.model, progress, memory_bytes=limit_bytes)
    try:
        path = expanded(model.model, "name the model by its full path")
        if path.exists():
            _weight_bytes(path)  # a file with an invalid name must not prevent other models from being served
            return path
        wanted = HubName.parsed(model.model)
        found = None if wanted is None else found_here(wanted, limit_bytes)
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        return str(error)
    how = f"fetch it with: quire pull {model.model}" if wanted else "check its path in the settings"
    return found or f"the model {model.name} is not on this machine; {how}"


def _weight_bytes(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else part_paths(path)
    return sum(file.stat().st_size for file in files if file.exists())


def models_in(folder: Path) -> list[OnDemandModel]:
    """List the models of a folder: GGUF files and directories with a config.json. Raises ConfigError."""
    try:
        entries = sorted(expanded(folder, "--models-folder to a full path").iterdir())
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
    return path.suffix.lower() == ".gguf" and not is_later_part and not path.name.startswith(NO_MODEL_PREFIX)


def settings_of(model: OnDemandModel, settings: ModelSettings, needed_bytes: int) -> ModelSettings:
    """Return the settings of one of several models, with its own memory and maximum sequence length."""
    longest = model.max_sequence_tokens or settings.max_sequence_tokens
    return replace(settings, memory_bytes=needed_bytes, max_sequence_tokens=longest)
