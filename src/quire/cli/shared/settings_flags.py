"""Adds a flag to a command for every setting of the table."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.shared.dataclass_flags import keyword, with_parameters
from quire.cli.shared.grouped_help import COMMON
from quire.config import RENAMED, SETTINGS, Group, Setting, Settings, load_settings

FILE_HELP = "Read settings from this TOML file and no other."


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all settings of a model as flags; its first parameter, a `Settings`, gets the settings in force.

    @with_settings
    def generate(settings: Settings, model: Annotated[str, typer.Argument()]) -> None: ...
    """
    return _with_flags(command, [setting for setting in SETTINGS if setting.group is not Group.SERVER])


def with_all_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The same with those of the server as well."""
    return _with_flags(command, SETTINGS)


def with_chosen_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same with these alone as flags; the others come from the environment and the file."""
    return lambda command: _with_flags(command, [setting for setting in SETTINGS if setting.name in names])


def _with_flags(command: Callable[..., None], shown: Sequence[Setting]) -> Callable[..., None]:
    names = {setting.name for setting in shown}
    renamed = [old for old, new in RENAMED.items() if new in names]
    parameters = [_file_parameter(), *map(_parameter, shown), *map(_renamed_parameter, renamed)]

    def with_flags(**arguments: Any) -> None:
        flags = {setting.name: _joined(arguments.pop(setting.name), setting.kind.between) for setting in shown}
        flags |= {old: raw for old in renamed if (raw := arguments.pop(old)) is not None}
        settings: Settings = load_settings(flags, file=arguments.pop("config_file"))
        command(settings, **arguments)

    return with_parameters(command, with_flags, parameters)


def _parameter(setting: Setting) -> inspect.Parameter:
    help_text = f"{setting.help} Default: {setting.default_text}."
    panel = COMMON if setting.is_common else setting.group.value
    option = typer.Option(setting.flag, metavar=setting.kind.metavar, help=help_text, rich_help_panel=panel)
    kind: Any = list[str] if setting.kind.is_list else bool if setting.kind.is_switch else str
    return keyword(setting.name, Annotated[kind | None, option])


def _renamed_parameter(old: str) -> inspect.Parameter:
    """A hidden flag, rejected with a hint to the new name."""
    return keyword(old, Annotated[str | None, typer.Option("--" + old.replace("_", "-"), hidden=True)])


def _joined(value: str | list[str] | None, between: str) -> str | None:
    """The values of a repeatable flag as one text."""
    return between.join(value) or None if isinstance(value, list) else value


def _file_parameter() -> inspect.Parameter:
    return keyword("config_file", Annotated[Path | None, typer.Option("--config", metavar="FILE", help=FILE_HELP)])
