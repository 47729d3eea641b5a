"""Commands with flags beside their own parameters; each may be a field of a dataclass."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from typing import Annotated, Any, get_type_hints

import typer

RunCommand = Callable[..., None]


def flag(default: Any, help_text: str, *names: str, **options: Any) -> Any:
    """A field from which a flag is made; its name is the field's unless others are given."""
    return field(default=default, metadata={"help": help_text, "names": names, "options": options})


def with_fields(kind: type[Any], lead: str = "") -> Callable[[RunCommand], RunCommand]:
    """The command with a flag for each field after its own; its first parameter gets them. `lead` begins their help."""

    def decorated(command: RunCommand) -> RunCommand:
        hints = get_type_hints(kind)
        flags = [_parameter(one, hints[one.name], lead) for one in fields(kind)]

        def with_flags(*first: Any, **arguments: Any) -> None:
            command(kind(**{one.name: arguments.pop(one.name) for one in flags}), *first, **arguments)

        return with_parameters(command, with_flags, flags)

    return decorated


def with_parameters(command: RunCommand, with_flags: RunCommand, flags: Sequence[inspect.Parameter]) -> RunCommand:
    """`with_flags`, which typer sees as the command without its first parameter and with these."""
    parameters = [*list(inspect.signature(command, eval_str=True).parameters.values())[1:], *flags]
    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A parameter from which typer makes a flag."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(one: "Field[Any]", kind: Any, lead: str) -> inspect.Parameter:
    help_text, names = one.metadata["help"], one.metadata["names"] or (f"--{one.name.replace('_', '-')}",)
    text = f"{lead}{help_text}" if lead else help_text[0].upper() + help_text[1:]
    is_shown = one.default not in (None, "")
    option = typer.Option(*names, help=text, show_default=is_shown, **one.metadata.get("options", {}))
    return keyword(one.name, Annotated[kind, option], one.default)
