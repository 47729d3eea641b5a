"""What llama.cpp's source holds that proofs compare with: its converter, and templates as models were published with.

A package on PyPI carries the source; it is downloaded once, and nothing of it is built.
"""

import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.checkpoints import cache_folder

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SOURCE = "vendor/llama.cpp"
PARTS = ("conversion", "gguf-py", "models/templates")


def llamacpp_source() -> Path:
    """The folder with these parts of it."""
    folder = cache_folder() / "llamacpp-source" / VERSION
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        words = ["download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest", scratch, f"{PACKAGE}=={VERSION}"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, stdout=sys.stderr)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            wanted = [one for one in packed.getmembers() if _is_wanted(one.name)]
            packed.extractall(scratch, members=wanted, filter="data")
        (unpacked,) = Path(scratch).glob(f"*/{SOURCE}")
        unpacked.rename(folder)
    return folder


def published_templates() -> Path:
    """The folder with chat templates."""
    return llamacpp_source() / "models" / "templates"


def _is_wanted(name: str) -> bool:
    inner = name.partition("/")[2]
    return any(inner.startswith(f"{SOURCE}/{part}/") for part in PARTS)
