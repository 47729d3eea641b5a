"""`quire models load` and `quire models unload`: requests to a server of this machine, through its admin socket."""

from typing import Annotated
from urllib.parse import quote

import typer

from quire.errors import ConfigError

LOAD_S = 900.0
"""A large model may take minutes."""
Name = Annotated[str, typer.Argument(help="Model name for clients.", metavar="NAME")]


def request_load(name: Name) -> None:
    """Load a model on a server now, before the first request; returns when it is ready."""
    _move(name, "load", LOAD_S)


def request_unload(name: Name) -> None:
    """Unload a model from a server after its last response; the next request loads it again."""
    _move(name, "unload")


def _move(name: str, verb: str, timeout_s: float = 10.0) -> None:
    from quire.cli.shared.found_servers import admin_request, running_servers

    having = [one for one in running_servers() if one.named(name) is not None]
    if not having:
        raise ConfigError(f"no server of yours on this machine has a model {name!r}; start one with: quire serve")
    if len(having) > 1:
        urls = ", ".join(one.url for one in having)
        rule = f"expected one server with {name!r}, got {len(having)} ({urls}); stop the others"
        raise ConfigError(rule, code="several_servers")
    (server,) = having
    found = server.named(name)
    public = name if found is None else found.name
    try:
        response = admin_request(server.socket_path, "POST", f"/models/{quote(public)}/{verb}", timeout_s)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{public} at {server.url}: {error}") from error
    typer.echo(f"{public} at {server.url}: {response['state']}", err=True)
