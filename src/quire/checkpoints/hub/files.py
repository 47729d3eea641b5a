"""Hub models on this machine, in the cache layout of huggingface_hub, so that quire and other programs share downloads.

blobs/DIGEST               a file's content (see download.py)
snapshots/COMMIT/NAME      a symbolic link to the blob, created when it is complete
refs/main                  COMMIT, written when all files of a model are present
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from quire.checkpoints.hub.download import INCOMPLETE, check_space, fetched
from quire.checkpoints.hub.listing import COMMIT, listed
from quire.checkpoints.hub.variants import SAFETENSORS, HubFile, Judged, Variant, judge_variants, named, variants_of
from quire.checkpoints.progress import Progress
from quire.checkpoints.weights import weight_paths
from quire.config.home import expanded
from quire.errors import CheckpointError

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::(?P<label>[A-Za-z0-9._-]{1,40}))?"
)

OnJudged = Callable[[list[Judged]], None]
"""Called before the download with all variants, of which one is marked as taken."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A Hub id from a user: a repository, and optionally the label of a variant."""

    repository: str
    label: str | None = None

    @classmethod
    def parsed(cls, name: str) -> "HubName | None":
        """Parse `org/name` or `org/name:LABEL`; return None if `name` is not a Hub id."""
        match = HUB_NAME.fullmatch(name)
        return cls(match["repository"], match["label"]) if match else None

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache of huggingface_hub."""
        return hub_cache() / f"models--{self.repository.replace('/', '--')}"


def ignore_judged(_judged: list[Judged]) -> None:
    """Do nothing: the default of `on_judged`."""


def hub_cache() -> Path:
    """Return the cache folder of huggingface_hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    # Without a home directory, the library would create a folder named ~ in the working directory.
    return expanded(HF_HUB_CACHE, "HF_HOME")


def found_here(wanted: HubName, memory_bytes: int) -> Path | None:
    """Return the model's local file or folder, or None if it is not complete. Uses no network."""
    folder = wanted.folder
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
    whole = [one for one in variants_of(files) if _is_whole(one, snapshot)]
    try:
        return _place(snapshot, _chosen(whole, wanted, memory_bytes, ignore_judged)) if whole else None
    except CheckpointError:  # only other variants of the repository are present
        return None


def pull(wanted: HubName, memory_bytes: int, progress: Progress, on_judged: OnJudged) -> Path:
    """Download missing files; return the model's file or folder. Raises CheckpointError."""
    repository = listed(wanted.repository)
    if not repository.variants:
        missing = f"expected a GGUF file or a model.safetensors in {repository.name}, found neither"
        raise CheckpointError(f"{missing}; look for another repository of this model", code="no_model_files")
    variant = _chosen(repository.variants, wanted, memory_bytes, on_judged)
    folder, snapshot = wanted.folder, wanted.folder / "snapshots" / repository.commit
    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        check_space(folder / "blobs", variant)
        for file in variant.files:
            _link(fetched(repository, file, folder / "blobs", progress), snapshot / file.name)
        _note_commit(folder / "refs" / "main", repository.commit)
    except OSError as error:
        why = f"cannot store {wanted.repository} in {folder}: {error.strerror or error}"
        way_out = "check the disk, or set HF_HOME to another folder"
        raise CheckpointError(f"{why}; {way_out}", code="folder_not_writable") from error
    return _place(snapshot, variant)


def _chosen(variants: Sequence[Variant], wanted: HubName, memory_bytes: int, on_judged: OnJudged) -> Variant:
    """Return the requested variant, or the best that fits in memory. Raises CheckpointError if there is none."""
    if wanted.label is not None:
        return named(variants, wanted.label, wanted.repository)
    judged = judge_variants(variants, memory_bytes)
    on_judged(judged)
    return _taken(judged, wanted.repository, memory_bytes)


def _taken(judged: list[Judged], name: str, memory_bytes: int) -> Variant:
    for one in judged:
        if one.is_taken:
            return one.variant
    known = [one.variant for one in judged if one.variant.bits is not None]
    if not known:
        labels = ", ".join(one.variant.label for one in judged)
        sentence = f"{name} has {labels}, none of which quire runs; look for another repository"
        raise CheckpointError(sentence, code="unsupported_variants")
    least = min(known, key=lambda one: one.needed_bytes)
    rule = f"{least.needed_bytes / 1e9:,.1f} GB of memory for {least.label}, the smallest variant of {name}"
    sizes = f"expected at least {rule}, got {memory_bytes / 1e9:,.1f} GB"
    raise CheckpointError(f"{sizes}; raise --memory, or choose a smaller model", code="no_variant_fits")


def _link(blob: Path, pointer: Path) -> None:
    """Link to a blob as huggingface_hub does: with a relative path, so that the folder can be moved."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, pointer.parent)
    if pointer.is_symlink() and os.readlink(pointer) == target:
        return
    fresh = _fresh(pointer)
    fresh.symlink_to(target)
    fresh.replace(pointer)


def _note_commit(reference: Path, commit: str) -> None:
    """Write the commit atomically."""
    reference.parent.mkdir(exist_ok=True)
    fresh = _fresh(reference)
    fresh.write_text(commit, encoding="ascii")
    fresh.replace(reference)


def _fresh(path: Path) -> Path:
    """Return a unique temporary path in the same folder, so that concurrent downloads do not collide."""
    return path.with_name(f"{path.name}.{uuid4().hex}{INCOMPLETE}")


# -- what is here ------------------------------------------------------------------------------------------------------


def _is_whole(variant: Variant, snapshot: Path) -> bool:
    """Whether config and all files of the index are present. GGUF variants are complete, see `variants_of`."""
    if variant.label != SAFETENSORS:
        return True
    try:
        weights = {path.name for path in weight_paths(snapshot)}
    except CheckpointError:
        return False
    return {"config.json", *weights} <= {file.name for file in variant.files}


def _place(snapshot: Path, variant: Variant) -> Path:
    return snapshot if variant.label == SAFETENSORS else snapshot / variant.first_name
