"""Merges flags, environment variables and TOML file into checked settings, and records the source of each value.

A flag overrides a variable, a variable the file, the file the default. An unknown name in any of these sources is an
error, because a mistyped limit that is silently ignored is worse than a server that does not start.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.config.files import read_toml, settings_file
from quire.config.home import expand_home
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
    """The on-demand models in the TOML file."""


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
    path = settings_file(environ) if file is None else expand_home(file, "name the file by its full path").absolute()
    entries = {} if path is None else read_toml(path)
    tables = entries.pop("models", {})
    layers = (_flag_values(flags), _variable_values(environ), _file_values(entries, path))
    values = {setting.name: _resolve(setting, layers) for setting in SETTINGS}
    return Settings(
        values=MappingProxyType(values),
        model=_create(ModelSettings, values),
        serving=_create(ServingSettings, values),
        server=_create(ServerSettings, values),
        file=path,
        parked=parked_models(tables, f"file {path}"),
    )


def check_variable(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the variable of this setting is set to an invalid value."""
    setting = BY_NAME[name]
    if raw := environ.get(setting.variable, "").strip():
        _resolve(setting, ({name: _RawValue(raw, f"environment {setting.variable}")},))


def _flag_values(flags: Mapping[str, str | int | float | None]) -> dict[str, _RawValue]:
    _refuse_unknown(flags, BY_NAME, "the command line")
    return {name: _RawValue(raw, f"flag {BY_NAME[name].flag}") for name, raw in flags.items() if raw is not None}


def _variable_values(environ: Mapping[str, str]) -> dict[str, _RawValue]:
    variables = {name: raw for name, raw in environ.items() if name.startswith(PREFIX) and not _is_other(name, raw)}
    by_variable = {setting.variable: setting.name for setting in SETTINGS}
    _refuse_unknown(variables, by_variable, "the environment")
    return {by_variable[name]: _RawValue(raw, f"environment {name}") for name, raw in variables.items() if raw.strip()}


def _is_other(name: str, raw: str) -> bool:
    is_link = SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and raw.startswith(SERVICE_ADDRESS))
    return name in OTHER_VARIABLES or bool(is_link)


def _file_values(entries: Mapping[str, object], path: Path | None) -> dict[str, _RawValue]:
    _refuse_unknown(entries, BY_NAME, f"file {path}")
    return {name: _RawValue(raw, f"file {path}") for name, raw in entries.items()}


def _resolve(setting: Setting, layers: Iterable[Mapping[str, _RawValue]]) -> Resolved:
    value = next((layer[setting.name] for layer in layers if setting.name in layer), None)
    if value is None:
        return Resolved(setting.default, "default")
    try:
        return Resolved(setting.kind.parse(value.raw), value.source)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"expected {setting.name} to be {setting.kind.rule}, got {_short(value.raw)} from {value.source}; "
            f"for example: {setting.example}",
            (setting.name,),
        ) from error


def _create(settings_class: type[Any], values: Mapping[str, Resolved]) -> Any:
    """Create one settings dataclass. If a rule on several settings is broken, add their sources to the error."""
    fields = [setting for setting in SETTINGS if setting.group.settings_class is settings_class]
    try:
        return settings_class(**{setting.field_name: values[setting.name].value for setting in fields})
    except ConfigError as error:
        names = tuple(setting.name for setting in fields if setting.field_name in error.settings)
        sources = ", ".join(f"{name} from {values[name].source}" for name in names)
        raise ConfigError(f"{error} ({sources})", names, code=error.code) from error


def _refuse_unknown(names: Iterable[str], valid_names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in valid_names:
            message = f"unknown setting {_short(name)} in {where}; {_closest(name, list(valid_names))}"
            raise ConfigError(message, code="unknown_setting")


def _closest(name: str, valid_names: list[str]) -> str:
    import difflib  # noqa: PLC0415 - needed only for unknown names

    new_name = RENAMED.get(name.removeprefix(PREFIX).lower())
    if new_name is not None:
        return f"use {BY_NAME[new_name].variable if name.startswith(PREFIX) else new_name} instead"
    close = difflib.get_close_matches(name[:100], valid_names, n=1)
    return f"did you mean {close[0]}?" if close else f"the settings are {', '.join(valid_names)}"


def _short(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."
