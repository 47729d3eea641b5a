"""Resolves the model name that a user passes: a directory, a GGUF file, or a Hub id."""

from pathlib import Path

from quire.checkpoints.cache import cache_folder
from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.directory import Weights, read_described, read_directory
from quire.checkpoints.gguf.model import describe_gguf, plan
from quire.checkpoints.hub.files import HubName, OnJudged, find_local, ignore_judged, pull
from quire.checkpoints.progress import Progress, quiet
from quire.config.machine import memory_for_models_bytes
from quire.errors import CheckpointError


def resolve(
    name: str, *, progress: Progress = quiet, cache: Path | None = None, on_judged: OnJudged = ignore_judged
) -> Checkpoint:
    """Open a checkpoint: a directory, the path of a `.gguf` file, or a Hub id such as `org/name:Q4_K_M`.

    Downloads Hub models that are not on this machine. Writes the config and tokenizer of a GGUF file into the cache
    folder on first use. Raises CheckpointError, or ConfigError if a home directory is needed and missing.
    """
    try:
        path = local_path(name, progress, on_judged)
        if path.suffix.lower() == ".gguf" and not path.is_dir():
            return _read_gguf(path, name, progress, cache or cache_folder())
    except (OSError, ValueError, RuntimeError) as error:  # name too long, NUL byte, no permission, no home directory
        raise CheckpointError(f"the model {name[:200]!r} cannot be opened: {error}; check the name") from error
    return read_directory(path.resolve(), name)


def local_path(
    name: str, progress: Progress = quiet, on_judged: OnJudged = ignore_judged, memory_bytes: int | None = None
) -> Path:
    """Return the model's local file or folder. Downloads a Hub model that is not on this machine, in a variant that
    fits in `memory_bytes` (default: this machine's memory). Raises CheckpointError."""
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix.lower() == ".gguf":
        return path
    if path.exists():
        message = f"expected a directory or a .gguf file, {name!r} is neither; pass the model's directory"
        raise CheckpointError(message, code="not_a_model")
    hub_name = HubName.parse(name)
    if hub_name is None:
        message = "expected a directory, a .gguf file, or a hub id such as 'org/name' or 'org/name:Q4_K_M'"
        raise CheckpointError(f"{message}, got {name[:200]!r}; check the path", code="invalid_model_name")
    limit = memory_for_models_bytes() if memory_bytes is None else memory_bytes
    return find_local(hub_name, limit) or pull(hub_name, limit, progress, on_judged)


def _read_gguf(path: Path, name: str, progress: Progress, cache: Path) -> Checkpoint:
    file, directory = describe_gguf(path, cache, progress)
    _, tensors = plan(file)
    files = tuple(part.path.resolve() for part in file.parts)
    # The fingerprint excludes the file's name, so that a renamed copy is the same model.
    header = {name: [tensor.type, tensor.shape] for name, tensor in tensors.items()}
    weights = Weights(files[0], files, tensors, [[file.file_bytes, header]])
    try:
        return read_described(directory, name, lambda _config: weights)
    except CheckpointError as error:
        message = f"{error}. {directory} was converted from {path.name}: delete it to convert again"
        raise CheckpointError(message, code="conversion_damaged") from error
