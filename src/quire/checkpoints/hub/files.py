"""Models of the hub on this machine, where the hub's own library keeps its files: other programs find what quire
fetched, and quire what they did.

    blobs/DIGEST               a file (hub_download.py)
    snapshots/COMMIT/NAME      a link to it: only now it can be opened
    refs/main                  COMMIT, when all files of a model are there
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from quire.checkpoints.hub.download import INCOMPLETE, check_space, fetched
from quire.checkpoints.hub.listing import BESIDE_WEIGHTS, COMMIT, listed
from quire.checkpoints.hub.variants import SAFETENSORS, HubFile, Judged, Variant, judge_variants, named, variants_of
from quire.checkpoints.progress import Progress
from quire.checkpoints.strict_json import read_json_object
from quire.config.home import expanded
from quire.errors import CheckpointError

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::(?P<label>[A-Za-z0-9._-]{1,40}))?"
)

OnJudged = Callable[[list[Judged]], None]
"""Receives all variants and which one was taken, before the download."""


@dataclass(frozen=True, slots=True)
class HubName:
    """What a user typed: a repository, and perhaps which of its models."""

    repository: str
    label: str | None = None

    @classmethod
    def parsed(cls, name: str) -> "HubName | None":
        """None if it is no hub id."""
        match = HUB_NAME.fullmatch(name)
        return cls(match["repository"], match["label"]) if match else None

    @property
    def folder(self) -> Path:
        """Where the hub's library keeps it."""
        return hub_cache() / f"models--{self.repository.replace('/', '--')}"


def ignore_judged(_judged: list[Judged]) -> None:
    """Of what a repository has."""


def hub_cache() -> Path:
    """The folder of the hub's library."""
    from huggingface_hub.constants import HF_HUB_CACHE

    # Without a home the library would make a folder that is called ~ where it stands.
    return expanded(HF_HUB_CACHE, "HF_HOME")


def found_here(wanted: HubName, memory_bytes: int) -> Path | None:
    """The model, if all of it is on this machine: no network is asked."""
    folder = wanted.folder
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        snapshot = folder / "snapshots" / commit
        if not COMMIT.fullmatch(commit):
            return None
        files = [HubFile(path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in _files(snapshot)]
    except (OSError, ValueError):
        return None
    whole = [one for one in variants_of(files, BESIDE_WEIGHTS) if _is_whole(one, snapshot)]
    try:
        return _place(snapshot, _chosen(whole, wanted, memory_bytes, ignore_judged)) if whole else None
    except CheckpointError:  # another model of the repository is here
        return None


def pull(wanted: HubName, memory_bytes: int, progress: Progress, on_judged: OnJudged) -> Path:
    """Fetch what is not here yet, and return the model's file or folder."""
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
    """The one that was named, else the best that fits."""
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
    """As the hub's library does it: relative, so that the folder may move."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, pointer.parent)
    if pointer.is_symlink() and os.readlink(pointer) == target:
        return
    fresh = _fresh(pointer)
    fresh.symlink_to(target)
    fresh.replace(pointer)


def _note_commit(reference: Path, commit: str) -> None:
    """Who reads it finds the commit before or this one, never half of it."""
    reference.parent.mkdir(exist_ok=True)
    fresh = _fresh(reference)
    fresh.write_text(commit, encoding="ascii")
    fresh.replace(reference)


def _fresh(path: Path) -> Path:
    """A name beside it that no other download has: two of the same file do not meet."""
    return path.with_name(f"{path.name}.{uuid4().hex}{INCOMPLETE}")


# -- what is here ------------------------------------------------------------------------------------------------------


def _files(snapshot: Path) -> list[Path]:
    return [path for path in snapshot.rglob("*") if path.is_file() and not path.name.endswith(INCOMPLETE)]


def _is_whole(variant: Variant, snapshot: Path) -> bool:
    """GGUF files are; safetensors are if config and every file of the index are there."""
    if variant.label != SAFETENSORS:
        return True
    names = {file.name for file in variant.files}
    index = snapshot / "model.safetensors.index.json"
    if not index.exists():
        return {"config.json", "model.safetensors"} <= names
    try:
        weights = read_json_object(index).get("weight_map")
    except CheckpointError:
        return False
    if not isinstance(weights, dict):
        return False
    return "config.json" in names and all(isinstance(one, str) and one in names for one in weights.values())


def _place(snapshot: Path, variant: Variant) -> Path:
    return snapshot if variant.label == SAFETENSORS else snapshot / variant.first_name
