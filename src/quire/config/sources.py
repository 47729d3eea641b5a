"""Merges flags, environment and file into checked settings, and records the source of each value.

A flag overrides the environment, the environment the file, the file the default. An unknown name in any of them is an
error, because a mistyped limit that is silently ignored is worse than a server that does not start.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.config.files import chosen_file, read_toml
from quire.config.home import expanded
from quire.config.kinds import Value
from quire.config.model_settings import ModelSettings
from quire.config.parked_models import OnDemandModel, parked_models
from quire.config.scheduling import ServingSettings
from quire.config.server_settings import ServerSettings
from quire.config.table import BY_NAME, PREFIX, RENAMED, SETTINGS, Setting
from quire.errors import ConfigError

OTHER_VARIABLES = frozenset({"QUIRE_CACHE", "QUIRE_CONFIG", "QUIRE_FAULTS", "QUIRE_STRANGER_KEY", "QUIRE_TESTING"})
"""quire's variables that are not settings: the cache folder, the settings file, fault injection, the API key for OpenAI
members of a fleet (servers of other projects), and the switch for tests."""
SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Variables that Kubernetes sets for a service called quire."""
SERVICE_ADDRESS = ("tcp://", "udp://", "sctp://")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting's value and its source."""

    value: Value
    source: str
    """`flag --memory`, `environment QUIRE_MEMORY`, `file /path/quire.toml` or `default`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one process, checked together."""

    values: Mapping[str, Resolved]
    """Values by setting name, in the order of the table."""
    model: ModelSettings
    serving: ServingSettings
    server: ServerSettings
    file: Path | None
    """The TOML file that was read, if any."""
    parked: tuple[OnDemandModel, ...] = ()
    """The on-demand models of that file."""


@dataclass(frozen=True, slots=True)
class _RawValue:
    raw: object
    source: str


def load_settings(
    flags: Mapping[str, str | int | float | None],
    *,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
) -> Settings:
    """Return the effective settings: flags by name (None: not set), then QUIRE_ variables, then TOML, then defaults.

    `file` is the path from the flag; if None, the default paths are tried. Raises only ConfigError.
    """
    path = chosen_file(environ) if file is None else expanded(file, "name the file by its full path").absolute()
    written = {} if path is None else read_toml(path)
    tables = written.pop("models", {})
    layers = (_of_flags(flags), _of_environment(environ), _of_file(written, path))
    values = {setting.name: _resolved(setting, layers) for setting in SETTINGS}
    return Settings(
        values=MappingProxyType(values),
        model=_checked(ModelSettings, values),
        serving=_checked(ServingSettings, values),
        server=_checked(ServerSettings, values),
        file=path,
        parked=parked_models(tables, f"file {path}"),
    )


def check_variable(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the variable of this setting is set to an invalid value."""
    setting = BY_NAME[name]
    if raw := environ.get(setting.variable, "").strip():
        _resolved(setting, ({name: _RawValue(raw, f"environment {setting.variable}")},))


def _of_flags(flags: Mapping[str, str | int | float | None]) -> dict[str, _RawValue]:
    _refuse_unknown(flags, BY_NAME, "the command line")
    return {name: _RawValue(raw, f"flag {BY_NAME[name].flag}") for name, raw in flags.items() if raw is not None}


def _of_environment(environ: Mapping[str, str]) -> dict[str, _RawValue]:
    ours = {name: raw for name, raw in environ.items() if name.startswith(PREFIX) and not _is_other(name, raw)}
    by_variable = {setting.variable: setting.name for setting in SETTINGS}
    _refuse_unknown(ours, by_variable, "the environment")
    return {by_variable[name]: _RawValue(raw, f"environment {name}") for name, raw in ours.items() if raw.strip()}


def _is_other(name: str, raw: str) -> bool:
    is_link = SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and raw.startswith(SERVICE_ADDRESS))
    return name in OTHER_VARIABLES or bool(is_link)


def _of_file(written: Mapping[str, object], path: Path | None) -> dict[str, _RawValue]:
    _refuse_unknown(written, BY_NAME, f"file {path}")
    return {name: _RawValue(raw, f"file {path}") for name, raw in written.items()}


def _resolved(setting: Setting, layers: Iterable[Mapping[str, _RawValue]]) -> Resolved:
    found = next((layer[setting.name] for layer in layers if setting.name in layer), None)
    if found is None:
        return Resolved(setting.default, "default")
    try:
        return Resolved(setting.kind.parse(found.raw), found.source)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"expected {setting.name} to be {setting.kind.rule}, got {_short(found.raw)} from {found.source}; "
            f"for example: {setting.example}",
            (setting.name,),
        ) from error


def _checked(shape: type[Any], values: Mapping[str, Resolved]) -> Any:
    """Create one settings dataclass. An error of a rule between several settings is extended by their sources."""
    ours = [setting for setting in SETTINGS if setting.group.feeds is shape]
    try:
        return shape(**{setting.field_name: values[setting.name].value for setting in ours})
    except ConfigError as error:
        named = tuple(setting.name for setting in ours if setting.field_name in error.settings)
        sources = ", ".join(f"{name} from {values[name].source}" for name in named)
        raise ConfigError(f"{error} ({sources})", named, code=error.code) from error


def _refuse_unknown(names: Iterable[str], known: Iterable[str], where: str) -> None:
    for name in names:
        if name not in known:
            sentence = f"unknown setting {_short(name)} in {where}; {_closest(name, list(known))}"
            raise ConfigError(sentence, code="unknown_setting")


def _closest(name: str, known: list[str]) -> str:
    import difflib  # noqa: PLC0415 - only mistakes need it

    renamed = RENAMED.get(name.removeprefix(PREFIX).lower())
    if renamed is not None:
        return f"use {BY_NAME[renamed].variable if name.startswith(PREFIX) else renamed} instead"
    close = difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean {close[0]}?" if close else f"the settings are {', '.join(known)}"


def _short(raw: object) -> str:
    shown = repr(raw)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
