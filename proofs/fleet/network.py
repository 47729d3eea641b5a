"""A network that fails between gateway and members: each failure in the middle of streams, again and again.

Each run: eight streams on two members, a failure, its end, and every token compared with those of a quiet network.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from benchmarks.record import say
from proofs.engine.worker import until
from proofs.fleet.namespaces import EVENTS_PORT, REPLAY_PORT, FarMember, dropping, far_members, run
from proofs.framework.proof import Proof, section
from quire.client.request.params import SamplingParams
from quire.errors import QuireError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.protocol.keys import GatewayKeys, make_keys, read_gateway_keys

STEP_S = 0.02
NUM_STREAMS = 8
LONG = SamplingParams(max_tokens=400, temperature=0.9, seed=1, ignore_eos=True)
LONGER_THAN_SILENCE_S = 6.0
"""A member that was silent for 4.5 s has its streams taken from it."""

Failure = Callable[[list[FarMember], FixedMembers, GatewayKeys], AbstractAsyncContextManager[list[FleetModel]]]
"""For as long as it lasts; other gateways that it brings along."""


async def answer(model: FleetModel, number: int) -> tuple[int, ...]:
    """One stream; what went wrong is no answer."""
    try:
        return tuple((await model.generate(f"{number} begins like no other", LONG)).answers[0].token_ids)
    except QuireError as error:
        say(f"  stream {number} was lost: {error}")
        return ()


async def answers(model: FleetModel) -> list[tuple[int, ...]]:
    """All streams."""
    return list(await asyncio.gather(*(answer(model, number) for number in range(NUM_STREAMS))))


@asynccontextmanager
async def link_down(
    members: list[FarMember], _source: FixedMembers, _keys: GatewayKeys
) -> AsyncIterator[list[FleetModel]]:
    """The wire to a member is pulled out."""
    run("ip", "link", "set", members[0].wire, "down")
    try:
        await asyncio.sleep(LONGER_THAN_SILENCE_S)
        yield []
    finally:
        run("ip", "link", "set", members[0].wire, "up")


def rules(*made: str) -> Failure:
    """Packets of the first member that are dropped; `@` is its wire."""

    @asynccontextmanager
    async def dropped(
        members: list[FarMember], _source: FixedMembers, _keys: GatewayKeys
    ) -> AsyncIterator[list[FleetModel]]:
        with dropping(*(one.replace("@", members[0].wire) for one in made)):
            await asyncio.sleep(LONGER_THAN_SILENCE_S)
            yield []

    return dropped


@asynccontextmanager
async def late_gateway(
    _members: list[FarMember], source: FixedMembers, keys: GatewayKeys
) -> AsyncIterator[list[FleetModel]]:
    """Another one, in the middle of everything."""
    async with FleetModel("late", source, keys) as late:
        yield [late]


LOSS = ("in iifname @ numgen random mod 100 < 2", "out oifname @ numgen random mod 100 < 2")
FAILURES: dict[str, Failure] = {
    "link_down": link_down,
    "one_way_to_us": rules("in iifname @ meta l4proto tcp"),
    "one_way_to_them": rules("out oifname @ meta l4proto tcp"),
    "half_open": rules("in iifname @", "out oifname @"),
    "events_cut": rules(f"in iifname @ tcp sport {{ {EVENTS_PORT}, {REPLAY_PORT} }}"),
    "late_gateway": late_gateway,
}


@section("network")
async def network(proof: Proof) -> None:
    """Each failure so many times; then 50 ms and lost packets for all the time."""
    member_keys, gateway_keys = make_keys(proof.folder / "keys of the network")
    keys, times = read_gateway_keys(gateway_keys), proof.sized(quick=1, full=10)
    num_wrong = dict[str, int]()
    with far_members(2, STEP_S, member_keys) as members:
        source = FixedMembers([one.address for one in members])
        async with FleetModel("far", source, keys) as model:
            await until(lambda: model.fleet.num_ready == 2)
            expected = await answers(model)
            for name, failure in FAILURES.items():
                num_wrong[name] = sum(
                    [await failed(model, failure, (members, source, keys), expected) for _ in range(times)]
                )
                say(f"  {name}: {num_wrong[name]} wrong, {model.fleet.counts.num_moved} moved so far")
            num_moved = model.fleet.counts.num_moved
    num_wrong["delay_and_loss"] = await delayed(member_keys, keys, times, expected)
    for name, count in num_wrong.items():
        proof.equals(f"netns_{name}", count, 0, f"of {times * NUM_STREAMS} streams")
    proof.equals("netns_failures", sum(num_wrong.values()), 0, "lost, doubled or wrong streams")
    proof.at_least("netns_moved", num_moved, 4 * times, "a failure that moves nothing would show nothing")


async def failed(
    model: FleetModel,
    failure: Failure,
    where: tuple[list[FarMember], FixedMembers, GatewayKeys],
    expected: list[tuple[int, ...]],
) -> int:
    """One run: streams that were lost, doubled or wrong."""
    asking = asyncio.create_task(answers(model))
    await until(lambda: model.fleet.num_open == NUM_STREAMS)
    await asyncio.sleep(50 * STEP_S)
    told = list[list[tuple[int, ...]]]()
    async with failure(*where) as others:
        told += [await answers(one) for one in others]
    told.append(await asking)
    await until(lambda: model.fleet.num_ready == 2)
    return sum(one != right for some in told for one, right in zip(some, expected, strict=True))


async def delayed(member_keys: Path, keys: GatewayKeys, times: int, expected: list[tuple[int, ...]]) -> int:
    """50 ms in each direction, two packets of a hundred lost."""
    with far_members(2, STEP_S, member_keys, is_slow=True) as members:
        loss = [one.replace("@", member.wire) for member in members for one in LOSS]
        async with FleetModel("slow", FixedMembers([one.address for one in members]), keys) as model:
            await until(lambda: model.fleet.num_ready == 2)
            with dropping(*loss):
                told = [one for _ in range(times) for one in await answers(model)]
    return sum(one != right for one, right in zip(told, expected * times, strict=True))
