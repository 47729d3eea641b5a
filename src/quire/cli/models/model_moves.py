"""`quire models load` and `quire models unload`: tell a server of this machine, through its admin socket."""

from typing import Annotated
from urllib.parse import quote

import typer

from quire.errors import ConfigError

LOAD_S = 900.0
"""A large model may take minutes."""
Name = Annotated[str, typer.Argument(help="What clients call it.", metavar="NAME")]


def ask_to_load(name: Name) -> None:
    """Have a server load a model now, before anybody asks for it; returns when it is there."""
    _move(name, "load", LOAD_S)


def ask_to_unload(name: Name) -> None:
    """Have a server unload a model: it leaves with its last answer, and comes back when it is asked for."""
    _move(name, "unload")


def _move(name: str, verb: str, timeout_s: float = 10.0) -> None:
    from quire.cli.shared.found_servers import asked, running_servers

    having = [one for one in running_servers() if one.named(name) is not None]
    if not having:
        raise ConfigError(f"no server of yours on this machine has a model {name!r}; start one with: quire serve")
    if len(having) > 1:
        urls = ", ".join(one.url for one in having)
        raise ConfigError(f"one server must have {name!r}, {len(having)} do ({urls}); end the others")
    (server,) = having
    found = server.named(name)
    public = name if found is None else found.name
    try:
        told = asked(server.socket_path, "POST", f"/models/{quote(public)}/{verb}", timeout_s)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{public} at {server.url}: {error}") from error
    typer.echo(f"{public} at {server.url}: {told['state']}", err=True)
