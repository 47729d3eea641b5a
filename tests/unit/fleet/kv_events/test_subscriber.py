"""What a gateway believes of real members is what they hold, over real sockets, whatever is lost on the way."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from quire.client.request.params import SamplingParams
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.kv_events import subscriber as event_link
from quire.fleet.kv_events.reader import MissingRange
from quire.fleet.kv_events.relay import MemberEndpoints, with_member_host
from quire.fleet.kv_events.subscriber import KVEventSubscriber
from quire.fleet.protocol.keys import GatewayKeys, make_keys, read_gateway_keys, read_member_keys, secure_gateway
from quire.worker.child.kv_snapshot import POSITION, SNAPSHOT
from tests.support.fleet.small_fleets import (
    LOCAL,
    SmallMember,
    believed,
    small_fleet,
    small_member,
    truth_of,
    until_true,
)
from tests.support.machine.patience import PATIENCE_S
from tests.support.workers.oracle_worker import SETTINGS

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TIGHT = replace(SETTINGS, memory_bytes=48)
"""A member with so few blocks that prompts evict each other."""


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(within())


async def ask_many(model: FleetModel, first: int, num_prompts: int) -> None:
    prompts = [f"{at} begins and ends unlike all others: {at}" for at in range(first, first + num_prompts)]
    await asyncio.gather(*(model.generate(prompt, PARAMS) for prompt in prompts))


async def converse(model: FleetModel, name: str, num_turns: int) -> tuple[int, int]:
    """One conversation: the tokens that were cached, and the most that could have been."""
    text, num_cached, num_possible, before = f"the talk of {name} ", 0, 0, 0
    for turn in range(num_turns):
        done = await model.generate(text, PARAMS)
        num_cached += done.num_cached_tokens
        num_possible += before // SETTINGS.block_size * SETTINGS.block_size
        before = len(done.prompt_token_ids)
        text += f"and turn {turn} of {name} goes on for a while "
    return num_cached, num_possible


def test_after_conversations_the_index_is_what_the_members_hold_and_later_turns_are_reused() -> None:
    async def test() -> None:
        async with small_fleet(2) as (model, members):
            talks = await asyncio.gather(*(converse(model, f"person {at}", 5) for at in range(8)))
            num_cached, num_possible = map(sum, zip(*talks, strict=True))
            assert num_possible > 1000
            assert num_cached >= 0.95 * num_possible
            truth = await until_true(model, members)
            assert all(len(names) > 20 for names in truth)
            assert [link.num_malformed for link in model.subscribers.values()] == [0, 0]
            assert [link.reader.num_orphans for link in model.subscribers.values()] == [0, 0]

    run(test)


def test_evicted_and_cleared_blocks_leave_the_index() -> None:
    async def test() -> None:
        async with small_fleet(2, settings=TIGHT) as (model, members):
            await ask_many(model, 0, 24)
            truth = await until_true(model, members)
            assert 0 < max(map(len, truth)) <= 48
            model.clear_cache()
            while any([await truth_of(member) for member in members]):
                await asyncio.sleep(0.02)
            assert await until_true(model, members) == [set(), set()]

    run(test)


class Lossy:
    """Stands before a reader and loses some of what is published."""

    def __init__(self, model: FleetModel, loses: Callable[[int], bool]) -> None:
        self.num_lost = 0
        (self.link,) = model.subscribers.values()
        self._loses = loses
        self._hear = self.link.reader.receive_batch
        self.link.reader.receive_batch = self  # type: ignore[method-assign]

    def __call__(self, frames: Sequence[bytes]) -> None:
        if self._loses(int.from_bytes(frames[1], "big")):
            self.num_lost += 1
        else:
            self._hear(frames)


def test_lost_batches_are_replayed_and_the_last_one_too() -> None:
    async def test() -> None:
        async with small_fleet(1) as (model, members):
            await until_true(model, members)
            lossy = Lossy(model, lambda number: number % 3 != 1)
            while lossy.link.reader.missing is not MissingRange.NOTHING:  # until the first snapshot has come
                await asyncio.sleep(0.02)
            num_snapshots = lossy.link.num_snapshots
            await ask_many(model, 0, 8)
            await until_true(model, members)
            lossy._loses = lambda _number: True
            await ask_many(model, 8, 1)
            await until_true(model, members)
            assert lossy.num_lost > 5
            assert (lossy.link.num_snapshots, lossy.link.reader.num_replays_short) == (num_snapshots, 0)

    run(test)


def test_a_gap_longer_than_what_is_kept_ends_in_a_snapshot() -> None:
    async def test() -> None:
        async with small_fleet(1, num_kept_batches=2, settings=TIGHT) as (model, members):
            await until_true(model, members)
            lossy = Lossy(model, lambda _number: True)
            number = 0
            while not lossy.link.reader.num_replays_short:  # until more was lost between two questions than is kept
                await ask_many(model, number, 1)
                number += 1
            await until_true(model, members)
            assert lossy.link.num_snapshots > 1
            assert lossy.link.reader.num_replays_short > 0

    run(test)


def test_a_gateway_that_comes_late_hears_all_that_is_there() -> None:
    async def test() -> None:
        async with small_fleet(2, num_kept_batches=1, settings=TIGHT) as (model, members):
            await ask_many(model, 0, 24)
            truth = await until_true(model, members)
            async with FleetModel("oracle", FixedMembers([member.address for member in members]), None) as late:
                assert await until_true(late, members) == truth
                await ask_many(late, 0, 4)
                await until_true(late, members)
                await until_true(model, members)

    run(test)


def test_a_question_that_was_lost_is_asked_again_once_the_member_has_passed_it_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, send = list[bytes](), KVEventSubscriber._send

    def losing(link: KVEventSubscriber, question: bytes) -> bool:
        if question == SNAPSHOT and len(lost) < 2:
            lost.append(question)
            return True
        return send(link, question)

    async def test() -> None:
        async with small_fleet(2) as (model, members):
            await ask_many(model, 0, 8)
            monkeypatch.setattr(event_link, "PATIENCE_S", 1e9)  # by time alone it would never be
            monkeypatch.setattr(KVEventSubscriber, "_send", losing)
            source = FixedMembers([member.address for member in members])
            async with FleetModel("oracle", source, None) as late:
                await until_true(late, members)
                assert len(lost) == 2

    run(test)


def test_of_a_member_that_was_started_again_nothing_of_its_former_life_is_believed() -> None:
    async def test() -> None:
        async with small_fleet(1) as (model, members):
            await ask_many(model, 0, 4)
            (former,) = await until_true(model, members)
            await members[0].kill()
            while model.fleet.num_ready:
                await asyncio.sleep(0.01)
            assert model.subscribers == {}
            assert believed(model, members) == [set()]
            async with small_member(address=members[0].address) as second:
                while not model.fleet.num_ready:
                    await asyncio.sleep(0.01)
                assert await until_true(model, [second]) == [set()]
                await ask_many(model, 100, 2)
                (now,) = await until_true(model, [second])
                assert now
                assert not now & former

    run(test)


def test_of_a_worker_that_was_replaced_inside_its_member_nothing_is_believed() -> None:
    async def test() -> None:
        async with small_fleet(1) as (model, members):
            await ask_many(model, 0, 4)
            await until_true(model, members)
            (link,) = model.subscribers.values()
            pid = members[0].supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while members[0].supervisor.pid == pid or not members[0].supervisor.is_ready:
                await asyncio.sleep(0.01)
            assert await until_true(model, members) == [set()]
            if link in model.subscribers.values():
                assert link.reader.num_incarnations == 1

    run(test)


async def hears_nothing(member: SmallMember, keys: GatewayKeys | None, news: Coroutine[Any, Any, None]) -> None:
    """Neither what is published nor an answer to any question, while others hear."""
    context = zmq.asyncio.Context()
    heard, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        for socket, address in ((heard, member.relay.events), (asking, member.relay.replay)):
            secure_gateway(socket, keys)
            socket.connect(address)
        heard.subscribe(b"")
        for question in (bytes(8), SNAPSHOT, POSITION, b"anything"):
            await asking.send_multipart([b"", question])
        await news
        for socket in (heard, asking):
            assert not await socket.poll(500)
    finally:
        context.destroy(linger=0)


def test_without_the_right_key_nobody_hears_what_a_member_holds(tmp_path: Path) -> None:
    member_file, gateway_file = make_keys(tmp_path / "right")
    _, strange_file = make_keys(tmp_path / "strange")
    right, strange = read_gateway_keys(gateway_file), read_gateway_keys(strange_file)
    forged = replace(strange, member=right.member)

    async def test() -> None:
        keys = read_member_keys(member_file)
        async with small_fleet(1, member_keys=keys, gateway_keys=right) as (model, members):
            await ask_many(model, 0, 4)
            (held,) = await until_true(model, members)
            assert held
            for at, wrong in enumerate((None, strange, forged)):
                await hears_nothing(members[0], wrong, ask_many(model, 10 + at, 1))
            await until_true(model, members)

    run(test)


def test_questions_that_are_none_and_long_ones_harm_nobody() -> None:
    async def test() -> None:
        async with small_fleet(1) as (model, members):
            context = zmq.asyncio.Context()
            asking = context.socket(zmq.DEALER)
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(members[0].relay.replay)
            for frames in ([b""], [b"", b"x" * 9], [b"", b"x" * 100_000], [b"", b"", bytes(8)], [b"", b"\xff" * 8]):
                await asking.send_multipart(frames)
            await ask_many(model, 0, 2)
            await until_true(model, members)
            context.destroy(linger=0)

    run(test)


def test_places_that_are_not_given_lie_beside_where_a_member_listens() -> None:
    assert MemberEndpoints("tcp://10.0.0.5:7000").resolved() == MemberEndpoints(
        "tcp://10.0.0.5:7000", "tcp://10.0.0.5:*", "tcp://10.0.0.5:*"
    )
    assert MemberEndpoints("ipc:///run/one").resolved().replay == "ipc:///run/one.replay"
    given = MemberEndpoints(LOCAL, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    assert given.resolved() == given


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        ("tcp://0.0.0.0:41", "tcp://10.0.0.5:41"),
        ("tcp://[::]:41", "tcp://10.0.0.5:41"),
        ("tcp://10.1.0.1:41", "tcp://10.1.0.1:41"),
        ("ipc:///run/one", "ipc:///run/one"),
        ("", ""),
    ],
)
def test_a_member_that_listens_everywhere_is_where_it_was_found(told: str, seen: str) -> None:
    assert with_member_host(told, "tcp://10.0.0.5:7000") == seen
