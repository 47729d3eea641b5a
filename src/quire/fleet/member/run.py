"""A member from its start to its end: a worker that loads, an address that gateways find, and a way to leave."""

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
from quire.fleet.kv_events.relay import EventRelay, MemberPlaces
from quire.fleet.member.server import MemberServer
from quire.fleet.member.status import MemberStatus
from quire.fleet.protocol.keys import MemberKeys
from quire.fleet.protocol.messages import MemberCard, ModelWords
from quire.fleet.protocol.text_assets import words_of
from quire.worker.messages import Ready
from quire.worker.parent.supervisor import Supervisor
from quire.worker.parent.worker_plan import WorkerPlan

TellStatus = Callable[[MemberStatus], None]


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """What a member needs to begin."""

    name: str
    places: MemberPlaces
    keys: MemberKeys | None
    worker: WorkerPlan
    words: ModelWords


def plan_member(
    model: str, places: MemberPlaces, keys: MemberKeys | None, settings: ModelSettings, serving: ServingSettings
) -> MemberPlan:
    """Resolve a model. Reads disks and perhaps a network: not for an event loop."""
    if serving.kv_events is not None:
        raise ConfigError(
            f"a member tells what it holds at --events and --replay, kv_events {serving.kv_events} given; leave it out"
        )
    return MemberPlan(
        Path(model).name,
        places.resolved(),
        keys,
        plan_worker(model, settings, serving)().plan,
        words_of(resolve(model), settings),
    )


async def run_member(
    plan: MemberPlan, ending: asyncio.Event, drain_s: float, say: Callable[[str], None], tell: TellStatus | None = None
) -> bool:
    """Until it is told to end; false if what ran had to be broken off. `tell` hears each second how it is."""
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        ending.set()

    async with AsyncExitStack() as held:
        relay = EventRelay(plan.places.events, plan.places.replay)
        held.push_async_callback(relay.close)
        server = MemberServer(plan.places.listen, plan.keys, plan.words, relay)
        server.tell = tell
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
        say(f"{plan.name}: {ready.info.line}")
        say(f"member at {server.address}, {'with keys' if plan.keys else 'in clear: this machine alone'}")
        say(f"what it holds is told at {relay.events}, and again at {relay.replay}")
        await ending.wait()
        if failures:
            raise failures[0]
        server.drain()
        is_done = await supervisor.drain(drain_s)
        await server.farewell()
        return is_done


def exactness_of(info: ModelInfo) -> str:
    """With the version of the kernels, which may change how they add up."""
    return f"{info.exactness} quire {__version__}" if info.exactness else ""


async def _ready_unless_ended(supervisor: Supervisor, ending: asyncio.Event) -> Ready | None:
    """None: it was told to end while it loaded."""
    starting = asyncio.ensure_future(supervisor.start())
    told = asyncio.ensure_future(ending.wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    return None
