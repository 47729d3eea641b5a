"""Models of the hub on this machine: what a repository has, fetched whole, checked and put where the hub's own library
keeps its files.

    blobs/DIGEST.quire.incomplete      being fetched: goes on where it broke off, whoever broke it
    blobs/DIGEST                       whole, and its digest is the one the hub tells
    snapshots/COMMIT/NAME              a link to the blob: only now it can be opened
    refs/main                          COMMIT, when all files of a model are there

The hub is asked by its own library. Nothing it says is trusted: names, sizes, commits and digests are checked before a
path is made of them.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quire.checkpoints.cache import SPARE_BYTES, free_bytes
from quire.checkpoints.hub_variants import SAFETENSORS, HubFile, Judged, Variant, choose, named, variants_of
from quire.checkpoints.progress import Progress
from quire.checkpoints.strict_json import read_json_object
from quire.config.home import expanded
from quire.errors import CheckpointError

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::(?P<label>[A-Za-z0-9._-]{1,40}))?"
)
BESIDE_WEIGHTS = ("*.json", "*.jinja", "tokenizer.model")
SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._+@=,()-]{0,199}")
MAX_DEPTH = 3
MAX_FILES = 10_000
MAX_FILE_BYTES = 1 << 44
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
INCOMPLETE = ".quire.incomplete"
READ_BYTES = 1 << 20
LIST_TIMEOUT_S = READ_TIMEOUT_S = 30.0
WORTH_WAITING = frozenset({408, 429, 500, 502, 503, 504})
MAX_FAILED = 5
PAUSE_S = 0.5
_pause = time.sleep

Tell = Callable[[list[Judged]], None]
"""Hears what there is and what was taken, before anything is fetched."""


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


@dataclass(frozen=True, slots=True)
class Repository:
    """What the hub tells of one, checked."""

    name: str
    commit: str
    variants: tuple[Variant, ...]


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
        return _place(snapshot, _picked(whole, wanted, memory_bytes)) if whole else None
    except CheckpointError:  # another model of the repository is here
        return None


def pull(wanted: HubName, memory_bytes: int, progress: Progress, tell: Tell) -> Path:
    """Fetch what is not here yet, and return the model's file or folder."""
    repository = listed(wanted.repository)
    variant = _chosen(repository, wanted, memory_bytes, tell)
    folder, snapshot = wanted.folder, wanted.folder / "snapshots" / repository.commit
    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        _check_space(folder / "blobs", variant)
        for file in variant.files:
            _link(_fetched(repository, file, folder / "blobs", progress), snapshot / file.name)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(repository.commit, encoding="ascii")
    except OSError as error:
        raise CheckpointError(
            f"{wanted.repository} cannot be kept in {folder}: {error.strerror or error}; check the disk, or set "
            "HF_HOME to another folder"
        ) from error
    return _place(snapshot, variant)


def listed(name: str) -> Repository:
    """Ask the hub what the repository has."""
    import huggingface_hub

    with hub_errors(name):
        told = huggingface_hub.HfApi().model_info(name, files_metadata=True, timeout=LIST_TIMEOUT_S)
    if told.sha is None or not COMMIT.fullmatch(told.sha):
        raise _odd(name, f"a commit {str(told.sha)[:60]!r}")
    siblings = told.siblings or []
    if len(siblings) > MAX_FILES:
        raise _odd(name, f"{len(siblings):,} files, {MAX_FILES:,} are allowed")
    files = [_checked(name, one) for one in siblings if is_safe_name(one.rfilename)]
    return Repository(name, told.sha, tuple(variants_of(files, BESIDE_WEIGHTS)))


def is_safe_name(name: str) -> bool:
    """Whether a file of this name lies inside of its folder on any system, and is not hidden."""
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(
        SAFE_PART.fullmatch(part) and not part.endswith((".", " ")) for part in parts
    )


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """What the hub's library raises becomes a CheckpointError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    offline = "the hub is out of reach or HF_HUB_OFFLINE is set; connect once to fetch it, or give a local file"
    try:
        yield
    except CheckpointError:
        raise
    except GatedRepoError as error:
        why = "its owner asks you to accept terms first; do so on its page and set HF_TOKEN"
        raise CheckpointError(f"{name!r} cannot be downloaded: {why}") from error
    except RepositoryNotFoundError as error:
        why = "the hub has no such repository, or you may not see it; check the spelling, or set HF_TOKEN"
        raise CheckpointError(f"{name!r} cannot be downloaded: {why}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(f"{name!r} is not in the local cache, and {offline}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name!r} cannot be downloaded: {_said(error)}") from error
    except Exception as error:  # the library lets those of its HTTP client through
        raise CheckpointError(
            f"{name!r} cannot be downloaded: {str(error)[:200]}; what was fetched is kept: try again, or give a "
            "local file"
        ) from error


def _said(error: Any) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 429:
        return "the hub asks for a pause (429); try again in some minutes, or set HF_TOKEN, which may do more"
    if status in (401, 403):
        return f"the hub refuses ({status}); set HF_TOKEN to a token that may read it"
    return f"the hub answered {status}: {str(error)[:200]}; try again later"


def _odd(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the hub tells of {name} {what}, which quire does not believe; try again, or another mirror"
    )


def _checked(repository: str, told: Any) -> HubFile:
    lfs = told.lfs
    size = lfs.size if lfs is not None else told.size
    sha256, sha1 = lfs.sha256 if lfs is not None else None, told.blob_id
    if not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
        raise _odd(repository, f"a size of {size!r} for {told.rfilename}")
    digest, pattern = (sha256, SHA256) if lfs is not None else (sha1, COMMIT)
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise _odd(repository, f"the hash {str(digest)[:80]!r} for {told.rfilename}")
    return HubFile(told.rfilename, size, sha256, None if lfs is not None else sha1)


def _chosen(repository: Repository, wanted: HubName, memory_bytes: int, tell: Tell) -> Variant:
    variants = repository.variants
    if not variants:
        raise CheckpointError(
            f"{repository.name} has no GGUF file and no model.safetensors, which quire runs; look for another "
            "repository of this model"
        )
    if wanted.label is not None:
        return named(variants, wanted.label, repository.name)
    judged = choose(variants, memory_bytes)
    tell(judged)
    return _taken(judged, repository.name, memory_bytes)


def _picked(variants: list[Variant], wanted: HubName, memory_bytes: int) -> Variant:
    if wanted.label is not None:
        return named(variants, wanted.label, wanted.repository)
    return _taken(choose(variants, memory_bytes), wanted.repository, memory_bytes)


def _taken(judged: list[Judged], name: str, memory_bytes: int) -> Variant:
    for one in judged:
        if one.is_taken:
            return one.variant
    known = [one.variant for one in judged if one.variant.bits is not None]
    if not known:
        labels = ", ".join(one.variant.label for one in judged)
        raise CheckpointError(f"{name} has {labels}, none of which quire runs; look for another repository")
    least = min(known, key=lambda one: one.needed_bytes)
    raise CheckpointError(
        f"the memory is {memory_bytes / 1e9:,.1f} GB, the smallest of {name} ({least.label}) needs "
        f"{least.needed_bytes / 1e9:,.1f} GB; give more by --memory, or take a smaller model"
    )


# -- fetching ----------------------------------------------------------------------------------------------------------


def _check_space(folder: Path, variant: Variant) -> None:
    """Refuse before the disk is full, not after."""
    missing = 0
    for file in variant.files:
        blob = folder / _digest(file)
        part = blob.with_name(blob.name + INCOMPLETE)
        missing += 0 if blob.exists() else max(0, file.size_bytes - (part.stat().st_size if part.exists() else 0))
    if free_bytes(folder) < missing + SPARE_BYTES:
        raise CheckpointError(
            f"{missing / 1e9:,.2f} GB are to be fetched and {SPARE_BYTES / 1e9:.2f} GB to be spared, "
            f"{free_bytes(folder) / 1e9:,.2f} GB are free in {folder}; free some, or set HF_HOME to a larger disk"
        )


def _digest(file: HubFile) -> str:
    return file.sha256 or file.git_sha1 or ""


def _fetched(repository: Repository, file: HubFile, folder: Path, progress: Progress) -> Path:
    """The file's blob, whole and checked."""
    blob = folder / _digest(file)
    if blob.exists():
        return blob
    part = blob.with_name(blob.name + INCOMPLETE)
    with _ours_alone(part) as opened:
        if blob.exists():  # somebody else was quicker
            return blob
        sink = _Sink(opened, file, progress)
        with hub_errors(repository.name):
            try:
                _stream(repository, file, sink)
            except _TooMuchError as error:
                part.unlink()
                raise CheckpointError(
                    f"{file.name} must have {file.size_bytes:,} bytes and more of them came; try again, or another "
                    "mirror"
                ) from error
        opened.flush()
        os.fsync(opened.fileno())
        if sink.digest() != _digest(file):
            part.unlink()
            raise CheckpointError(
                f"{file.name} came with other bytes than the hub tells ({_digest(file)[:12]}... expected); what came "
                "was thrown away: try again, or another mirror"
            )
        part.replace(blob)
    return blob


def _stream(repository: Repository, file: HubFile, sink: "_Sink") -> None:
    """All of the file that is missing, over as many connections as it takes: an attempt that brought something is none
    of those that count. The library's own way keeps nothing of a chunk of ten megabytes that did not come whole."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    url = f"{HfApi().endpoint}/{repository.name}/resolve/{repository.commit}/{quote(file.name)}"
    num_failed = 0
    while sink.tell() < file.size_bytes:
        before = sink.tell()
        try:
            _stream_once(url, sink)
            why: Exception = OSError("the connection ended early")
        except (CheckpointError, _TooMuchError):
            raise
        except HfHubHTTPError as error:
            if error.response.status_code not in WORTH_WAITING:
                raise
            why = error
        except Exception as error:  # those of its HTTP client
            why = error
        num_failed = 0 if sink.tell() > before else num_failed + 1
        if num_failed > MAX_FAILED:
            raise why
        if sink.tell() < file.size_bytes:
            _pause(PAUSE_S * 2**num_failed)


def _stream_once(url: str, sink: "_Sink") -> None:
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import get_session, hf_raise_for_status

    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={sink.tell()}-"}
    with get_session().stream("GET", url, headers=headers, timeout=READ_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if response.status_code == 200 and sink.tell() > 0:  # it does not do ranges
            sink.begin_anew()
        for data in response.iter_bytes():
            sink.write(data)


@contextmanager
def _ours_alone(part: Path) -> Iterator[BufferedRandom]:
    """The incomplete file, which one process at a time goes on with."""
    import fcntl

    while True:
        with part.open("a+b") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if not _is_at(part, os.fstat(opened.fileno())):
                continue  # who had it before is done with it, or threw it away
            opened.seek(0, os.SEEK_END)
            yield opened
            return


def _is_at(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except FileNotFoundError:
        return False


class _TooMuchError(Exception):
    """More bytes came than the hub told."""


class _Sink:
    """A file that knows the digest of what is in it, and how much may be."""

    def __init__(self, file: BufferedRandom, expected: HubFile, progress: Progress) -> None:
        self._file, self._expected, self._progress = file, expected, progress
        if file.tell() > expected.size_bytes:
            file.truncate(0)
        self._begin()

    def _begin(self) -> None:
        """From what is there already."""
        if self._expected.sha256 is not None:
            self._state = hashlib.sha256()
        else:  # git's name of a file
            self._state = hashlib.sha1(f"blob {self._expected.size_bytes}\0".encode(), usedforsecurity=False)
        self._file.seek(0)
        while data := self._file.read(READ_BYTES):
            self._state.update(data)

    def digest(self) -> str:
        """Of all that was written."""
        return self._state.hexdigest()

    def tell(self) -> int:
        """Bytes that are there."""
        return self._file.tell()

    def write(self, data: bytes) -> None:
        """Add these."""
        if self.tell() + len(data) > self._expected.size_bytes:
            raise _TooMuchError
        self._state.update(data)
        self._file.write(data)
        self._progress(f"fetching {self._expected.name}", self.tell(), self._expected.size_bytes)

    def begin_anew(self) -> None:
        """Forget what is there."""
        self._file.truncate(0)
        self._begin()


def _link(blob: Path, pointer: Path) -> None:
    """As the hub's library does it: relative, so that the folder may move."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, pointer.parent)
    if pointer.is_symlink() and os.readlink(pointer) == target:
        return
    fresh = pointer.with_name(pointer.name + INCOMPLETE)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(pointer)


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
    return isinstance(weights, dict) and {"config.json", *weights.values()} <= names


def _place(snapshot: Path, variant: Variant) -> Path:
    return snapshot if variant.label == SAFETENSORS else snapshot / variant.first_name
