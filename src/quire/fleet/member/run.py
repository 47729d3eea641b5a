"""The life of a member: load the model in a worker, serve gateways, drain."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from quire import __version__
from quire.checkpoints import resolve
from quire.client.engines.served import plan_worker
from quire.config import ModelSettings, ServingSettings
from quire.engine.engine import ModelInfo
from quire.errors import ConfigError
from quire.fleet.kv_events.relay import EventRelay, MemberEndpoints
from quire.fleet.member.server import MemberServer
from quire.fleet.member.status import MemberStatus
from quire.fleet.protocol.keys import MemberKeys
from quire.fleet.protocol.messages import MemberCard, TextAssets
from quire.fleet.protocol.text_assets import text_assets_of
from quire.worker.messages import Ready
from quire.worker.parent.supervisor import Supervisor
from quire.worker.parent.worker_plan import WorkerPlan

ReportStatus = Callable[[MemberStatus], None]


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """The inputs of `run_member`."""

    name: str
    endpoints: MemberEndpoints
    keys: MemberKeys | None
    worker: WorkerPlan
    text_assets: TextAssets


def plan_member(
    model: str, endpoints: MemberEndpoints, keys: MemberKeys | None, settings: ModelSettings, serving: ServingSettings
) -> MemberPlan:
    """Resolve a model into a plan. Blocks on disk and network I/O. Raises ConfigError if `serving` has `kv_events`."""
    if serving.kv_events is not None:
        rule = f"expected no kv_events for a member, got {serving.kv_events}; use --events and --replay instead"
        raise ConfigError(rule, ("kv_events",))
    return MemberPlan(
        Path(model).name,
        endpoints.resolved(),
        keys,
        plan_worker(model, settings, serving)().plan,
        text_assets_of(resolve(model), settings),
    )


async def run_member(
    plan: MemberPlan,
    ending: asyncio.Event,
    drain_s: float,
    print_line: Callable[[str], None],
    report_status: ReportStatus | None = None,
) -> bool:
    """Run a member until `ending` is set; return false if requests were aborted. Raises the worker's fatal error.
    `report_status` is called with the status each second."""
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        ending.set()

    async with AsyncExitStack() as held:
        relay = EventRelay(plan.endpoints.events, plan.endpoints.replay)
        held.push_async_callback(relay.close)
        server = MemberServer(plan.endpoints.listen, plan.keys, plan.text_assets, relay)
        server.report_status = report_status
        opened = msgspec.structs.replace(plan.worker.open, kv_events=relay.inside)
        supervisor = Supervisor(replace(plan.worker, open=opened), server.listener, fail)
        held.push_async_callback(supervisor.close)
        held.push_async_callback(server.close)
        ready = await _ready_unless_ended(supervisor, ending)
        if failures:
            raise failures[0]
        if ready is None:
            return True
        info = replace(ready.info, exactness=exactness_of(ready.info))
        server.start(supervisor, lambda incarnation: MemberCard(plan.name, info, incarnation))
        print_line(f"{plan.name}: {ready.info.line}")
        print_line(f"member at {server.address}, {'with keys' if plan.keys else 'in clear: this machine alone'}")
        print_line(f"KV events: {relay.events}, replay: {relay.replay}")
        await ending.wait()
        if failures:
            raise failures[0]
        server.drain()
        is_done = await supervisor.drain(drain_s)
        await server.send_goodbye()
        return is_done


def exactness_of(info: ModelInfo) -> str:
    """Return the numerics identifier of members, with quire's version, because kernels of another version may add in
    another order. Empty if `info` has none."""
    return f"{info.exactness} quire {__version__}" if info.exactness else ""


async def _ready_unless_ended(supervisor: Supervisor, ending: asyncio.Event) -> Ready | None:
    """Start the worker; return None if `ending` was set while it loaded."""
    starting = asyncio.ensure_future(supervisor.start())
    end_requested = asyncio.ensure_future(ending.wait())
    await asyncio.wait({starting, end_requested}, return_when=asyncio.FIRST_COMPLETED)
    end_requested.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    return None
