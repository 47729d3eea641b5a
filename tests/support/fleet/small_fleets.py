"""Fleets of oracles in this process: real sockets, real workers, everything but the model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import zmq
import zmq.asyncio

from quire.config import ModelSettings
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.kv_events.reader import EventReader
from quire.fleet.kv_events.relay import EventRelay
from quire.fleet.member.server import MemberServer
from quire.fleet.protocol.keys import GatewayKeys, MemberKeys
from quire.fleet.protocol.messages import MemberCard, TextAssets
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.membership import SUSPECT_AFTER_S
from quire.worker.child.kv_snapshot import SNAPSHOT
from quire.worker.parent.supervisor import Supervisor
from tests.support.fleet.event_members import held_names
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import SETTINGS, oracle_plan

LOCAL = "tcp://127.0.0.1:*"


def oracle_words() -> TextAssets:
    text = talker(template=TEMPLATE).text
    tokenizer_json = text.tokenizer.library.to_str().encode()
    return TextAssets(tokenizer_json, TEMPLATE, tuple(sorted(text.eos_token_ids)), (), {}, {}, writes_tools=True)


@dataclass
class SmallMember:
    """One member, and how to end it badly."""

    server: MemberServer
    supervisor: Supervisor
    relay: EventRelay
    block_size: int
    is_gone: bool = False

    @property
    def address(self) -> str:
        return self.server.address

    async def kill(self) -> None:
        """As if its machine were gone: nothing is said, and nobody is told."""
        self.is_gone = True
        await self.server.close()
        await self.supervisor.close()


@asynccontextmanager
async def small_member(
    exactness: str = "same",
    *,
    step_s: float = 0.0,
    keys: MemberKeys | None = None,
    address: str = LOCAL,
    settings: ModelSettings = SETTINGS,
    num_kept_batches: int = 10_000,
    fingerprint: str = "oracle",
) -> AsyncIterator[SmallMember]:
    relay = EventRelay(LOCAL, LOCAL)
    announced = replace(relay.worker_settings, num_kept_batches=num_kept_batches)
    server = MemberServer(address, keys, oracle_words(), relay)
    size = talker(template=TEMPLATE).text.vocabulary_size
    plan = oracle_plan(size, settings, step_s=step_s, kv_events=announced)
    supervisor = Supervisor(plan, server.on_events, lambda _error: None)
    ready = await supervisor.start()
    info = replace(ready.info, exactness=exactness, identity=replace(ready.info.identity, fingerprint=fingerprint))
    server.start(supervisor, lambda life: MemberCard("oracle", info, life))
    member = SmallMember(server, supervisor, relay, info.block_size)
    try:
        yield member
    finally:
        if not member.is_gone:
            await member.kill()


@asynccontextmanager
async def small_fleet(
    num_members: int,
    *,
    step_s: float = 0.0,
    member_keys: MemberKeys | None = None,
    gateway_keys: GatewayKeys | None = None,
    settings: ModelSettings = SETTINGS,
    num_kept_batches: int = 10_000,
    suspect_after_s: float = SUSPECT_AFTER_S,
) -> AsyncIterator[tuple[FleetModel, list[SmallMember]]]:
    async with AsyncExitStack() as held:
        opening = [
            small_member(step_s=step_s, keys=member_keys, settings=settings, num_kept_batches=num_kept_batches)
            for _ in range(num_members)
        ]
        # Beside each other: each loads in a process of its own.
        members = list(await asyncio.gather(*(held.enter_async_context(one) for one in opening)))
        source = FixedMembers([member.address for member in members])
        fleet = FleetModel("oracle", source, gateway_keys, suspect_after_s=suspect_after_s)
        model = await held.enter_async_context(fleet)
        while model.fleet.num_ready < num_members:
            await asyncio.sleep(0.01)
        yield model, members


async def truth_of(member: SmallMember) -> set[int]:
    """What the member's worker holds at this moment, as a gateway calls it: asked inside, past all that can fail."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(member.relay.worker_settings.replay_endpoint)
        await asking.send_multipart([b"", SNAPSHOT])
        index = BlockIndex(8)
        index.join("it")
        reader = EventReader(index, "it", "oracle", member.block_size, None)
        while not reader.receive_response(await asyncio.wait_for(asking.recv_multipart(), 60)):
            pass
        while reader.has_work:
            reader.work()
        return held_names(index, "it")


async def until_true(model: FleetModel, members: list[SmallMember]) -> list[set[int]]:
    """Wait until the gateway's index is the truth; what that is, member by member."""
    while True:
        truth = [await truth_of(member) for member in members]
        if truth == believed(model, members):
            return truth
        await asyncio.sleep(0.02)


def believed(model: FleetModel, members: list[SmallMember]) -> list[set[int]]:
    """What the gateway has heard that each holds."""
    index = model.fleet.router.index
    return [held_names(index, member.address) if member.address in index.members else set() for member in members]
