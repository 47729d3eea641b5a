"""Downloads the parts of llama.cpp's source that proofs compare with: its converter and published chat templates.

A package on PyPI contains the source; it is downloaded once, and nothing is built.
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
    """Return the folder with `PARTS` of the source; download them first if needed."""
    folder = cache_folder() / "llamacpp-source" / VERSION
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        options = ["--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest", scratch, f"{PACKAGE}=={VERSION}"]
        subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True, stdout=sys.stderr)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as source_archive:
            members = [member for member in source_archive.getmembers() if _is_needed(member.name)]
            source_archive.extractall(scratch, members=members, filter="data")
        (unpacked,) = Path(scratch).glob(f"*/{SOURCE}")
        unpacked.rename(folder)
    return folder


def published_templates() -> Path:
    """Return the folder with chat templates."""
    return llamacpp_source() / "models" / "templates"


def _is_needed(name: str) -> bool:
    inner = name.partition("/")[2]
    return any(inner.startswith(f"{SOURCE}/{part}/") for part in PARTS)
