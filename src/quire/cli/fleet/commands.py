"""`quire fleet`: run a gateway and members on several machines. A single machine needs only `quire serve`."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.shared.flags import with_chosen_settings
from quire.cli.shared.server_run import prepare_server, print_line, run_until_shutdown
from quire.config import SETTINGS, Group, Settings

fleet_app = typer.Typer(rich_markup_mode=None)
ray_app = typer.Typer(
    name="ray",
    help="A fleet on Ray, which places, restarts, scales and updates members. Deploying needs quire[ray].",
    no_args_is_help=True,
    rich_markup_mode=None,
)
fleet_app.add_typer(ray_app)
ENGINE_GROUPS = (Group.MODEL, Group.SCHEDULING)
MEMBER_SETTINGS = [row.name for row in SETTINGS if row.group in ENGINE_GROUPS or row.name in ("drain_s", "log_format")]
WORKER_ONLY = ("models_folder", "idle_s", "turn_s", "trace", "trace_max_bytes", "trace_tokens")
GATEWAY_SETTINGS = [
    row.name for row in SETTINGS if (row.group is Group.SERVER and row.name not in WORKER_ONLY) or row.name == "queue"
]
NO_RAY = ("models_folder", "idle_s", "turn_s", "admin_socket", "store", "store_size")
RAY_SETTINGS = [row.name for row in SETTINGS if row.group in (*ENGINE_GROUPS, Group.SERVER) and row.name not in NO_RAY]
TokenizerModel = Annotated[
    str, typer.Option(metavar="MODEL", help="Model that provides the tokenizer if all members are OpenAI members.")
]
FleetKeysFile = Annotated[Path | None, typer.Option("--fleet-keys", metavar="FILE", help="Keys of `quire fleet keys`.")]


@fleet_app.command()
def keys(folder: Annotated[Path, typer.Argument(help="Folder for member.json and gateway.json.")]) -> None:
    """Create the keys with which members and gateways of one fleet authenticate each other."""
    from quire.fleet.protocol.keys import make_keys

    for file in make_keys(folder):
        typer.echo(file)
    typer.echo("copy member.json to members and gateway.json to gateways; keep both secret", err=True)


@fleet_app.command()
@with_chosen_settings(*MEMBER_SETTINGS)
def member(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, or a hub id.")],
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Endpoint for gateways.")] = "tcp://127.0.0.1:7000",
    events: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Endpoint for KV-cache events; default: a free port.")
    ] = "",
    replay: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Endpoint to request missed events; default: a free port.")
    ] = "",
    fleet_keys: FleetKeysFile = None,
    status: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a status line here every second, for health probes.")
    ] = None,
) -> None:
    """Run a member that serves gateways. Ctrl-C lets requests finish."""
    from functools import partial

    import uvloop

    from quire.fleet.kv_events.relay import MemberEndpoints
    from quire.fleet.member.run import plan_member, run_member
    from quire.fleet.member.status import write_status_file
    from quire.fleet.protocol.keys import read_member_keys
    from quire.observe.access_log import configure_logging

    configure_logging(settings.server.log_format)
    member_keys = None if fleet_keys is None else read_member_keys(fleet_keys)

    endpoints = MemberEndpoints(listen, events, replay)
    write_status = None if status is None else partial(write_status_file, status)

    async def run() -> bool:
        shutdown = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, shutdown.set)
        plan = await asyncio.to_thread(plan_member, model, endpoints, member_keys, settings.model, settings.serving)
        return await run_member(plan, shutdown, settings.server.drain_s, print_line, write_status)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(run()):
            print_line("requests did not finish in time and were cancelled")


@fleet_app.command()
@with_chosen_settings(*GATEWAY_SETTINGS)
def gateway(
    settings: Settings,
    members: Annotated[str, typer.Option(metavar="FILE|dns:NAME", help="List of members: a file, or a DNS name.")],
    name: Annotated[str, typer.Option(help="Model name for clients.")] = "model",
    fleet_keys: FleetKeysFile = None,
    tokenizer: TokenizerModel = "",
    allow_clear_member: Annotated[
        bool,
        typer.Option("--allow-clear-member", help="Allow unencrypted connections to OpenAI members on other hosts."),
    ] = False,
    insecure_no_keys: Annotated[
        bool, typer.Option("--insecure-no-keys", help="Accept any client on other machines, without keys.")
    ] = False,
) -> None:
    """Run a gateway to the members of a fleet: the API of `quire serve`, and no model on this machine."""
    from quire.api.serving import Plan, run
    from quire.config import OnDemandModel
    from quire.fleet.gateway.client import FleetModel
    from quire.fleet.gateway.discovery import parse_source
    from quire.fleet.openai.tokenizer_source import OpenAIMemberRules, read_tokenizer_source
    from quire.fleet.protocol.keys import read_gateway_keys

    prepare_server(settings)
    settings.server.check_keys_file()
    source = parse_source(members)
    gateway_keys = None if fleet_keys is None else read_gateway_keys(fleet_keys)
    openai_rules = OpenAIMemberRules(read_tokenizer_source(tokenizer) if tokenizer else None, allow_clear_member)

    def open_fleet(_model: OnDemandModel, _progress: object) -> FleetModel:
        return FleetModel(name, source, gateway_keys, settings.serving.queue, openai_rules=openai_rules)

    plan = Plan([OnDemandModel(name, name, is_kept=True)], settings, insecure_no_keys)
    run_until_shutdown(run(plan, print_line, open_fleet))


@ray_app.command("config")
@with_chosen_settings(*RAY_SETTINGS)
def ray_config(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, or a hub id.")],
    fleet_keys: Annotated[
        Path, typer.Option("--fleet-keys", metavar="FOLDER", help="Folder from `quire fleet keys`, on every machine.")
    ],
    members: Annotated[
        str, typer.Option(metavar="N|MIN-MAX", help="Number of members; a range follows the load.")
    ] = "1",
    gateways: Annotated[int, typer.Option(help="Number of gateways.")] = 1,
    name: Annotated[str, typer.Option(help="Model name for clients; default: the last part of MODEL.")] = "",
) -> None:
    """Print the Serve config of a fleet, for `serve deploy`."""
    from msgspec import to_builtins

    from quire.fleet.member.replicas import settings_of_replica
    from quire.fleet.protocol.keys import GATEWAY_FILE, MEMBER_FILE
    from quire.fleet.ray.config import MemberCount, RayFleetArgs, serve_config

    count = MemberCount.parse(members)
    replica = settings_of_replica(settings.model, count.max_members)
    # Includes settings from environment variables and files, which may be missing on the machines of replicas.
    in_force = {setting: settings.values[setting] for setting in RAY_SETTINGS}
    passed = {setting: to_builtins(entry.value) for setting, entry in in_force.items() if entry.source != "default"}
    parts = {"memory": replica.memory_bytes, "threads": replica.num_threads}
    keys = fleet_keys.resolve()
    args = RayFleetArgs(
        str(Path(model).resolve()) if Path(model).exists() else model,
        name or Path(model).name,
        str(keys / MEMBER_FILE),
        str(keys / GATEWAY_FILE),
        settings={setting: value for setting, value in (passed | parts).items() if value is not None},
    )
    typer.echo(json.dumps(serve_config(args, count, gateways), indent=2))
