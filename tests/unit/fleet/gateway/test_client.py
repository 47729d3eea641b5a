"""A gateway and its members: the same answers as from one server, whatever becomes of the members."""

import asyncio
from pathlib import Path

from quire.client.engines.served import ServedModel, Serving
from quire.client.request.params import SamplingParams
from quire.errors import ConfigError
from quire.fleet.gateway.client import FleetModel, text_of
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.protocol.keys import make_keys, read_gateway_keys, read_member_keys
from tests.support.errors import raises_code
from tests.support.fleet.small_fleets import oracle_words, small_fleet, small_member
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import SETTINGS, oracle_plan

ASKED = [
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.7, seed=3, n=3, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.1, seed=5, presence_penalty=0.5, ignore_eos=True),
]


def prompts() -> list[str]:
    return [f"number {at} has nothing in common with the others but its end" for at in range(8)]


async def alone() -> list[list[tuple[int, ...]]]:
    """What one server answers."""
    size = talker(template=TEMPLATE).text.vocabulary_size
    plan = oracle_plan(size, SETTINGS)
    async with ServedModel(lambda: Serving(plan, lambda ready: text_of("oracle", ready.info, oracle_words()))) as model:
        return await answers(model)


async def answers(model: ServedModel | FleetModel) -> list[list[tuple[int, ...]]]:
    asking = [model.generate(prompt, ASKED[at % len(ASKED)]) for at, prompt in enumerate(prompts())]
    return [[tuple(answer.token_ids) for answer in one.answers] for one in await asyncio.gather(*asking)]


def test_two_members_answer_as_one_server_does_and_both_are_used() -> None:
    async def run() -> None:
        expected = await alone()
        async with small_fleet(2) as (model, members):
            assert await answers(model) == expected
            assert all(member.supervisor.ledger.num_progress for member in members)

    asyncio.run(run())


def test_a_stream_goes_on_elsewhere_when_its_member_is_killed() -> None:
    async def run() -> None:
        expected = await alone()
        async with small_fleet(2, step_s=0.02) as (model, members):
            asking = asyncio.create_task(answers(model))
            while not all(member.supervisor.ledger.num_progress > 8 for member in members):
                await asyncio.sleep(0.01)
            await members[0].kill()
            assert await asking == expected
            assert model.fleet.counts.num_moved > 0
            assert model.fleet.counts.num_moved_inexact == 0
            assert model.fleet.num_open == 0

    asyncio.run(run())


def test_a_member_that_comes_later_takes_over_what_nobody_else_can() -> None:
    async def run() -> None:
        async with small_member(step_s=0.02) as first:
            source = FixedMembers([first.address, "ipc:///tmp/quire-nobody-is-there"])
            async with FleetModel("oracle", source, None) as model:
                asking = asyncio.create_task(model.generate("once", ASKED[0]))
                while not first.supervisor.ledger.num_progress:
                    await asyncio.sleep(0.01)
                await first.kill()
                while model.fleet.num_ready:
                    await asyncio.sleep(0.01)
                async with small_member(address=first.address):
                    done = await asking
                    assert len(done.answers[0].token_ids) == 40

    asyncio.run(run())


def test_with_keys_the_right_gateway_is_let_in_and_others_never_hear_a_word(tmp_path: Path) -> None:
    member_file, gateway_file = make_keys(tmp_path / "right")
    _, strange_file = make_keys(tmp_path / "strange")
    keys, right, strange = (
        read_member_keys(member_file),
        read_gateway_keys(gateway_file),
        read_gateway_keys(strange_file),
    )

    async def run() -> None:
        async with small_fleet(1, member_keys=keys, gateway_keys=right) as (model, members):
            assert len((await model.generate("once", ASKED[0])).answers[0].token_ids) == 40
            for wrong in (strange, None):
                stranger = FleetModel("oracle", FixedMembers([members[0].address]), wrong)
                entering = asyncio.create_task(stranger.__aenter__())
                for _ in range(3):
                    await asyncio.wait({entering}, timeout=0.2)
                assert not entering.done()
                assert not any(link.is_open for link in stranger.links.values())
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)

    asyncio.run(run())


def test_without_keys_no_address_beyond_this_machine_is_taken() -> None:
    async def run() -> None:
        with raises_code(ConfigError, "fleet_keys_missing"):
            async with small_member(address="tcp://192.0.2.1:7000"):
                pass

    asyncio.run(run())


def test_keys_are_readable_by_their_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    for file in make_keys(tmp_path):
        assert file.stat().st_mode & 0o777 == 0o600
    with raises_code(ConfigError, "keys_exist"):
        make_keys(tmp_path)


def test_a_gateway_tells_who_its_members_are_and_how_many_gateways_they_hear() -> None:
    async def run() -> None:
        async with small_fleet(2) as (model, members):
            told = model.fleet_stats()
            assert {one.address for one in told.members} == {member.address for member in members}
            assert {(one.state, one.exactness, one.num_requests) for one in told.members} == {("ready", "same", 0)}
            assert (told.num_moved, told.num_held, told.num_gateways) == (0, 0, 1)
            source = FixedMembers([member.address for member in members])
            async with FleetModel("oracle", source, None) as other:
                while not model.num_gateways == other.num_gateways == 2:
                    await asyncio.sleep(0.02)
            while model.num_gateways != 1:
                await asyncio.sleep(0.02)

    asyncio.run(run())
