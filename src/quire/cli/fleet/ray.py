"""`quire fleet ray`: a fleet that Ray places, restarts, scales and updates. Needs quire[ray], as nothing else does.

A Serve config is deployed: made from flags for a model, or read from a file. Ray's token is always required.
"""

import json
import os
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.shared.columns import columns
from quire.cli.shared.settings_flags import with_chosen_settings
from quire.config import SETTINGS, Group, Settings
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.fleet.ray.serve_rest import ServeRest

ray_app = typer.Typer(
    name="ray",
    help="A fleet on Ray: placement, restarts, scaling and rolling updates of members. Needs quire[ray].",
    no_args_is_help=True,
    rich_markup_mode=None,
)
ONE_MACHINE = ("models_folder", "idle_s", "turn_s", "admin_socket", "store", "store_size")
RAY_SETTINGS = [
    one.name
    for one in SETTINGS
    if one.group in (Group.MODEL, Group.SCHEDULING, Group.SERVER) and one.name not in ONE_MACHINE
]
LOOK_S = 1.0
ClusterAddress = Annotated[
    str, typer.Option("--address", metavar="URL", help="The cluster's dashboard. On this machine `up` starts one.")
]
AppName = Annotated[str, typer.Option("--app", metavar="NAME", help="Name of the application in its config.")]
DEFAULT = "http://127.0.0.1:8265"


@ray_app.command()
@with_chosen_settings(*RAY_SETTINGS)
def up(
    settings: Settings,
    target: Annotated[str, typer.Argument(metavar="FILE|MODEL", help="A Serve config (.yaml, .json), or a model.")],
    members: Annotated[
        str, typer.Option(metavar="N|MIN-MAX", help="Number of members; a range follows the load.")
    ] = "1",
    gateways: Annotated[int, typer.Option(help="Number of gateways.")] = 1,
    name: Annotated[str, typer.Option(help="Model name for clients; default: the last part of MODEL.")] = "",
    fleet_keys: Annotated[
        Path | None,
        typer.Option("--fleet-keys", metavar="FOLDER", help="Folder from `quire fleet keys`; default: a new one."),
    ] = None,
    address: ClusterAddress = DEFAULT,
    haproxy: Annotated[bool, typer.Option("--haproxy", help="Use Ray's faster proxy if Ray is started here.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the Serve config and start nothing.")] = False,
) -> None:
    """Deploy a fleet. If no cluster responds, start one on this machine, on loopback and with a token."""
    from quire.fleet.ray.local_ray import check_installed, state_folder

    folder = fleet_keys or state_folder() / "keys"
    config = _config(settings, target, members, gateways, name, folder)
    if show:
        typer.echo(json.dumps(config, indent=2))
        return
    check_installed()
    from quire.fleet.protocol.keys import MEMBER_FILE, make_keys
    from quire.fleet.ray.config import with_applications

    if not _is_file(target) and not (folder / MEMBER_FILE).exists():
        make_keys(folder)
    rest = _cluster(address, haproxy=haproxy)
    rest.deploy(with_applications(rest.details(), config))
    for one in config["applications"]:
        _wait_until_running(rest, one["name"])
    listens = config.get("http_options", {})
    typer.echo(f"http://{listens.get('host', '127.0.0.1')}:{listens.get('port', 8000)}")


@ray_app.command()
def status(
    address: ClusterAddress = DEFAULT,
    app: AppName = "quire",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show members and gateways: their location and state, and the load of members."""
    from quire.fleet.ray.local_ray import check_installed

    check_installed()
    report = _status(_rest(address), app)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(f"{app}: {report['status']}{': ' + report['message'] if report['message'] else ''}")
    header = ("deployment", "replica", "state", "pid", "address", "running", "waiting", "uncomputed tokens")
    rows: list[tuple[str, ...]] = []
    for one in report["replicas"]:
        member = one.get("member") or {}
        load = [str(member.get(field, "")) for field in ("num_running", "num_waiting", "num_uncomputed_tokens")]
        rows.append(
            (one["deployment"], one["replica"], one["state"], str(one["pid"]), member.get("address", ""), *load)
        )
    typer.echo(columns(header, rows, right=frozenset({3, 5, 6, 7})))


@ray_app.command()
def scale(
    members: Annotated[str, typer.Argument(metavar="N|MIN-MAX", help="Number of members; a range follows the load.")],
    address: ClusterAddress = DEFAULT,
    app: AppName = "quire",
) -> None:
    """Change the number of members. Members that stop finish their requests first; no member is replaced."""
    from quire.fleet.ray.config import MemberCount, listening, scaled, with_applications

    count, rest = MemberCount.parse(members), _rest(address)
    details = rest.details()
    deployed = _application(details, app).get("deployed_app_config")
    if deployed is None:
        raise ConfigError(f"expected an application deployed from a config, got {app}; scale it with its own tools")
    rest.deploy(with_applications(details, {**listening(details), "applications": [scaled(deployed, count)]}))
    _wait_until_running(rest, app)


@ray_app.command()
def down(
    address: ClusterAddress = DEFAULT,
    app: AppName = "quire",
    keep_ray: Annotated[bool, typer.Option("--keep-ray", help="Keep Ray running if it was started here.")] = False,
) -> None:
    """Stop the application. Requests may finish; Ray is stopped too if it was started here."""
    from quire.fleet.ray.config import without_application
    from quire.fleet.ray.local_ray import end_ray, remembered, state_folder

    rest = _rest(address)
    rest.deploy(without_application(rest.details(), app))
    while app in rest.details().get("applications", {}):
        sleep(LOOK_S)
    started = remembered(state_folder())
    if started is not None and started.address == address and not keep_ray:
        end_ray(state_folder(), started)


def _config(settings: Settings, target: str, members: str, gateways: int, name: str, keys: Path) -> dict[str, Any]:
    if _is_file(target):
        return _read_config(Path(target))
    from msgspec import to_builtins

    from quire.fleet.member.replicas import settings_of_replica
    from quire.fleet.protocol.keys import GATEWAY_FILE, MEMBER_FILE
    from quire.fleet.ray.config import MemberCount, RayFleetArgs, serve_config

    count = MemberCount.parse(members)
    own = settings_of_replica(settings.model, count.at_most)
    explicit = {one: to_builtins(settings.values[one].value) for one in RAY_SETTINGS if _is_set(settings, one)}
    parts = {"memory": own.memory_bytes, "threads": own.num_threads}
    model = str(Path(target).resolve()) if Path(target).exists() else target
    args = RayFleetArgs(
        model,
        name or Path(target).name,
        str((keys / MEMBER_FILE).resolve()),
        str((keys / GATEWAY_FILE).resolve()),
        settings={**explicit, **{one: value for one, value in parts.items() if value is not None}},
    )
    return serve_config(args, count, gateways)


def _is_file(target: str) -> bool:
    return Path(target).suffix in (".yaml", ".yml", ".json")


def _is_set(settings: Settings, name: str) -> bool:
    """Whether a flag, a variable or a file sets it: replicas may run where the variable or file is missing."""
    return settings.values[name].source != "default" and settings.values[name].value is not None


def _read_config(file: Path) -> dict[str, Any]:
    from quire.fleet.ray.config import check_config

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the Serve config {file}: {error}") from error
    if file.suffix == ".json":
        try:
            return check_config(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"expected JSON in the Serve config {file}: {error}") from error
    import yaml  # type: ignore[import-untyped]

    try:
        return check_config(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"expected YAML in the Serve config {file}: {error}") from error


def _rest(address: str) -> "ServeRest":
    from quire.fleet.ray.serve_rest import ServeRest, read_token

    return ServeRest(address, read_token())


def _cluster(address: str, *, haproxy: bool) -> "ServeRest":
    """The cluster at this address, or a new one on this machine."""
    from quire.fleet.ray.local_ray import HAPROXY, start_ray, state_folder
    from quire.fleet.ray.serve_rest import RayUnreachableError

    rest = _rest(address)
    try:
        rest.details()
    except RayUnreachableError:
        typer.echo("starting Ray on this machine", err=True)
        environ = {**os.environ, **(HAPROXY if haproxy else {})}
        start_ray(state_folder(), address, environ)
        return _rest(address)
    return rest


def _application(details: dict[str, Any], app: str) -> dict[str, Any]:
    known = details.get("applications", {})
    if app not in known:
        raise ConfigError(
            f"expected an application of the cluster ({', '.join(known) or 'none'}), got {app}; choose one with --app"
        )
    return dict(known[app])


def _wait_until_running(rest: "ServeRest", app: str) -> None:
    """Models may take minutes to load; Ctrl-C stops only the wait."""
    reported, began_s = "", monotonic()
    while True:
        found = rest.details().get("applications", {}).get(app, {})
        state, message = str(found.get("status", "")), str(found.get("message", ""))
        if state != reported:
            reported = state
            typer.echo(f"{app}: {state or 'not deployed yet'} after {monotonic() - began_s:.0f} s", err=True)
        if state == "RUNNING":
            return
        if state == "DEPLOY_FAILED":  # one that is unhealthy has lost a replica, and gets another
            raise ConfigError(f"deployment of {app} failed: {message}")
        sleep(LOOK_S)


def _status(rest: "ServeRest", app: str) -> dict[str, Any]:
    from quire.fleet.ray.local_ray import ALONE, remembered, state_folder
    from quire.fleet.ray.serve_rest import AUTH_MODE

    found = _application(rest.details(), app)
    started = remembered(state_folder())
    is_own = started is not None and started.address == rest.address
    gcs = started.gcs if started is not None and is_own else "auto"
    # Before ray is imported.
    os.environ.update({**({AUTH_MODE: "token"} if rest.token else {}), **(ALONE if is_own else {})})
    from quire.fleet.ray.deployments import member_rows

    rows = {row["replica"]: row for row in member_rows(app, gcs)}
    replicas = [
        {
            "deployment": name,
            "replica": str(one.get("replica_id", "")),
            "state": str(one.get("state", "")),
            "node": one.get("node_ip"),
            "pid": one.get("pid"),
            "member": rows.get(str(one.get("replica_id", "")), {}).get("status"),
            "member_pid": rows.get(str(one.get("replica_id", "")), {}).get("pid"),
        }
        for name, deployment in found.get("deployments", {}).items()
        for one in deployment.get("replicas", ())
    ]
    return {"status": found.get("status"), "message": found.get("message", ""), "replicas": replicas}
