"""Paths with `~`. If there is no home directory, the error message says what to set."""

from pathlib import Path

from quire.errors import ConfigError


def expanded(path: Path | str, instead: str) -> Path:
    """Return the path with a leading ~ replaced by the home directory. Raises ConfigError if there is none; `instead`
    completes its message, "or ..."."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path} needs a home directory, and none is known: HOME is not set and the system's list of users has no "
            f"entry; set HOME to a folder, or {instead}"
        ) from error
