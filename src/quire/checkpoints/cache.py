"""The cache folder for converted models, and atomic writes to it."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.config.home import expand_home
from quire.errors import CheckpointError

UNFINISHED = ".unfinished-"
MAX_UNFINISHED_AGE_S = 6 * 3600
SPARE_BYTES = 64 * 1024 * 1024


def cache_folder() -> Path:
    """Return $QUIRE_CACHE, else $XDG_CACHE_HOME/quire, else ~/.cache/quire. The folder may not exist yet."""
    if folder := os.environ.get("QUIRE_CACHE"):
        return expand_home(folder, "QUIRE_CACHE to a full path")
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "quire"
    return expand_home("~/.cache/quire", "QUIRE_CACHE")


def converted_directory(cache: Path, name: str, key: str) -> Path:
    """Return the cache directory for the converted model with this name and content key."""
    file_name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "model"
    return cache / "converted" / f"{file_name}-{key}"


def check_free_space(folder: Path, needed_bytes: int, setting: str) -> None:
    """Raise CheckpointError if the disk lacks space; its hint is to change the environment variable `setting`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        demand = f"need {needed_bytes / 1e9:,.2f} GB plus {SPARE_BYTES / 1e9:.2f} GB headroom in {folder}"
        supply = f"{free_bytes / 1e9:,.2f} GB free"
        raise CheckpointError(f"{demand}, {supply}; free space, or set {setting} to a larger disk", code="disk_full")


@contextmanager
def put_in_place(final: Path) -> Iterator[Path]:
    """Yield a new folder. When the block succeeds, the folder is renamed to `final`; otherwise it is removed.

    If two processes write `final` at the same time, the first rename wins, and the second folder is removed.
    """
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    _remove_old_unfinished(parent)
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp sets 0o700; a cache may be shared
        try:
            os.replace(unfinished, final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_old_unfinished(parent: Path) -> None:
    """Remove old folders that killed processes left. Age decides: process ids are meaningless on a shared disk."""
    for unfinished in parent.glob(f"{UNFINISHED}*"):
        try:
            if time.time() - unfinished.stat().st_mtime > MAX_UNFINISHED_AGE_S:
                shutil.rmtree(unfinished, ignore_errors=True)
        except OSError:
            continue  # another process removed it first
