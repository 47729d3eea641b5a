"""`quire fleet`: one gateway before many machines. One machine never needs it: that is `quire serve`."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.shared.lazy import lazy_group
from quire.cli.shared.settings_flags import with_chosen_settings
from quire.config import SETTINGS, Group, Settings

if TYPE_CHECKING:
    import asyncio

fleet_app = typer.Typer(
    name="fleet",
    help="Serve a model with many machines behind one gateway. One machine needs only `quire serve`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
fleet_app.add_typer(
    lazy_group(
        "quire.cli.fleet.ray",
        "ray_app",
        name="ray",
        help="A fleet on Ray: where members run, their restarts, scaling and rolling updates. Needs quire[ray].",
        epilog="Example: quire fleet ray up model.gguf --members 2",
    )
)
COMPUTES = (Group.MODEL, Group.SCHEDULING)
MEMBER_SETTINGS = [one.name for one in SETTINGS if one.group in COMPUTES or one.name in ("drain_s", "log_format")]
HAS_MODELS = ("models_folder", "idle_s", "turn_s", "trace", "trace_max_bytes", "trace_tokens")
GATEWAY_SETTINGS = [
    one.name for one in SETTINGS if (one.group is Group.SERVER and one.name not in HAS_MODELS) or one.name == "queue"
]
TokenizerModel = Annotated[
    str, typer.Option(metavar="MODEL", help="Whose words to use: where no member is quire nobody sends them.")
]
FleetKeysFile = Annotated[Path | None, typer.Option("--fleet-keys", metavar="FILE", help="Keys of `quire fleet keys`.")]


@fleet_app.command()
def keys(folder: Annotated[Path, typer.Argument(help="Where member.json and gateway.json are written.")]) -> None:
    """Make the keys by which members and gateways of one fleet know each other."""
    from quire.fleet.protocol.keys import make_keys

    for file in make_keys(folder):
        typer.echo(file)
    typer.echo("member.json goes to members, gateway.json to gateways; keep both secret", err=True)


@fleet_app.command()
@with_chosen_settings(*MEMBER_SETTINGS)
def member(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, or a hub id.")],
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Where gateways find it.")] = "tcp://127.0.0.1:7000",
    events: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where they hear what it has cached; a free port if not given.")
    ] = "",
    replay: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where they ask for what they missed; a free port if not given.")
    ] = "",
    fleet_keys: FleetKeysFile = None,
    status: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there each second how it is, for probes.")
    ] = None,
) -> None:
    """Compute for gateways. Ctrl-C lets requests finish."""
    import asyncio
    from functools import partial

    import uvloop

    from quire.fleet.kv_events.relay import MemberPlaces
    from quire.fleet.member.run import plan_member, run_member
    from quire.fleet.member.status import write_status_file
    from quire.fleet.protocol.keys import read_member_keys
    from quire.observe.access_log import set_up

    set_up("json" if settings.server.log_format == "json" else "plain")
    given = None if fleet_keys is None else read_member_keys(fleet_keys)

    places = MemberPlaces(listen, events, replay)
    tell = None if status is None else partial(write_status_file, status)

    async def run() -> bool:
        ending = _ending(asyncio.get_running_loop())
        plan = await asyncio.to_thread(plan_member, model, places, given, settings.model, settings.serving)
        return await run_member(plan, ending, settings.server.drain_s, _say, tell)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(run()):
            _say("requests were not done in time and were ended")


@fleet_app.command()
@with_chosen_settings(*GATEWAY_SETTINGS)
def gateway(
    settings: Settings,
    members: Annotated[str, typer.Option(metavar="FILE|dns:NAME", help="Who the members are: a file, or a name.")],
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "model",
    fleet_keys: FleetKeysFile = None,
    tokenizer: TokenizerModel = "",
    allow_clear_member: Annotated[
        bool,
        typer.Option("--allow-clear-member", help="Speak in clear to members that are not quire on other machines."),
    ] = False,
    insecure_no_keys: Annotated[
        bool, typer.Option("--insecure-no-keys", help="Let other machines in without keys. Anybody can use it.")
    ] = False,
) -> None:
    """Answer clients with the members of a fleet: the API of `quire serve`, and no model on this machine."""
    import asyncio

    import uvloop

    from quire.api.http.descriptors import allow_many_connections
    from quire.api.serving import Plan, run
    from quire.config import ParkedModel
    from quire.fleet.gateway.client import FleetModel
    from quire.fleet.gateway.discovery import parse_source
    from quire.fleet.openai.tokenizer_source import StrangerRules, read_words
    from quire.fleet.protocol.keys import read_gateway_keys
    from quire.observe.access_log import set_up

    set_up("json" if settings.server.log_format == "json" else "plain")
    settings.server.check_keys_file()
    if (warning := allow_many_connections()) is not None:
        _say(warning)
    source = parse_source(members)
    given = None if fleet_keys is None else read_gateway_keys(fleet_keys)
    strangers = StrangerRules(read_words(tokenizer) if tokenizer else None, allow_clear_member)

    def opened(_model: ParkedModel, _tell: object) -> FleetModel:
        return FleetModel(name, source, given, settings.serving.queue, strangers=strangers)

    plan = Plan([ParkedModel(name, name, is_kept=True)], settings, insecure_no_keys)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        num_ended = runner.run(run(plan, _say, opened))
    if num_ended:
        _say(f"{num_ended} requests were not done in time and were ended")


def _ending(loop: "asyncio.AbstractEventLoop") -> "asyncio.Event":
    import asyncio

    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    return ending


def _say(line: str) -> None:
    typer.echo(line, err=True)
