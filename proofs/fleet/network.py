"""Network failures between a gateway and its members, each during running streams.

Each run: eight streams on two members, a failure, its end, and a comparison with the tokens of an undisturbed network.
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
"""The gateway moves the streams of a member after 4.5 s without a heartbeat."""

Failure = Callable[[list[FarMember], FixedMembers, GatewayKeys], AbstractAsyncContextManager[list[FleetModel]]]
"""A context in which the network fails; it yields additional gateways whose answers are checked too."""


async def run_stream(model: FleetModel, number: int) -> tuple[int, ...]:
    """Return the tokens of one stream, or nothing if it failed."""
    try:
        return tuple((await model.generate(f"{number} begins like no other", LONG)).answers[0].token_ids)
    except QuireError as error:
        say(f"  stream {number} was lost: {error}")
        return ()


async def run_streams(model: FleetModel) -> list[tuple[int, ...]]:
    """All streams."""
    return list(await asyncio.gather(*(run_stream(model, number) for number in range(NUM_STREAMS))))


@asynccontextmanager
async def link_down(
    members: list[FarMember], _source: FixedMembers, _keys: GatewayKeys
) -> AsyncIterator[list[FleetModel]]:
    """The link to a member is down."""
    run("ip", "link", "set", members[0].wire, "down")
    try:
        await asyncio.sleep(LONGER_THAN_SILENCE_S)
        yield []
    finally:
        run("ip", "link", "set", members[0].wire, "up")


def drop_rules(*patterns: str) -> Failure:
    """Return a failure that drops packets of the first member; `@` in a rule is its device."""

    @asynccontextmanager
    async def drop(
        members: list[FarMember], _source: FixedMembers, _keys: GatewayKeys
    ) -> AsyncIterator[list[FleetModel]]:
        with dropping(*(pattern.replace("@", members[0].wire) for pattern in patterns)):
            await asyncio.sleep(LONGER_THAN_SILENCE_S)
            yield []

    return drop


@asynccontextmanager
async def late_gateway(
    _members: list[FarMember], source: FixedMembers, keys: GatewayKeys
) -> AsyncIterator[list[FleetModel]]:
    """Another gateway starts while streams run."""
    async with FleetModel("late", source, keys) as late:
        yield [late]


LOSS = ("in iifname @ numgen random mod 100 < 2", "out oifname @ numgen random mod 100 < 2")
FAILURES: dict[str, Failure] = {
    "link_down": link_down,
    "one_way_to_us": drop_rules("in iifname @ meta l4proto tcp"),
    "one_way_to_them": drop_rules("out oifname @ meta l4proto tcp"),
    "half_open": drop_rules("in iifname @", "out oifname @"),
    "events_cut": drop_rules(f"in iifname @ tcp sport {{ {EVENTS_PORT}, {REPLAY_PORT} }}"),
    "late_gateway": late_gateway,
}


@section("network")
async def network(proof: Proof) -> None:
    """Each failure several times; then a run with 50 ms of delay and packet loss throughout."""
    member_keys, gateway_keys = make_keys(proof.folder / "keys of the network")
    keys, times = read_gateway_keys(gateway_keys), proof.sized(quick=1, full=10)
    num_wrong = dict[str, int]()
    with far_members(2, STEP_S, member_keys) as members:
        source = FixedMembers([one.address for one in members])
        async with FleetModel("far", source, keys) as model:
            await until(lambda: model.fleet.num_ready == 2)
            expected = await run_streams(model)
            for name, failure in FAILURES.items():
                num_wrong[name] = sum(
                    [await num_failed(model, failure, (members, source, keys), expected) for _ in range(times)]
                )
                say(f"  {name}: {num_wrong[name]} wrong, {model.fleet.counts.num_moved} moved so far")
            num_moved = model.fleet.counts.num_moved
    num_wrong["delay_and_loss"] = await num_failed_slow(member_keys, keys, times, expected)
    for name, count in num_wrong.items():
        proof.equals(f"netns_{name}", count, 0, f"of {times * NUM_STREAMS} streams")
    proof.equals("netns_failures", sum(num_wrong.values()), 0, "lost, doubled or wrong streams")
    proof.at_least("netns_moved", num_moved, 4 * times, "otherwise the failures had no effect")


async def num_failed(
    model: FleetModel,
    failure: Failure,
    arguments: tuple[list[FarMember], FixedMembers, GatewayKeys],
    expected: list[tuple[int, ...]],
) -> int:
    """Run one failure; count streams that were lost, doubled or wrong."""
    task = asyncio.create_task(run_streams(model))
    await until(lambda: model.fleet.num_open == NUM_STREAMS)
    await asyncio.sleep(50 * STEP_S)
    results = list[list[tuple[int, ...]]]()
    async with failure(*arguments) as gateways:
        results += [await run_streams(gateway) for gateway in gateways]
    results.append(await task)
    await until(lambda: model.fleet.num_ready == 2)
    return sum(a != b for tokens in results for a, b in zip(tokens, expected, strict=True))


async def num_failed_slow(member_keys: Path, keys: GatewayKeys, times: int, expected: list[tuple[int, ...]]) -> int:
    """Run with 50 ms of delay in each direction and 2% packet loss."""
    with far_members(2, STEP_S, member_keys, is_slow=True) as members:
        loss = [one.replace("@", member.wire) for member in members for one in LOSS]
        async with FleetModel("slow", FixedMembers([one.address for one in members]), keys) as model:
            await until(lambda: model.fleet.num_ready == 2)
            with dropping(*loss):
                results = [one for _ in range(times) for one in await run_streams(model)]
    return sum(a != b for a, b in zip(results, expected * times, strict=True))
