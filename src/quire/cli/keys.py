"""`quire keys`: who may use a server. A key is shown once, when it is made; the file keeps its hash."""

from pathlib import Path
from typing import Annotated

import typer

keys_app = typer.Typer(
    name="keys",
    help="Make, list, group and revoke API keys. A running server takes notice within a second.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="\b\nExamples:\n  quire keys add alice\n  quire keys add batch --max-class low --tokens-per-minute 50000"
    "\n  quire keys add me --admin\n  quire keys add team-a-ci --cache-group team-a",
)
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys-file", metavar="FILE", help="The keys file; default: that of the settings."),
]


def _path(given: Path | None) -> Path:
    from quire.config import load_settings

    return load_settings({"keys_file": None if given is None else str(given)}).server.keys_path()


@keys_app.command()
def add(
    name: Annotated[str, typer.Argument(help="Who uses it; the tenant that is charged and isolated.")],
    max_class: Annotated[
        str, typer.Option(help="The most urgent class it may ask for: high, normal or low.")
    ] = "normal",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Answers it may ask for in a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens it may use in a minute, prompts and answers together.")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Requests it may have at once.")] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may also watch the whole server, every tenant: the operator's own key.")
    ] = False,
    cache_group: Annotated[
        str,
        typer.Option(
            metavar="GROUP",
            help="Share cached blocks with the keys of this group, which can then notice each other's prompts; "
            "without it with none.",
        ),
    ] = "",
    keys_file: KeysFile = None,
) -> None:
    """Make a key and print it. It is not shown again."""
    from quire.api.access.keys import add_key

    path = _path(keys_file)
    secret = add_key(
        path,
        name,
        max_class=max_class,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent=concurrent,
        admin=admin,
        cache_group=cache_group,
    )
    typer.echo(f"key {name} written to {path}; this is the only time it is shown", err=True)
    typer.echo(secret)


@keys_app.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
    keys_file: KeysFile = None,
) -> None:
    """List the keys: names and limits, never the keys themselves."""
    import json

    from quire.api.access.keys import read_keys
    from quire.cli.shared.columns import columns

    keys = read_keys(_path(keys_file)) or ()
    limits = ("max_class", "requests_per_minute", "tokens_per_minute", "concurrent")
    fields = ("name", *limits, "cache_group", "created", "admin")
    if as_json:
        typer.echo(json.dumps([{field: getattr(key, field) for field in fields} for key in keys]))
        return
    if not keys:
        typer.echo("there are no keys; make one with: quire keys add NAME", err=True)
        return
    rows = [[_shown(getattr(key, field)) for field in fields] for key in keys]
    typer.echo(columns([field.replace("_", " ") for field in fields], rows))


def _shown(value: object) -> str:
    """What stands in the table."""
    return "yes" if value is True else str(value or "-")


@keys_app.command()
def group(
    name: Annotated[str, typer.Argument(help="Which key.")],
    cache_group: Annotated[
        str, typer.Argument(metavar="[GROUP]", help="Whom it shares cached blocks with; left out: with none.")
    ] = "",
    keys_file: KeysFile = None,
) -> None:
    """Put a key into a cache group, or take it out of one."""
    from quire.api.access.keys import group_key

    group_key(_path(keys_file), name, cache_group)
    typer.echo(f"key {name} shares cached blocks with {cache_group or 'none'}", err=True)


@keys_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Which key.")],
    keys_file: KeysFile = None,
) -> None:
    """Refuse a key from now on."""
    from quire.api.access.keys import revoke_key

    revoke_key(_path(keys_file), name)
    typer.echo(f"key {name} is revoked", err=True)
