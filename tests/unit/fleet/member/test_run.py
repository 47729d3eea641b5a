"""A member from its start to its end, as `quire fleet member` runs it."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from quire.client.request.params import SamplingParams
from quire.config import ModelSettings, ServingSettings
from quire.errors import ConfigError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.kv_events.relay import MemberEndpoints
from quire.fleet.member.run import MemberPlan, plan_member, run_member
from tests.support.fleet.small_fleets import oracle_words
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import oracle_plan


def test_a_member_answers_tells_what_it_holds_and_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = MemberEndpoints(f"ipc://{tmp_path}/member").resolved()
    size = talker(template=TEMPLATE).text.vocabulary_size
    plan = MemberPlan("oracle", places, None, oracle_plan(size), oracle_words())

    async def run() -> None:
        ending, said = asyncio.Event(), list[str]()
        running = asyncio.create_task(run_member(plan, ending, 60.0, said.append))
        async with FleetModel("oracle", FixedMembers([places.listen]), None) as model:
            await model.generate("a question of some length", SamplingParams(max_tokens=8, ignore_eos=True))
            while not model.subscribers or not next(iter(model.subscribers.values())).reader.num_blocks:
                await asyncio.sleep(0.01)
        ending.set()
        assert await running
        assert [places.listen in said[1], places.events in said[2], places.replay in said[2]] == [True] * 3

    with tempfile.TemporaryDirectory() as short:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", short)
        asyncio.run(run())
        assert list(Path(short).iterdir()) == []


def test_a_member_takes_no_second_address_for_its_events() -> None:
    serving = ServingSettings(kv_events="tcp://*:5557")
    with pytest.raises(ConfigError) as refused:
        plan_member("nowhere", MemberEndpoints("tcp://127.0.0.1:*"), None, ModelSettings(), serving)
    assert refused.value.settings == ("kv_events",)


def test_an_address_for_events_that_cannot_be_had_is_said_to_be_so(tmp_path: Path) -> None:
    places = MemberEndpoints(f"ipc://{tmp_path}/member", f"ipc://{tmp_path}/no/such/folder").resolved()
    size = talker(template=TEMPLATE).text.vocabulary_size
    plan = MemberPlan("oracle", places, None, oracle_plan(size), oracle_words())
    with pytest.raises(ConfigError) as refused:
        asyncio.run(run_member(plan, asyncio.Event(), 1.0, lambda _line: None))
    assert refused.value.settings == ("events", "replay")
