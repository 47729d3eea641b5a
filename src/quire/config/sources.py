"""From flags, environment and file to settings that are checked and know where they came from.

A flag beats the environment, the environment beats the file, the file beats the default. A name that is no setting is
an error in each of them: a mistyped limit that is silently not in force is worse than a server that does not start.
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
from quire.config.parked_models import ParkedModel, parked_models
from quire.config.scheduling import ServingSettings
from quire.config.server_settings import ServerSettings
from quire.config.table import BY_NAME, PREFIX, RENAMED, SETTINGS, Setting
from quire.errors import ConfigError

OTHER_VARIABLES = frozenset({"QUIRE_CACHE", "QUIRE_CONFIG", "QUIRE_FAULTS", "QUIRE_STRANGER_KEY", "QUIRE_TESTING"})
"""Ours, and no settings: where conversions go, which file is read, the key of a fleet's members that are not quire, and
what a worker breaks on purpose in tests."""
SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""What Kubernetes puts into every container beside a service that is called quire."""
SERVICE_ADDRESS = ("tcp://", "udp://", "sctp://")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting's value and who said so."""

    value: Value
    source: str
    """`flag --memory`, `environment QUIRE_MEMORY`, `file /path/quire.toml` or `default`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one process, checked together."""

    values: Mapping[str, Resolved]
    """By the names in the table, in its order."""
    model: ModelSettings
    serving: ServingSettings
    server: ServerSettings
    file: Path | None
    """The TOML file that was read."""
    parked: tuple[ParkedModel, ...] = ()
    """The models it tells of."""


@dataclass(frozen=True, slots=True)
class _Given:
    raw: object
    source: str


def load_settings(
    flags: Mapping[str, str | int | float | None],
    *,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
) -> Settings:
    """The settings in force: flags by name (None: not given), then QUIRE_ variables, then TOML, then defaults.

    `file` stands for a path given by flag; without it the file is looked for. Raises ConfigError, and nothing else.
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


def _of_flags(flags: Mapping[str, str | int | float | None]) -> dict[str, _Given]:
    _refuse_unknown(flags, BY_NAME, "the command line")
    return {name: _Given(raw, f"flag {BY_NAME[name].flag}") for name, raw in flags.items() if raw is not None}


def _of_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    ours = {name: raw for name, raw in environ.items() if name.startswith(PREFIX) and not _is_other(name, raw)}
    by_variable = {setting.variable: setting.name for setting in SETTINGS}
    _refuse_unknown(ours, by_variable, "the environment")
    return {by_variable[name]: _Given(raw, f"environment {name}") for name, raw in ours.items() if raw.strip()}


def _is_other(name: str, raw: str) -> bool:
    is_link = SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and raw.startswith(SERVICE_ADDRESS))
    return name in OTHER_VARIABLES or bool(is_link)


def _of_file(written: Mapping[str, object], path: Path | None) -> dict[str, _Given]:
    _refuse_unknown(written, BY_NAME, f"file {path}")
    return {name: _Given(raw, f"file {path}") for name, raw in written.items()}


def _resolved(setting: Setting, layers: Iterable[Mapping[str, _Given]]) -> Resolved:
    given = next((layer[setting.name] for layer in layers if setting.name in layer), None)
    if given is None:
        return Resolved(setting.default, "default")
    try:
        return Resolved(setting.kind.parse(given.raw), given.source)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{setting.name} must be {setting.kind.rule}; {_short(given.raw)} given by {given.source}; "
            f"write for example {setting.example}",
            (setting.name,),
        ) from error


def _checked(shape: type[Any], values: Mapping[str, Resolved]) -> Any:
    """The settings of one shape; a rule between several names where each of them came from."""
    ours = [setting for setting in SETTINGS if setting.group.feeds is shape]
    try:
        return shape(**{setting.field_name: values[setting.name].value for setting in ours})
    except ConfigError as error:
        named = tuple(setting.name for setting in ours if setting.field_name in error.settings)
        sources = ", ".join(f"{name} by {values[name].source}" for name in named)
        raise ConfigError(f"{error} (given: {sources})", named) from error


def _refuse_unknown(names: Iterable[str], known: Iterable[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{_short(name)} in {where} is no setting of quire; {_closest(name, list(known))}")


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
