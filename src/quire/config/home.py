"""Expands `~` in paths. Without a home directory, the error message names the setting to set instead."""

from pathlib import Path

from quire.errors import ConfigError


def expand_home(path: Path | str, hint: str) -> Path:
    """Return the path with a leading ~ replaced by the home directory. If that is unknown, raises ConfigError with the
    message "... set HOME to a folder, or <hint>"."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path} needs a home directory, and none is known: HOME is not set and the system's list of users has no "
            f"entry; set HOME to a folder, or {hint}"
        ) from error
