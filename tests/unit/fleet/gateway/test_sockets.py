"""Gateways and members over real sockets: cut wires, hung and leaving members, two gateways, and liars."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from quire.client.engines.served import ServedModel, Serving
from quire.client.request.params import Grammar, SamplingParams
from quire.core.events import Queued, RequestEvent
from quire.errors import EngineDeadError
from quire.fleet.gateway.client import FleetModel, text_of
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.gateway.member_link import MemberLink
from quire.fleet.protocol import link as protocol_link
from quire.fleet.protocol.link import CONNECTION_LOST, LinkListener
from quire.fleet.protocol.messages import (
    PART_EVENTS,
    PROTOCOL,
    Hello,
    MemberReport,
    MemberStepped,
    Welcome,
    bounded_parts,
    decode_to_member,
    encode_fleet_message,
)
from quire.worker.messages import WorkerLoad
from tests.support.fleet.oracle_member import member_process
from tests.support.fleet.small_fleets import oracle_words, small_fleet, small_member
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.breakable_wires import wire_to
from tests.support.workers.oracle_worker import SETTINGS, oracle_plan

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
ASKED = [
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=30, temperature=0.7, seed=3, n=3, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.1, seed=5, presence_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(max_tokens=200, temperature=1.0, seed=6, stop=["e", "zz"], n=2, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=1.0, seed=8, grammar=Grammar.regex("[a-f]{30,50}")),
]
LONG = SamplingParams(max_tokens=200, temperature=0.9, seed=1, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    """It must come true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def alone(ask: Callable[[ServedModel], object]) -> object:
    """What one server answers."""
    plan = oracle_plan(talker(template=TEMPLATE).text.vocabulary_size, SETTINGS)
    async with ServedModel(lambda: Serving(plan, lambda ready: text_of("oracle", ready.info, oracle_words()))) as model:
        return await ask(model)  # type: ignore[misc]


async def everything(model: ServedModel | FleetModel) -> list[object]:
    """All that clients see of all kinds of answers."""
    asking = [model.generate(f"number {at}, and what follows", params) for at, params in enumerate(ASKED)]
    calling = model.chat(
        [{"role": "user", "content": "call it"}],
        SamplingParams(max_tokens=80, temperature=1.0, seed=9),
        tools=TOOLS,
        tool_choice="required",
    )
    seen = list[object]()
    for done in await asyncio.gather(*asking, calling):
        for one in done.answers:
            calls = [(call.name, call.arguments) for call in one.tool_calls]
            seen.append((one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs, calls))
        seen.append((done.prompt_token_ids, done.prompt_logprobs))
    return seen


async def answer(model: ServedModel | FleetModel, number: int = 0) -> object:
    return (await model.generate(f"{number} is how it begins", LONG)).answers[0].token_ids


async def eight(model: ServedModel | FleetModel) -> list[object]:
    """Prompts that have nothing in common go to all members."""
    return list(await asyncio.gather(*(answer(model, number) for number in range(8))))


def test_all_kinds_of_answers_survive_the_death_of_their_member() -> None:
    async def run() -> None:
        expected = await alone(everything)
        async with small_fleet(2, step_s=0.03) as (model, members):
            asking = asyncio.create_task(everything(model))
            await until(lambda: all(member.supervisor.ledger.num_progress > 20 for member in members))
            await members[0].kill()
            assert await asking == expected
            assert model.fleet.counts.num_moved > 0
            assert model.fleet.num_open == 0

    asyncio.run(run())


def test_a_member_that_nobody_has_met_is_no_trouble_before_it_could_have_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Counted(MemberLink):
        num_tries = 0

        async def _run_session(self) -> bool:
            is_fine = await super()._run_session()
            self.num_tries += 1
            return is_fine

    async def run() -> None:
        with zmq.asyncio.Context() as context:
            nobody = LinkListener(lambda *_told: None, lambda *_told: None)
            link = Counted(context, f"ipc://{tmp_path / 'nobody'}", None, "gateway", nobody)
            monkeypatch.setattr(protocol_link, "LOADING_S", inf)
            link.start()
            await until(lambda: link.num_tries >= 2)
            assert link.problem == CONNECTION_LOST
            assert caplog.messages == []
            monkeypatch.setattr(protocol_link, "LOADING_S", 0.0)
            await until(lambda: bool(caplog.messages))
            await link.close()
        assert caplog.messages == [f"cannot reach member {link.address}: {CONNECTION_LOST}"]

    asyncio.run(run())


def test_a_gateway_that_ends_in_good_order_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with small_fleet(2) as (model, _members):
            await answer(model)

    caplog.set_level(logging.INFO)
    asyncio.run(run())
    assert sum("the gateway closed the link" in message for message in caplog.messages) == 2
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("way", ["cut", "freeze"])
def test_a_stream_goes_on_when_the_wire_to_its_only_member_is_mended(way: str) -> None:
    async def run() -> None:
        expected = await alone(answer)
        async with (
            small_member(step_s=0.01) as member,
            wire_to(member.address) as (wire, address),
            FleetModel("oracle", FixedMembers([address]), None, suspect_after_s=1.6) as model,
        ):
            asking = asyncio.create_task(answer(model))
            await until(lambda: member.supervisor.ledger.num_progress > 20)
            wire.cut() if way == "cut" else wire.freeze()
            await until(lambda: model.fleet.num_ready == 0)
            assert model.fleet.num_held == 1
            wire.mend()
            assert await asking == expected
            assert model.fleet.counts.num_moved == 1
            await until(lambda: member.supervisor.num_open == 0)

    asyncio.run(run())


def test_streams_leave_a_member_that_hangs_and_it_comes_back() -> None:
    async def run() -> None:
        expected = await alone(eight)
        with member_process(step_s=0.02) as hung:
            async with small_member(step_s=0.005) as other:
                source = FixedMembers([hung.address, other.address])
                async with FleetModel("oracle", source, None, suspect_after_s=1.6) as model:
                    await until(lambda: model.fleet.num_ready == 2)
                    asking = [asyncio.create_task(answer(model, number)) for number in range(8)]
                    await until(lambda: model.fleet.router.membership.num_open(hung.address) > 0)
                    await until(lambda: other.supervisor.ledger.num_progress > 20)
                    hung.send_signal(signal.SIGSTOP)
                    assert [await one for one in asking] == expected
                    assert model.fleet.counts.num_moved > 0
                    hung.send_signal(signal.SIGCONT)
                    await until(lambda: model.fleet.num_ready == 2)
                    assert await eight(model) == expected

    asyncio.run(run())


def test_a_member_that_is_told_to_end_finishes_what_it_has_and_no_client_notices() -> None:
    async def run() -> int:
        expected = await alone(eight)
        with member_process(step_s=0.01) as leaving:
            async with small_member(step_s=0.005) as other:
                source = FixedMembers([leaving.address, other.address])
                async with FleetModel("oracle", source, None) as model:
                    await until(lambda: model.fleet.num_ready == 2)
                    asking = [asyncio.create_task(answer(model, number)) for number in range(4)]
                    await until(lambda: model.fleet.router.membership.num_open(leaving.address) > 0)
                    leaving.send_signal(signal.SIGTERM)
                    await until(lambda: model.fleet.num_ready == 1)
                    asking += [asyncio.create_task(answer(model, number)) for number in range(4, 8)]
                    assert [await one for one in asking] == expected
                    assert model.fleet.counts.num_moved == 0
                    return await asyncio.to_thread(leaving.process.wait)

    assert asyncio.run(run()) == 0


def test_a_gateway_that_goes_ends_its_requests_and_not_those_of_another() -> None:
    async def run() -> None:
        expected = await alone(answer)
        async with small_member(step_s=0.01) as member:
            source = FixedMembers([member.address])
            async with FleetModel("oracle", source, None) as stays:
                asking = asyncio.create_task(answer(stays))
                async with FleetModel("oracle", source, None) as goes:
                    gone = asyncio.create_task(answer(goes))
                    await until(lambda: member.supervisor.num_open == 2)
                with pytest.raises(EngineDeadError):
                    await gone
                await until(lambda: member.supervisor.num_open == 1)
                assert await asking == expected

    asyncio.run(run())


def test_a_member_that_lies_is_tried_later_and_later() -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        liar = context.socket(zmq.ROUTER)
        liar.bind("tcp://127.0.0.1:*")
        address = bytes(liar.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        hellos: list[float] = []

        async with small_member() as honest:

            async def lie() -> None:
                assert honest.server.service is not None
                card = honest.server.service._card
                while True:
                    identity, data = await liar.recv_multipart()
                    if isinstance(decode_to_member(data), Hello):
                        hellos.append(asyncio.get_running_loop().time())
                        await liar.send_multipart([identity, encode_fleet_message(Welcome(PROTOCOL, card))])
                        await liar.send_multipart([identity, b"\xc1 is no message"])

            lying = asyncio.create_task(lie())
            async with FleetModel("oracle", FixedMembers([address, honest.address]), None) as model:
                await until(lambda: len(hellos) == 4)
                waits_s = [after - before for before, after in pairwise(hellos)]
                assert [wait_s >= least_s for wait_s, least_s in zip(waits_s, (0.2, 0.4, 0.8), strict=True)] == [
                    True
                ] * 3
                await until(lambda: model.fleet.members.keys() == {honest.address})
                assert "malformed message" in model.links[address].problem
            lying.cancel()
            await asyncio.gather(lying, return_exceptions=True)
        context.destroy(linger=0)

    asyncio.run(run())


def test_nothing_is_left_open_when_a_gateway_and_its_members_have_ended() -> None:
    async def run() -> int:
        async with small_fleet(2) as (model, _members):
            await model.generate("once", ASKED[0])
        async with FleetModelOfNobody() as link_tasks:
            return link_tasks

    before = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(run()) == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 2


class FleetModelOfNobody:
    """A gateway whose only member is at an address that is none: it is tried in vain, and leaves nothing."""

    async def __aenter__(self) -> int:
        model = FleetModel("oracle", FixedMembers(["tcp://127.0.0.1:99999", "ipc:///nowhere/at/all"]), None)
        entering = asyncio.create_task(model.__aenter__())
        await until(lambda: len(model.links) == 2 and all("tried" not in one.problem for one in model.links.values()))
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        return sum("quire" in task.get_name() for task in asyncio.all_tasks())

    async def __aexit__(self, *_error: object) -> None:
        pass


def test_a_step_of_many_events_is_heard_in_parts_and_its_report_comes_last() -> None:
    events = tuple[RequestEvent, ...](Queued(str(at), epoch=1) for at in range(2 * PART_EVENTS + 1))
    report = MemberReport(WorkerLoad(), 0, 0)
    parts = list(bounded_parts(MemberStepped(events, report)))
    assert all(isinstance(one, MemberStepped) for one in parts)
    stepped = [one for one in parts if isinstance(one, MemberStepped)]
    assert [len(one.events) for one in stepped] == [PART_EVENTS, PART_EVENTS, 1]
    assert [event for one in stepped for event in one.events] == [*events]
    assert [one.report for one in stepped] == [None, None, report]
    assert list(bounded_parts(MemberStepped((), report))) == [MemberStepped((), report)]
