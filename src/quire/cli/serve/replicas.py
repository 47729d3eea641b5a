"""`quire serve MODEL --replicas N`: a gateway in this process, and members in processes of their own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import typer

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import OnDemandModel, Settings
    from quire.fleet.gateway.client import FleetModel


def serve_replicas(
    models: "Sequence[OnDemandModel]", settings: "Settings", num_replicas: int, *, allow_no_keys: bool
) -> None:
    """Serve until the shutdown."""
    import uvloop

    from quire.api.http.descriptors import allow_many_connections
    from quire.api.serving import Plan, run
    from quire.observe.access_log import set_up

    if len(models) != 1:
        raise ConfigError(
            f"expected one model with --replicas, got {len(models)}; name only one MODEL, or omit --replicas"
        )
    if settings.server.trace is not None:
        raise ConfigError(f"expected one worker with --trace, got {num_replicas} replicas; omit --trace or --replicas")
    set_up("json" if settings.server.log_format == "json" else "plain")
    if (warning := allow_many_connections()) is not None:
        _print_line(warning)

    @asynccontextmanager
    async def opened(model: "OnDemandModel", _progress: object) -> "AsyncIterator[FleetModel]":
        from quire.fleet.member.replicas import order_replicas, replicated_model

        order = await asyncio.to_thread(
            order_replicas, model.model, num_replicas, settings.model, settings.serving, settings.server.drain_s
        )
        async with replicated_model(model.name, order, num_replicas, settings.serving.queue) as client:
            yield client

    plan = Plan(models, settings, allow_no_keys)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        num_ended = runner.run(run(plan, _print_line, opened))
    if num_ended:
        _print_line(f"{num_ended} requests did not finish in time and were cancelled")


def _print_line(line: str) -> None:
    typer.echo(line, err=True)
