"""A file of the hub, fetched whole and checked: it gets its name when its digest is right.

blobs/DIGEST.quire.incomplete      being fetched: goes on where it broke off, in any process
blobs/DIGEST                       whole, and its digest is the one the hub lists
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quire.checkpoints.cache import SPARE_BYTES, free_bytes
from quire.checkpoints.hub.listing import TIMEOUT_S, Repository, hub_errors
from quire.checkpoints.hub.variants import HubFile, Variant
from quire.checkpoints.progress import Progress
from quire.errors import CheckpointError

INCOMPLETE = ".quire.incomplete"
READ_BYTES = 1 << 20
WORTH_WAITING = frozenset({408, 429, 500, 502, 503, 504})
MAX_FAILED = 5
PAUSE_S = 0.5
_pause = time.sleep


def check_space(folder: Path, variant: Variant) -> None:
    """Refuse before the disk is full, not after."""
    missing = 0
    for file in variant.files:
        blob = folder / _digest(file)
        part = blob.with_name(blob.name + INCOMPLETE)
        missing += 0 if blob.exists() else max(0, file.size_bytes - (part.stat().st_size if part.exists() else 0))
    if free_bytes(folder) < missing + SPARE_BYTES:
        needed = f"need {missing / 1e9:,.2f} GB plus {SPARE_BYTES / 1e9:.2f} GB headroom"
        free = f"{free_bytes(folder) / 1e9:,.2f} GB free in {folder}"
        raise CheckpointError(f"{needed}, {free}; free some, or set HF_HOME to a larger disk", code="disk_full")


def _digest(file: HubFile) -> str:
    return file.sha256 or file.git_sha1 or ""


def fetched(repository: Repository, file: HubFile, folder: Path, progress: Progress) -> Path:
    """The file's blob, whole and checked."""
    blob = folder / _digest(file)
    if blob.exists():
        return blob
    part = blob.with_name(blob.name + INCOMPLETE)
    with _ours_alone(part) as opened:
        if blob.exists():  # another process was quicker
            return blob
        sink = _Sink(opened, file, progress)
        with hub_errors(repository.name):
            try:
                _stream(repository, file, sink)
            except _TooMuchError as error:
                part.unlink()
                rule = f"expected {file.size_bytes:,} bytes for {file.name}, got more"
                why = f"{rule}; try again, or use another mirror"
                raise CheckpointError(why, code="wrong_content") from error
        opened.flush()
        os.fsync(opened.fileno())
        if sink.digest() != _digest(file):
            part.unlink()
            rule = f"expected {file.name} with digest {_digest(file)[:12]}..., got other content"
            way_out = "the download was deleted: try again, or use another mirror"
            raise CheckpointError(f"{rule}; {way_out}", code="wrong_content")
        part.replace(blob)
    return blob


def _stream(repository: Repository, file: HubFile, sink: "_Sink") -> None:
    """All of the file that is missing, over as many connections as it takes: an attempt that brought something is none
    of those that count. The library's own way (2.4) deletes an incomplete file when it fails or the process ends."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    url = f"{HfApi().endpoint}/{repository.name}/resolve/{repository.commit}/{quote(file.name)}"
    num_failed = 0
    while sink.size_bytes() < file.size_bytes:
        before = sink.size_bytes()
        try:
            _stream_once(url, sink)
            why: Exception = OSError("the connection was lost")
        except (CheckpointError, _TooMuchError):
            raise
        except HfHubHTTPError as error:
            if error.response.status_code not in WORTH_WAITING:
                raise
            why = error
        except Exception as error:  # those of its HTTP client
            why = error
        num_failed = 0 if sink.size_bytes() > before else num_failed + 1
        if num_failed > MAX_FAILED:
            raise why
        if sink.size_bytes() < file.size_bytes:
            _pause(PAUSE_S * 2**num_failed)


def _stream_once(url: str, sink: "_Sink") -> None:
    from huggingface_hub import utils

    library: Any = utils  # its functions are public, and not marked so

    headers = {**library.build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={sink.size_bytes()}-"}
    with library.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        library.hf_raise_for_status(response)
        if response.status_code == 200 and sink.size_bytes() > 0:  # it does not do ranges
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
        return self._state.hexdigest()

    def size_bytes(self) -> int:
        return self._file.tell()

    def write(self, data: bytes) -> None:
        if self.size_bytes() + len(data) > self._expected.size_bytes:
            raise _TooMuchError
        self._state.update(data)
        try:
            self._file.write(data)
        except OSError as error:  # not the connection's: to try again would not help
            why = f"{self._expected.name} cannot be written: {error.strerror}; check the disk"
            raise CheckpointError(why, code="disk_not_writable") from error
        self._progress(f"downloading {self._expected.name}", self.size_bytes(), self._expected.size_bytes)

    def begin_anew(self) -> None:
        """Forget what is there."""
        self._file.truncate(0)
        self._begin()
