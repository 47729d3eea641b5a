"""Runs a member from start to end: load the model in a worker, serve gateways, drain."""

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
        message = f"expected no kv_events for a member, got {serving.kv_events}; use --events and --replay instead"
        raise ConfigError(message, ("kv_events",))
    return MemberPlan(
        Path(model).name,
        endpoints.resolved(),
        keys,
        plan_worker(model, settings, serving)().plan,
        text_assets_of(resolve(model), settings),
    )


async def run_member(
    plan: MemberPlan,
    stop_event: asyncio.Event,
    drain_s: float,
    print_line: Callable[[str], None],
    report_status: ReportStatus | None = None,
) -> bool:
    """Run a member until `stop_event` is set; return false if requests were aborted. Raises the worker's fatal error.
    `report_status` is called with the status each second."""
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        stop_event.set()

    async with AsyncExitStack() as stack:
        relay = EventRelay(plan.endpoints.events, plan.endpoints.replay)
        stack.push_async_callback(relay.close)
        server = MemberServer(plan.endpoints.listen, plan.keys, plan.text_assets, relay)
        server.report_status = report_status
        open_message = msgspec.structs.replace(plan.worker.open_message, kv_events=relay.worker_settings)
        supervisor = Supervisor(replace(plan.worker, open_message=open_message), server.on_events, fail)
        stack.push_async_callback(supervisor.close)
        stack.push_async_callback(server.close)
        ready = await _ready_unless_stopped(supervisor, stop_event)
        if failures:
            raise failures[0]
        if ready is None:
            return True
        info = replace(ready.info, exactness=exactness_of(ready.info))
        server.start(supervisor, lambda incarnation: MemberCard(plan.name, info, incarnation))
        print_line(f"{plan.name}: {ready.info.line}")
        print_line(f"member at {server.address}, {'with keys' if plan.keys else 'unencrypted, for this machine only'}")
        print_line(f"KV events: {relay.events}, replay: {relay.replay}")
        await stop_event.wait()
        if failures:
            raise failures[0]
        server.drain()
        has_drained = await supervisor.drain(drain_s)
        await server.send_goodbye()
        return has_drained


def exactness_of(info: ModelInfo) -> str:
    """Return the numerics identifier of a member. It has quire's version, because kernels of another version may add
    in another order. Empty if `info` has none."""
    return f"{info.exactness} quire {__version__}" if info.exactness else ""


async def _ready_unless_stopped(supervisor: Supervisor, stop_event: asyncio.Event) -> Ready | None:
    """Start the worker; return None if `stop_event` was set while it loaded."""
    start_task = asyncio.ensure_future(supervisor.start())
    stop_task = asyncio.ensure_future(stop_event.wait())
    await asyncio.wait({start_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
    stop_task.cancel()
    if start_task.done():
        return start_task.result()
    start_task.cancel()
    return None
