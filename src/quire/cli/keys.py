"""`quire keys`: manage a server's API keys. A key is shown once, on creation; the keys file stores only its hash."""

import json
from pathlib import Path
from typing import Annotated

import typer

keys_app = typer.Typer(
    name="keys",
    help="Create, list, group and revoke API keys. A running server applies changes within a second.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="\b\nExamples:\n  quire keys add alice\n  quire keys add batch --max-class low --tokens-per-minute 50000"
    "\n  quire keys add me --admin\n  quire keys add team-a-ci --cache-group team-a",
)
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys-file", metavar="FILE", help="The keys file; default: the one in the settings."),
]


def _path(keys_file: Path | None) -> Path:
    from quire.config import load_settings

    return load_settings({"keys_file": None if keys_file is None else str(keys_file)}).server.keys_path()


@keys_app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the key: the tenant for quotas, fairness and isolation.")],
    max_class: Annotated[
        str, typer.Option(help="Most urgent class that its requests may have: high, normal or low.")
    ] = "normal",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Maximum responses per minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per minute, prompts and output together.")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Maximum concurrent requests.")] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Also allow monitoring of the whole server, all tenants: for the operator.")
    ] = False,
    cache_group: Annotated[
        str,
        typer.Option(
            metavar="GROUP",
            help="Share cached blocks with the keys of this group, which can then detect each other's prompts; "
            "default: no sharing.",
        ),
    ] = "",
    keys_file: KeysFile = None,
) -> None:
    """Create a key and print it. It is not shown again."""
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
    typer.echo(f"key {name} written to {path}; it is not shown again", err=True)
    typer.echo(secret)


@keys_app.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
    keys_file: KeysFile = None,
) -> None:
    """List the keys: names and limits, never the keys themselves."""
    from quire.api.access.keys import read_keys
    from quire.cli.shared.columns import columns

    keys = read_keys(_path(keys_file)) or ()
    limits = ("max_class", "requests_per_minute", "tokens_per_minute", "concurrent")
    fields = ("name", *limits, "cache_group", "created", "admin")
    if as_json:
        typer.echo(json.dumps([{field: getattr(key, field) for field in fields} for key in keys]))
        return
    if not keys:
        typer.echo("there are no keys; create one with: quire keys add NAME", err=True)
        return
    rows = [[_cell(getattr(key, field)) for field in fields] for key in keys]
    typer.echo(columns([field.replace("_", " ") for field in fields], rows))


def _cell(value: object) -> str:
    return "yes" if value is True else str(value or "-")


@keys_app.command()
def group(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    cache_group: Annotated[
        str, typer.Argument(metavar="[GROUP]", help="Group to share cached blocks with; omit it for no sharing.")
    ] = "",
    keys_file: KeysFile = None,
) -> None:
    """Add a key to a cache group, or remove it from one."""
    from quire.api.access.keys import group_key

    group_key(_path(keys_file), name, cache_group)
    typer.echo(f"cache group of key {name}: {cache_group or 'none'}", err=True)


@keys_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    keys_file: KeysFile = None,
) -> None:
    """Revoke a key: its requests are rejected from now on."""
    from quire.api.access.keys import revoke_key

    revoke_key(_path(keys_file), name)
    typer.echo(f"key {name} is revoked", err=True)
