"""Finds and reads the TOML settings file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.home import expand_home
from quire.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible path of the settings file."""

    path: Path
    why: str
    """Why this path is tried."""
    must_exist: bool = False


def candidates(environ: Mapping[str, str]) -> Iterator[Candidate]:
    """Yield possible paths, the preferred path first; only the first existing file is read. Lazy, because the last path
    needs a home directory."""
    if name := environ.get("QUIRE_CONFIG"):
        path = expand_home(name, "QUIRE_CONFIG to a full path").absolute()
        yield Candidate(path, "$QUIRE_CONFIG", must_exist=True)
    yield Candidate(Path.cwd() / "quire.toml", "the current folder")
    why = "$XDG_CONFIG_HOME" if environ.get("XDG_CONFIG_HOME") else "the home folder"
    yield Candidate(_config_home(environ) / "quire" / "config.toml", why)


def _config_home(environ: Mapping[str, str]) -> Path:
    if base := environ.get("XDG_CONFIG_HOME"):
        return expand_home(base, "XDG_CONFIG_HOME to a full path")
    home = environ.get("HOME")
    return Path(home) / ".config" if home else expand_home("~/.config", "XDG_CONFIG_HOME")


def settings_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: $QUIRE_CONFIG even if that file is missing, else the first candidate that exists."""
    return next((file.path for file in candidates(environ) if file.must_exist or file.path.is_file()), None)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in the file. Raises ConfigError if the file is unreadable or invalid."""
    import tomllib  # noqa: PLC0415 - needed only if there is a file

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot read the settings file {path}: {why}; check the path or omit it") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"expected at most {MAX_FILE_BYTES:,} bytes in {path}, got more; is this the settings file?")
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested too deeply
        raise ConfigError(
            f"expected TOML in UTF-8 in the settings file {path}: {str(error)[:200]}; correct that line"
        ) from error
