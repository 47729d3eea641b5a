"""Command-line flags, made from the table of settings or from the fields of a dataclass. Help lists flags in groups,
the common ones first, as plain text for pipes and pagers.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from quire.config import RENAMED, SETTINGS, Group, Setting, Settings, load_settings

FILE_HELP = "Read settings from this TOML file and no other."
COMMON = "Options"
"""The heading of common options and of options without a group."""
RunCommand = Callable[..., None]


class GroupedCommand(TyperCommand):
    """A command whose help groups options under headings; an option's `rich_help_panel` is its heading."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options under its heading, in order of first appearance."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], COMMON: []}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or COMMON
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def with_settings(command: RunCommand) -> RunCommand:
    """Decorate a command: add all settings of a model as flags and pass the settings in force as its first argument.

    @with_settings
    def generate(settings: Settings, model: Annotated[str, typer.Argument()]) -> None: ...
    """
    return _with_flags(command, [setting for setting in SETTINGS if setting.group is not Group.SERVER])


def with_all_settings(command: RunCommand) -> RunCommand:
    """Like `with_settings`, but with the server's settings as well."""
    return _with_flags(command, SETTINGS)


def with_chosen_settings(*names: str) -> Callable[[RunCommand], RunCommand]:
    """Like `with_settings`, but only the named settings become flags; the environment and the file set all others."""
    return lambda command: _with_flags(command, [setting for setting in SETTINGS if setting.name in names])


def _with_flags(command: RunCommand, declared: Sequence[Setting]) -> RunCommand:
    names = {setting.name for setting in declared}
    old_names = [old for old, new in RENAMED.items() if new in names]
    parameters = [_file_flag(), *map(_setting_flag, declared), *map(_renamed_flag, old_names)]

    def with_flags(**arguments: Any) -> None:
        flags = {setting.name: _join(arguments.pop(setting.name), setting.kind.separator) for setting in declared}
        flags |= {old: raw for old in old_names if (raw := arguments.pop(old)) is not None}
        settings: Settings = load_settings(flags, file=arguments.pop("config_file"))
        command(settings, **arguments)

    return _with_parameters(command, with_flags, parameters)


def _setting_flag(setting: Setting) -> inspect.Parameter:
    help_text = f"{setting.help} Default: {setting.default_text}."
    panel = COMMON if setting.is_common else setting.group.value
    option = typer.Option(setting.flag, metavar=setting.kind.metavar, help=help_text, rich_help_panel=panel)
    kind: Any = list[str] if setting.kind.is_list else bool if setting.kind.is_switch else str
    return _keyword(setting.name, Annotated[kind | None, option])


def _renamed_flag(old: str) -> inspect.Parameter:
    """Return a hidden flag for the old name of a setting; `load_settings` rejects it and reports the new name."""
    return _keyword(old, Annotated[str | None, typer.Option("--" + old.replace("_", "-"), hidden=True)])


def _file_flag() -> inspect.Parameter:
    return _keyword("config_file", Annotated[Path | None, typer.Option("--config", metavar="FILE", help=FILE_HELP)])


def _join(value: str | list[str] | None, separator: str) -> str | None:
    """Join the values of a repeatable flag into one string; None if the flag was not passed."""
    return separator.join(value) or None if isinstance(value, list) else value


def flag(default: Any, help_text: str, *names: str, **options: Any) -> Any:
    """Declare a dataclass field that becomes a flag. `names` are the flag's names; default: --field-name."""
    return field(default=default, metadata={"help": help_text, "names": names, "options": options})


def with_fields(kind: type[Any], help_prefix: str = "") -> Callable[[RunCommand], RunCommand]:
    """Decorate a command: after its own flags, add one per field of the dataclass `kind`, and pass the instance as its
    first argument. `help_prefix` precedes the help text of each of these flags."""

    def decorate(command: RunCommand) -> RunCommand:
        hints = get_type_hints(kind)
        flags = [_field_flag(declared, hints[declared.name], help_prefix) for declared in fields(kind)]

        def with_flags(*instances: Any, **arguments: Any) -> None:  # instances of other decorators' dataclasses
            command(kind(**{flag.name: arguments.pop(flag.name) for flag in flags}), *instances, **arguments)

        return _with_parameters(command, with_flags, flags)

    return decorate


def _with_parameters(command: RunCommand, with_flags: RunCommand, flags: Sequence[inspect.Parameter]) -> RunCommand:
    """Make typer see `with_flags` as the command, without its first parameter and with `flags` added."""
    parameters = [*list(inspect.signature(command, eval_str=True).parameters.values())[1:], *flags]
    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """Return a keyword-only parameter, which typer turns into a flag."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _field_flag(entry: "Field[Any]", kind: Any, help_prefix: str) -> inspect.Parameter:
    help_text = entry.metadata["help"]
    names = entry.metadata["names"] or (f"--{entry.name.replace('_', '-')}",)
    text = f"{help_prefix}{help_text}" if help_prefix else help_text[0].upper() + help_text[1:]
    options: dict[str, Any] = {"show_default": entry.default not in (None, ""), **entry.metadata.get("options", {})}
    return _keyword(entry.name, Annotated[kind, typer.Option(*names, help=text, **options)], entry.default)
