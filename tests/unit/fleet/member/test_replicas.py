"""Several members on this machine: child processes that are replaced when they die, and never outlive their parent."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable

import msgspec
import pytest

from quire.client.request.params import SamplingParams
from quire.config import ModelSettings, ServingSettings
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.errors import ConfigError, EngineDeadError
from quire.fleet.member.replicas import Replicas, ReplicaSpec, replica_spec, replicated_model, settings_of_replica
from quire.worker.messages import Open
from tests.support.errors import raises_code
from tests.support.fleet.oracle_replica import COMMAND
from tests.support.fleet.small_fleets import oracle_words
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import ROOT, SETTINGS

LONG = SamplingParams(max_tokens=150, temperature=0.8, seed=3, ignore_eos=True)


def order(model: str | None = None) -> ReplicaSpec:
    size = talker(template=TEMPLATE).text.vocabulary_size
    opened = Open(model or str(size), SETTINGS, QueueConfig(), bytes(32))
    return ReplicaSpec("oracle", "", opened, oracle_words(), 30.0, 30.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


def is_there(pid: int) -> bool:
    """Whether the process lives; one that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_replicas_answer_alike_survive_the_death_of_one_and_end_with_their_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Replicas] = []
    really = Replicas.__aenter__

    async def entered(replicas: Replicas) -> Replicas:
        made.append(replicas)
        return await really(replicas)

    monkeypatch.setattr(Replicas, "__aenter__", entered)

    async def run() -> list[int]:
        async with replicated_model("oracle", order(), 2, 64, COMMAND) as model:
            (replicas,) = made
            expected = [(await model.generate(f"{at} begins", LONG)).answers[0].token_ids for at in range(4)]
            pids = [*replicas.pids.values()]
            asking = [asyncio.create_task(model.generate(f"{at} begins", LONG)) for at in range(4)]
            membership = model.fleet.router.membership
            await until(lambda: all(membership.num_open(one) for one in replicas.addresses))
            os.kill(pids[0], signal.SIGKILL)
            assert [(await one).answers[0].token_ids for one in asking] == expected
            assert model.fleet.counts.num_moved > 0
            await until(lambda: model.fleet.num_ready == 2)
            pids += [*replicas.pids.values()]
            assert len(set(pids)) == 3
        return pids

    assert not any(is_there(pid) for pid in asyncio.run(run()))


def test_a_member_that_cannot_load_is_told_at_once() -> None:
    async def run() -> None:
        with raises_code(EngineDeadError, "engine_dead"):
            async with replicated_model("oracle", order("no number"), 2, 64, COMMAND):
                pass

    asyncio.run(run())


def test_a_member_whose_parent_is_gone_ends() -> None:
    asked = msgspec.msgpack.encode(msgspec.structs.replace(order(), address="tcp://127.0.0.1:*"))
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(len(asked).to_bytes(8, "big") + asked)
        process.stdin.flush()
        assert any(b"member at" in line for line in process.stderr)
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_each_has_its_part_of_the_machine() -> None:
    settings = settings_of_replica(ModelSettings(memory_bytes=8 << 30, num_threads=5), 2)
    assert (settings.memory_bytes, settings.num_threads) == (4 << 30, 2)
    assert settings_of_replica(ModelSettings(num_threads=1), 4).num_threads == 1
    both = [settings_of_replica(ModelSettings(), number).memory_bytes or 0 for number in (1, 2)]
    assert both[1] == pytest.approx(both[0] / 2, rel=0.1)
    with pytest.raises(ConfigError) as refused:
        settings_of_replica(ModelSettings(), 0)
    assert refused.value.settings == ("replicas",)


def test_what_is_announced_at_one_address_cannot_be_of_several() -> None:
    with pytest.raises(ConfigError) as refused:
        replica_spec("model", 2, ModelSettings(), ServingSettings(kv_events="tcp://127.0.0.1:1"), 1.0)
    assert refused.value.settings == ("kv_events",)
