"""Which TOML file is read, and what stands in it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.home import expanded
from quire.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place where settings may be written down."""

    path: Path
    why: str
    """What makes quire look there."""
    must_exist: bool = False


def candidates(environ: Mapping[str, str]) -> Iterator[Candidate]:
    """Where quire looks, in order; only the first that exists is read, and who has one needs no home."""
    if named := environ.get("QUIRE_CONFIG"):
        path = expanded(named, "QUIRE_CONFIG to a full path").absolute()
        yield Candidate(path, "$QUIRE_CONFIG", must_exist=True)
    yield Candidate(Path.cwd() / "quire.toml", "the current folder")
    why = "$XDG_CONFIG_HOME" if environ.get("XDG_CONFIG_HOME") else "the home folder"
    yield Candidate(_config_home(environ) / "quire" / "config.toml", why)


def _config_home(environ: Mapping[str, str]) -> Path:
    if base := environ.get("XDG_CONFIG_HOME"):
        return expanded(base, "XDG_CONFIG_HOME to a full path")
    home = environ.get("HOME")
    return Path(home) / ".config" if home else expanded("~/.config", "XDG_CONFIG_HOME")


def chosen_file(environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one $QUIRE_CONFIG names, there or not, else the first that exists."""
    return next((one.path for one in candidates(environ) if one.must_exist or one.path.is_file()), None)


def read_toml(path: Path) -> dict[str, Any]:
    """What the file says, or a ConfigError that says what is wrong with it."""
    import tomllib  # noqa: PLC0415 - only who has a file needs it

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"the settings file must be readable, {path} is not: {why}; check the path or leave it out"
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"a settings file may have {MAX_FILE_BYTES:,} bytes, {path} has more; is it the right file?")
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or nested without end
        raise ConfigError(
            f"the settings file must be TOML in UTF-8, {path} is not: {str(error)[:200]}; mend that line"
        ) from error
