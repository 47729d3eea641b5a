"""A fleet on Ray Serve: placement, restarts, health checks, autoscaling and rolling updates. Tokens bypass Ray.

    Gateway (ingress)  ── quire's ASGI app ── ZeroMQ, encrypted ──►  member processes
    Member             ── supervises one member process; reports its status to the registry each second
    registry           ── an actor with the table of members; members write it, gateways read it

The only file that imports ray. If the registry lists no members, gateways keep their current members.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import replace
from ray import serve
from ray.exceptions import RayError

from quire.config import Settings
from quire.errors import ConfigError, EngineDeadError
from quire.fleet.member.child_process import WatchedMember
from quire.fleet.member.replicas import COMMAND, ReplicaSpec, replica_spec
from quire.fleet.protocol.keys import read_gateway_keys, read_member_keys
from quire.fleet.ray.config import (
    END_GRACE_S,
    GATEWAY,
    MEMBER,
    RayFleetArgs,
    read_args,
    settings_from,
)
from quire.fleet.ray.registry import SETTLE_S, MemberRegistry, desired_members, load_of

NAMESPACE = "quire"
REPORT_EVERY_S = 1.0
REGISTRY_S = 5.0
"""Timeout of a gateway's request to the registry."""
LOAD = "quire_load"
"""Name of the members' load metric in Ray's autoscaling stats."""
ONE_AT_A_TIME = 0.001
"""Fraction of replicas updated at a time; Ray rounds it up to one replica."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0
GATEWAY_APP = "quire.api.gateway_app:GatewayApp"
"""Imported by name in gateway processes, because the API layer is above this package."""

MakeSpec = Callable[[RayFleetArgs, Settings], ReplicaSpec]


def member_spec(args: RayFleetArgs, settings: Settings) -> ReplicaSpec:
    """Return the spec (model and settings) of a member process. Blocks on disk and perhaps network I/O."""
    return replica_spec(args.model, 1, settings.model, settings.serving, settings.server.drain_s)


# -- the registry ------------------------------------------------------------------------------------------------------


class RegistryActor(MemberRegistry):
    """The table of members as a Ray actor."""

    def __init__(self) -> None:
        is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(settle_s=SETTLE_S if is_restart else 0.0)


def registry_of(app: str) -> Any:
    """Return the handle of an application's registry actor. The first caller creates it; it outlives all callers."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "lifetime": "detached"}
    actor = ray.remote(RegistryActor)
    return actor.options(name=f"registry-{app}", namespace=NAMESPACE, get_if_exists=True, **options).remote()


class RayMembers:
    """A `MemberSource` that reads the registry."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    async def addresses(self) -> Sequence[str]:
        try:
            addresses: list[str] = await asyncio.wait_for(_as_coroutine(self._registry.addresses.remote()), REGISTRY_S)
        except (RayError, TimeoutError) as error:
            raise ConfigError(f"Ray did not return the members: {error or 'no response'}") from error
        if not addresses:
            raise ConfigError("Ray reports no members")
        return addresses


async def _as_coroutine(reference: Any) -> Any:
    return await reference


def own_node_address() -> str:
    """Return this node's address as Ray knows it; a loopback address if Ray was started on loopback."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


# -- deployments -------------------------------------------------------------------------------------------------------


class RayMember:
    """The deployment that supervises one member process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, raw_args: Mapping[str, Any], make_spec: MakeSpec = member_spec, command: Sequence[str] = COMMAND
    ) -> None:
        """Start the member process and wait until the model is loaded. Raises EngineDeadError."""
        args = read_args(raw_args)
        settings = settings_from(args)
        keys = read_member_keys(Path(args.member_keys)) if args.member_keys else None
        context = serve.get_replica_context()
        self._full_load = args.tokens_per_member, settings.model.max_running
        """Waiting prompt tokens and running sequences at which a member counts as fully loaded."""
        self._replica = str(context.replica_id.unique_id)
        node = own_node_address()
        self._registry = registry_of(context.app_name)
        host = f"[{node}]" if ":" in node else node
        spec = await asyncio.to_thread(make_spec, args, settings)
        self._member = WatchedMember(replace(spec, address=f"tcp://{host}:*", keys=keys), command)
        await asyncio.to_thread(self._member.start)
        self._shutdown = asyncio.Event()
        self._reporting = asyncio.create_task(self._report_until_shutdown(), name="quire-member-reports")

    def check_health(self) -> None:
        """Raise if the member is unhealthy: Ray then replaces the replica."""
        if problem := self._member.problem():
            raise EngineDeadError(f"member {self._replica}: {problem}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this member's load for `scale_members`."""
        status = self._member.status
        return {LOAD: 0.0 if status is None else load_of(status, *self._full_load)}

    async def __del__(self) -> None:
        """Shut down on Ray's request: leave the registry, so that gateways send no new requests, and drain."""
        if not hasattr(self, "_shutdown") or self._shutdown.is_set():
            return
        self._shutdown.set()
        with contextlib.suppress(RayError):
            await self._registry.leave.remote(self._replica)
        await asyncio.to_thread(self._member.end)

    async def _report_until_shutdown(self) -> None:
        while not self._shutdown.is_set():
            self._report()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._shutdown.wait(), REPORT_EVERY_S)

    def _report(self) -> None:
        """Report to the registry. An unhealthy member is not reported, so it soon drops out of the registry."""
        status = self._member.status
        if status is not None and not self._member.problem():
            self._registry.report.remote(self._replica, status)


class RayGateway:
    """The deployment that serves clients. Requests arrive through Ray's proxy, tokens directly from members."""

    async def __init__(self, raw_args: Mapping[str, Any], _members: Any) -> None:  # type: ignore[misc]  # as above
        """Start the gateway and wait for a member. `_members` is unused: binding the member deployment starts it."""
        args = read_args(raw_args)
        keys = read_gateway_keys(Path(args.gateway_keys)) if args.gateway_keys else None
        source = RayMembers(registry_of(serve.get_replica_context().app_name))
        module, _, name = GATEWAY_APP.partition(":")
        app_type = getattr(await asyncio.to_thread(import_module, module), name)
        self._app = app_type(args.served_name, source, keys, settings_from(args), allow_no_keys=args.insecure_no_keys)
        await self._app.start()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI app. Serve calls this after `__init__`."""
        return self._app.asgi

    def check_health(self) -> None:
        """Raise if the gateway is unhealthy: Ray then replaces the replica."""
        self._app.check()

    async def __del__(self) -> None:
        """Close the gateway. Ray calls this after the last response."""
        if hasattr(self, "_app"):
            await self._app.close()


# -- the application ---------------------------------------------------------------------------------------------------


def scale_members(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the desired number of members; Serve applies the bounds and delays of its config."""
    loads = dict((context.aggregated_metrics or {}).get(LOAD, {}))
    return desired_members(loads.values()), {}


def app(args: dict[str, Any]) -> Any:
    """Build the application; Serve calls this function as the `import_path` of its config."""
    return build_app(args)


def build_app(args: Mapping[str, Any], make_spec: MakeSpec = member_spec, command: Sequence[str] = COMMAND) -> Any:
    """Bind both deployments; `make_spec` and `command` define the member processes."""
    parsed_args = read_args(args)
    settings = settings_from(parsed_args)
    end_s = settings.server.drain_s + END_GRACE_S
    common_options = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": end_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "rolling_update_percentage": ONE_AT_A_TIME,
    }
    member_resources: dict[str, Any] = {"num_cpus": settings.model.num_threads or 1}
    if settings.model.memory_bytes is not None:
        member_resources["memory"] = settings.model.memory_bytes
    member = serve.deployment(name=MEMBER, ray_actor_options=member_resources, **common_options)(RayMember)
    gateway = serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=settings.server.max_open_requests + 64,  # the gateway itself refuses more (Retry-After)
        max_surge_percent=100,  # start the new gateway before the old one drains; members would need twice the memory
        ray_actor_options={"num_cpus": 0},
        **common_options,
    )(serve.ingress()(RayGateway))
    return gateway.bind(dict(args), member.bind(dict(args), make_spec, command))
