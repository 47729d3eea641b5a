"""Where quire keeps what it made of models, and how something is put there whole or not at all."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.config.home import expanded
from quire.errors import CheckpointError

UNFINISHED = ".unfinished-"
FORGET_UNFINISHED_AFTER_S = 6 * 3600
SPARE_BYTES = 64 * 1024 * 1024


def cache_folder() -> Path:
    """$QUIRE_CACHE, else $XDG_CACHE_HOME/quire, else ~/.cache/quire. It may not exist yet."""
    if chosen := os.environ.get("QUIRE_CACHE"):
        return expanded(chosen, "QUIRE_CACHE to a full path")
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "quire"
    return expanded("~/.cache/quire", "QUIRE_CACHE")


def converted_directory(cache: Path, name: str, key: str) -> Path:
    """Where the conversion of the file of this name and key belongs."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "model"
    return cache / "converted" / f"{plain}-{key}"


def free_bytes(folder: Path) -> int:
    """What is free on the disk of this folder."""
    return shutil.disk_usage(folder).free


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuse before the disk is full, not after."""
    if free_bytes(folder) < needed_bytes + SPARE_BYTES:
        needed = f"need {needed_bytes / 1e9:,.2f} GB plus {SPARE_BYTES / 1e9:.2f} GB headroom in {folder.parent}"
        free = f"for the converted model, {free_bytes(folder) / 1e9:,.2f} GB free"
        raise CheckpointError(f"{needed} {free}; free some, or set QUIRE_CACHE to a larger disk", code="disk_full")


@contextmanager
def put_in_place(final: Path) -> Iterator[Path]:
    """A fresh folder to fill, which becomes `final` in one move when the block ends well, and vanishes otherwise.

    Two processes may fill theirs at once: the first to finish wins, and the second's equal copy is thrown away.
    """
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    _forget_unfinished(parent)
    fresh = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
    try:
        yield fresh
        fresh.chmod(0o755)  # mkdtemp makes it the owner's alone; a cache may be shared
        try:
            os.replace(fresh, final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _forget_unfinished(parent: Path) -> None:
    """Remove what killed processes left. By age, since a process id says nothing on a shared disk."""
    for left in parent.glob(f"{UNFINISHED}*"):
        try:
            if time.time() - left.stat().st_mtime > FORGET_UNFINISHED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # another process removed it first
