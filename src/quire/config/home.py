"""Paths that begin in a home directory. The one place that looks for it: a user without one is told what to set."""

from pathlib import Path

from quire.errors import ConfigError


def expanded(path: Path | str, instead: str) -> Path:
    """The path with a leading ~ replaced by the home directory; `instead` says what else could be set."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path} needs a home directory, and none is known: HOME is not set and the system's list of users has no "
            f"entry; set HOME to a folder of yours, or {instead}"
        ) from error
