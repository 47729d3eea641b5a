"""The cache folder for converted models, and atomic writes to it."""

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
    """Return $QUIRE_CACHE, else $XDG_CACHE_HOME/quire, else ~/.cache/quire. The folder may not exist yet."""
    if chosen := os.environ.get("QUIRE_CACHE"):
        return expanded(chosen, "QUIRE_CACHE to a full path")
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "quire"
    return expanded("~/.cache/quire", "QUIRE_CACHE")


def converted_directory(cache: Path, name: str, key: str) -> Path:
    """Return the cache directory for the converted model with this name and content key."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "model"
    return cache / "converted" / f"{plain}-{key}"


def check_free_space(folder: Path, needed_bytes: int, setting: str) -> None:
    """Raise CheckpointError if `needed_bytes` do not fit on the disk; the error names the variable `setting`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        needed = f"need {needed_bytes / 1e9:,.2f} GB plus {SPARE_BYTES / 1e9:.2f} GB headroom in {folder}"
        free = f"{free_bytes / 1e9:,.2f} GB free"
        raise CheckpointError(f"{needed}, {free}; free some, or set {setting} to a larger disk", code="disk_full")


@contextmanager
def put_in_place(final: Path) -> Iterator[Path]:
    """Yield a new folder, which is renamed to `final` when the block succeeds, and removed otherwise.

    If two processes do this at the same time, the first to finish wins, and the other's equal copy is removed.
    """
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    _forget_unfinished(parent)
    fresh = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
    try:
        yield fresh
        fresh.chmod(0o755)  # mkdtemp sets 0o700; a cache may be shared
        try:
            os.replace(fresh, final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _forget_unfinished(parent: Path) -> None:
    """Remove folders that killed processes left, by age: process ids are meaningless on a shared disk."""
    for left in parent.glob(f"{UNFINISHED}*"):
        try:
            if time.time() - left.stat().st_mtime > FORGET_UNFINISHED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # another process removed it first
