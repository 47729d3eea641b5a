"""Fleets of oracles in this process: real sockets, real workers, everything but the model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from quire.fleet.fleet_keys import GatewayKeys, MemberKeys
from quire.fleet.fleet_messages import MemberCard, ModelWords
from quire.fleet.fleet_model import FleetModel
from quire.fleet.member_list import FixedMembers
from quire.fleet.member_server import MemberServer
from quire.fleet.membership import SUSPECT_AFTER_S
from quire.worker.supervisor import Supervisor
from tests.support.oracle_worker import SETTINGS, oracle_plan
from tests.support.talkers import TEMPLATE, talker

LOCAL = "tcp://127.0.0.1:*"


def oracle_words() -> ModelWords:
    text = talker(template=TEMPLATE).text
    tokenizer_json = text.tokenizer.library.to_str().encode()
    return ModelWords(tokenizer_json, TEMPLATE, tuple(sorted(text.eos_token_ids)), (), {}, {}, writes_tools=True)


@dataclass
class SmallMember:
    """One member, and how to end it badly."""

    server: MemberServer
    supervisor: Supervisor
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
    exactness: str = "same", *, step_s: float = 0.0, keys: MemberKeys | None = None, address: str = LOCAL
) -> AsyncIterator[SmallMember]:
    server = MemberServer(address, keys, oracle_words())
    size = talker(template=TEMPLATE).text.vocabulary_size
    supervisor = Supervisor(oracle_plan(size, SETTINGS, step_s=step_s), server.listener, lambda _error: None)
    ready = await supervisor.start()
    server.start(supervisor, lambda life: MemberCard("oracle", replace(ready.info, exactness=exactness), life))
    member = SmallMember(server, supervisor)
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
    suspect_after_s: float = SUSPECT_AFTER_S,
) -> AsyncIterator[tuple[FleetModel, list[SmallMember]]]:
    async with AsyncExitStack() as held:
        # Beside each other: each loads in a process of its own.
        opening = [small_member(step_s=step_s, keys=member_keys) for _ in range(num_members)]
        members = list(await asyncio.gather(*(held.enter_async_context(one) for one in opening)))
        source = FixedMembers([member.address for member in members])
        fleet = FleetModel("oracle", source, gateway_keys, suspect_after_s=suspect_after_s)
        model = await held.enter_async_context(fleet)
        while model.fleet.num_ready < num_members:
            await asyncio.sleep(0.01)
        yield model, members
