"""From what a user types to a model on disk: a directory, a GGUF file, or the id of a repository on the hub."""

import re
from pathlib import Path
from typing import Any

from quire.checkpoints.cache import cache_folder
from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.directory import Weights, read_described, read_directory
from quire.checkpoints.gguf_model import gguf_described, plan
from quire.checkpoints.progress import Progress, quiet
from quire.config.home import expanded
from quire.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
HUB_FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model"]


def resolve(name: str, *, progress: Progress = quiet, cache: Path | None = None) -> Checkpoint:
    """The checkpoint of this name: a directory, the path of a `.gguf` file, or a hub id such as `org/name`.

    Of a GGUF file config and tokenizer are written into the cache folder the first time. Raises CheckpointError, or
    ConfigError where a home directory is needed and there is none; nothing else.
    """
    try:
        path = Path(name).expanduser()
        if path.suffix.lower() == ".gguf" and not path.is_dir():
            return _in_one_file(path, name, progress, cache or cache_folder())
        directory = _directory(path, name)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a folder not to be entered, no home
        raise CheckpointError(f"the model {name[:200]!r} cannot be opened: {error}; check the name") from error
    return read_directory(directory, name)


def _in_one_file(path: Path, name: str, progress: Progress, cache: Path) -> Checkpoint:
    file, directory = gguf_described(path, cache, progress)
    _, tensors = plan(file)
    source = path.resolve()
    # By name and type, but not by the file's own name: a copy of it is the same model.
    header = {name: [tensor.type, tensor.shape] for name, tensor in tensors.items()}
    weights = Weights(source, (source,), tensors, [[file.file_bytes, header]])
    try:
        return read_described(directory, name, lambda _config: weights)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. This was made of {path.name}: to do so again, delete {directory}") from error


def _directory(path: Path, name: str) -> Path:
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CheckpointError(
            f"a model is a directory or a .gguf file, {name!r} is neither; give the model's directory"
        )
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"a model is a directory, a .gguf file, or a hub id such as 'org/name'; {name[:200]!r} is none of them "
            "here; check the path"
        )
    return _download(name)


def _download(name: str) -> Path:
    """The repository's files in huggingface_hub's own cache: only those quire reads, none from subfolders."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    # Without a home the library would make a folder that is called ~ where it stands.
    expanded(HF_HUB_CACHE, "HF_HOME")
    try:
        found: Any = huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"])
    except GatedRepoError as error:
        why = "its owner asks you to accept terms first; do so on its page and set HF_TOKEN"
        raise CheckpointError(f"{name!r} cannot be downloaded: {why}") from error
    except RepositoryNotFoundError as error:
        why = "the hub has no such repository, or you may not see it; check the spelling, or set HF_TOKEN"
        raise CheckpointError(f"{name!r} cannot be downloaded: {why}") from error
    except LocalEntryNotFoundError as error:
        why = "it is not in the local cache, and the hub is out of reach or HF_HUB_OFFLINE is set"
        hint = "connect once to fetch it, or give a local directory"
        raise CheckpointError(f"{name!r} cannot be downloaded: {why}; {hint}") from error
    except Exception as error:  # the library lets those of its HTTP client through
        raise CheckpointError(
            f"{name!r} cannot be downloaded: {str(error)[:200]}; try again, or give a local directory"
        ) from error
    return Path(found)
