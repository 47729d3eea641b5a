"""Hub models on this machine, in the cache layout of huggingface_hub, so that quire and other programs share downloads.

blobs/DIGEST               a file's content (see download.py)
snapshots/COMMIT/NAME      a symbolic link to the blob, created when the blob is complete
refs/main                  COMMIT, written when all files of a model are present
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from quire.checkpoints.hub.download import INCOMPLETE, check_space, fetch_file
from quire.checkpoints.hub.listing import COMMIT, list_repository
from quire.checkpoints.hub.variants import SAFETENSORS, HubFile, Variant, Verdict, judge_variants, select, variants_of
from quire.checkpoints.progress import Progress
from quire.checkpoints.weights import weight_paths
from quire.config.home import expand_home
from quire.errors import CheckpointError

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::(?P<label>[A-Za-z0-9._-]{1,40}))?"
)

OnJudged = Callable[[list[Verdict]], None]
"""Callback: receives all variants before the download; at most one of them is marked as selected."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A Hub id from a user: a repository, and optionally the label of a variant (a quantization such as Q4_K_M)."""

    repository: str
    label: str | None = None

    @classmethod
    def parse(cls, name: str) -> "HubName | None":
        """Parse `org/name` or `org/name:LABEL`; return None if `name` is not a Hub id."""
        match = HUB_NAME.fullmatch(name)
        return cls(match["repository"], match["label"]) if match else None

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache of huggingface_hub."""
        return hub_cache() / f"models--{self.repository.replace('/', '--')}"


def ignore_judged(_judged: list[Verdict]) -> None:
    """Do nothing: the default of `on_judged`."""


def hub_cache() -> Path:
    """Return the cache folder of huggingface_hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    # Without a home directory, the library would create a folder named ~ in the working directory.
    return expand_home(HF_HUB_CACHE, "HF_HOME")


def find_local(hub_name: HubName, memory_bytes: int) -> Path | None:
    """Return the model's local file or folder, or None if files are missing. Uses no network."""
    folder = hub_name.folder
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        snapshot = folder / "snapshots" / commit
        if not COMMIT.fullmatch(commit):
            return None
        files = [
            HubFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
            for path in snapshot.rglob("*")
            if path.is_file() and not path.name.endswith(INCOMPLETE)
        ]
    except (OSError, ValueError):
        return None
    complete = [variant for variant in variants_of(files) if _is_complete(variant, snapshot)]
    try:
        return _local_path(snapshot, _choose(complete, hub_name, memory_bytes, ignore_judged)) if complete else None
    except CheckpointError:  # only other variants of the repository are present
        return None


def pull(hub_name: HubName, memory_bytes: int, progress: Progress, on_judged: OnJudged) -> Path:
    """Download missing files; return the model's file or folder. Raises CheckpointError."""
    repository = list_repository(hub_name.repository)
    if not repository.variants:
        problem = f"expected a GGUF file or a model.safetensors in {repository.name}, found neither"
        raise CheckpointError(f"{problem}; look for another repository of this model", code="no_model_files")
    variant = _choose(repository.variants, hub_name, memory_bytes, on_judged)
    folder, snapshot = hub_name.folder, hub_name.folder / "snapshots" / repository.commit
    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        check_space(folder / "blobs", variant)
        for file in variant.files:
            _link(fetch_file(repository, file, folder / "blobs", progress), snapshot / file.name)
        _write_commit(folder / "refs" / "main", repository.commit)
    except OSError as error:
        message = f"cannot store {hub_name.repository} in {folder}: {error.strerror or error}"
        hint = "check the disk, or set HF_HOME to another folder"
        raise CheckpointError(f"{message}; {hint}", code="folder_not_writable") from error
    return _local_path(snapshot, variant)


def _choose(variants: Sequence[Variant], hub_name: HubName, memory_bytes: int, on_judged: OnJudged) -> Variant:
    """Return the requested variant, or the best that fits in memory. Raises CheckpointError if there is none."""
    if hub_name.label is not None:
        return select(variants, hub_name.label, hub_name.repository)
    verdicts = judge_variants(variants, memory_bytes)
    on_judged(verdicts)
    return _selected(verdicts, hub_name.repository, memory_bytes)


def _selected(verdicts: list[Verdict], name: str, memory_bytes: int) -> Variant:
    for verdict in verdicts:
        if verdict.is_selected:
            return verdict.variant
    supported = [verdict.variant for verdict in verdicts if verdict.variant.bits is not None]
    if not supported:
        labels = ", ".join(verdict.variant.label for verdict in verdicts)
        message = f"{name} has {labels}, none of which quire runs; look for another repository"
        raise CheckpointError(message, code="unsupported_variants")
    smallest = min(supported, key=lambda variant: variant.needed_bytes)
    need = f"{smallest.needed_bytes / 1e9:,.1f} GB of memory for {smallest.label}, the smallest variant of {name}"
    sizes = f"expected at least {need}, got {memory_bytes / 1e9:,.1f} GB"
    raise CheckpointError(f"{sizes}; raise --memory, or choose a smaller model", code="no_variant_fits")


def _link(blob: Path, link: Path) -> None:
    """Link to a blob as huggingface_hub does: with a relative path, so that the folder can be moved."""
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, link.parent)
    if link.is_symlink() and os.readlink(link) == target:
        return
    temporary = _temporary_path(link)
    temporary.symlink_to(target)
    temporary.replace(link)


def _write_commit(reference: Path, commit: str) -> None:
    """Write the commit to `refs/main` atomically."""
    reference.parent.mkdir(exist_ok=True)
    temporary = _temporary_path(reference)
    temporary.write_text(commit, encoding="ascii")
    temporary.replace(reference)


def _temporary_path(path: Path) -> Path:
    """Return a unique temporary path in the same folder, so that concurrent downloads do not collide."""
    return path.with_name(f"{path.name}.{uuid4().hex}{INCOMPLETE}")


# -- local files -------------------------------------------------------------------------------------------------------


def _is_complete(variant: Variant, snapshot: Path) -> bool:
    """Whether config and all weight files are present. For GGUF, `variants_of` returns only complete variants."""
    if variant.label != SAFETENSORS:
        return True
    try:
        weights = {path.name for path in weight_paths(snapshot)}
    except CheckpointError:
        return False
    return {"config.json", *weights} <= {file.name for file in variant.files}


def _local_path(snapshot: Path, variant: Variant) -> Path:
    return snapshot if variant.label == SAFETENSORS else snapshot / variant.first_name
