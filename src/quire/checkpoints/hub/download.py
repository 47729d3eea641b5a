"""Downloads a file from the Hub. The file gets its final name only after its digest was verified.

blobs/DIGEST.quire.incomplete      a partial download, which any process can resume
blobs/DIGEST                       a complete file; DIGEST is the digest that the Hub lists
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

from quire.checkpoints.cache import check_free_space
from quire.checkpoints.hub.listing import TIMEOUT_S, Repository, hub_errors
from quire.checkpoints.hub.variants import HubFile, Variant
from quire.checkpoints.progress import Progress
from quire.errors import CheckpointError

INCOMPLETE = ".quire.incomplete"
READ_BYTES = 1 << 20
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
MAX_FAILED_ATTEMPTS = 5
PAUSE_S = 0.5
_pause = time.sleep


def check_space(folder: Path, variant: Variant) -> None:
    """Raise CheckpointError if the disk has no space for the missing files of a variant."""
    missing_bytes = 0
    for file in variant.files:
        blob = folder / _digest(file)
        part = blob.with_name(blob.name + INCOMPLETE)
        missing_bytes += 0 if blob.exists() else max(0, file.size_bytes - (part.stat().st_size if part.exists() else 0))
    check_free_space(folder, missing_bytes, "HF_HOME")


def _digest(file: HubFile) -> str:
    return file.sha256 or file.git_sha1 or ""


def fetch_file(repository: Repository, file: HubFile, folder: Path, progress: Progress) -> Path:
    """Download the file unless its blob exists; return the blob's path. Raises CheckpointError on a wrong digest."""
    blob = folder / _digest(file)
    if blob.exists():
        return blob
    partial = blob.with_name(blob.name + INCOMPLETE)
    with _ours_alone(partial) as partial_file:
        if blob.exists():  # another process has finished the download
            return blob
        sink = _Sink(partial_file, file, progress)
        with hub_errors(repository.name):
            _stream(repository, file, sink)
        partial_file.flush()
        os.fsync(partial_file.fileno())
        if sink.digest() != _digest(file):
            partial.unlink()
            message = f"expected {file.name} with digest {_digest(file)[:12]}..., got other content"
            hint = "the download was deleted: try again, or use another mirror"
            raise CheckpointError(f"{message}; {hint}", code="wrong_content")
        partial.replace(blob)
    return blob


def _stream(repository: Repository, file: HubFile, sink: "_Sink") -> None:
    """Download the missing bytes; reconnect until more than `MAX_FAILED_ATTEMPTS` in a row bring no data. Does not use
    huggingface_hub's download (2.4), which deletes the partial file when it fails or the process exits."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    url = f"{HfApi().endpoint}/{repository.name}/resolve/{repository.commit}/{quote(file.name)}"
    num_failed = 0
    while sink.size_bytes() < file.size_bytes:
        bytes_before = sink.size_bytes()
        try:
            _stream_once(url, sink)
            failure: Exception = OSError("the connection was lost")
        except CheckpointError:
            raise
        except HfHubHTTPError as error:
            if error.response.status_code not in RETRIED_STATUSES:
                raise
            failure = error
        except Exception as error:  # the errors of the library's HTTP client
            failure = error
        num_failed = 0 if sink.size_bytes() > bytes_before else num_failed + 1
        if num_failed > MAX_FAILED_ATTEMPTS:
            raise failure
        if sink.size_bytes() < file.size_bytes:
            _pause(PAUSE_S * 2**num_failed)


def _stream_once(url: str, sink: "_Sink") -> None:
    from huggingface_hub import utils

    library: Any = utils  # untyped, because its public functions are not exported explicitly

    headers = {**library.build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={sink.size_bytes()}-"}
    with library.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        library.hf_raise_for_status(response)
        if response.status_code == 200 and sink.size_bytes() > 0:  # the server ignores ranges
            sink.restart()
        for data in response.iter_bytes():
            sink.write(data)


@contextmanager
def _ours_alone(partial: Path) -> Iterator[BufferedRandom]:
    """Open the partial file, locked against other processes that download it."""
    import fcntl

    while True:
        with partial.open("a+b") as partial_file:
            fcntl.flock(partial_file, fcntl.LOCK_EX)
            if not _is_same_file(partial, os.fstat(partial_file.fileno())):
                continue  # the previous lock holder has renamed or deleted the file
            partial_file.seek(0, os.SEEK_END)
            yield partial_file
            return


def _is_same_file(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except FileNotFoundError:
        return False


class _Sink:
    """Writes downloaded bytes to a partial file, hashes them, and rejects more bytes than the Hub lists."""

    def __init__(self, file: BufferedRandom, expected: HubFile, progress: Progress) -> None:
        self._file, self._expected, self._progress = file, expected, progress
        if file.tell() > expected.size_bytes:
            file.truncate(0)
        self._hash_content()

    def _hash_content(self) -> None:
        """Start a new hash, and hash the content that the file already has."""
        if self._expected.sha256 is not None:
            self._hash = hashlib.sha256()
        else:  # git's blob id
            self._hash = hashlib.sha1(f"blob {self._expected.size_bytes}\0".encode(), usedforsecurity=False)
        self._file.seek(0)
        while data := self._file.read(READ_BYTES):
            self._hash.update(data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def size_bytes(self) -> int:
        return self._file.tell()

    def write(self, data: bytes) -> None:
        if self.size_bytes() + len(data) > self._expected.size_bytes:
            Path(self._file.name).unlink()
            message = f"expected {self._expected.size_bytes:,} bytes for {self._expected.name}, got more"
            raise CheckpointError(f"{message}; try again, or use another mirror", code="wrong_content")
        self._hash.update(data)
        try:
            self._file.write(data)
        except OSError as error:  # a retry would not help
            message = f"{self._expected.name} cannot be written: {error.strerror}; check the disk"
            raise CheckpointError(message, code="disk_not_writable") from error
        self._progress(f"downloading {self._expected.name}", self.size_bytes(), self._expected.size_bytes)

    def restart(self) -> None:
        """Discard the content, to download the file from its first byte."""
        self._file.truncate(0)
        self._hash_content()
