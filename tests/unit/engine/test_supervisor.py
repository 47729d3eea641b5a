"""Real processes, real sockets: what happens to a worker's clients when it dies, hangs, lies or is left alone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from quire.config import ModelSettings
from quire.core.waiting_queue import QueueConfig
from quire.engine.answers import Completion
from quire.engine.async_engine import AsyncEngine
from quire.engine.faults import faults_from
from quire.engine.ledger import POISON
from quire.engine.parameters import SamplingParams
from quire.engine.served import ServedModel, plan_workers, split_memory
from quire.engine.supervisor import Limits, Supervisor
from quire.engine.worker_process import WorkerProcess
from quire.errors import ConfigError, DrainingError, EngineDeadError, QueueFullError, RequestTooLargeError
from tests.support.oracle_worker import ROOT, oracle_plan
from tests.support.served import served
from tests.support.talkers import talker

POISON_SEED = 666
LIMITS = Limits(stuck_s=0.5)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Bounded, and nothing may be left of it."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())
    assert children() == []


def children() -> list[str]:
    """Processes of ours that still run."""
    command = ["ps", "--ppid", str(os.getpid()), "-o", "args="]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if "oracle_worker" in line]


def params(seed: int, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, logprobs=1, n=1 + (seed == 3))


def undisturbed(count: int, max_tokens: int = 60) -> list[Completion]:
    async def ask() -> list[Completion]:
        async with AsyncEngine(talker()) as engine:
            return [await engine.generate(f"question {at}", params(at, max_tokens)) for at in range(count)]

    return asyncio.run(ask())


def fault(kind: str, after: int = 5) -> str:
    return json.dumps([{"kind": kind, "seed": POISON_SEED, "after": after}])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def ask_all(model: ServedModel, count: int, max_tokens: int = 60) -> list[Completion]:
    return await asyncio.gather(*(model.generate(f"question {at}", params(at, max_tokens)) for at in range(count)))


def same(ours: list[Completion], theirs: list[Completion]) -> bool:
    return [(one.answers, one.num_cached_tokens) for one in ours] == [
        (one.answers, one.num_cached_tokens) for one in theirs
    ]


def test_streams_go_on_with_the_next_token_when_the_worker_is_killed() -> None:
    alone = undisturbed(8, 300)

    async def killer(model: ServedModel) -> None:
        num_tokens = 0
        async for piece in model.stream("question 0", params(0, 300)):
            num_tokens += len(piece.token_ids)
            if num_tokens in (20, 60, 100):
                os.kill(model.supervisor.pid or 0, signal.SIGKILL)

    async def main() -> None:
        async with served() as model:
            asking = asyncio.create_task(ask_all(model, 8, 300))
            await killer(model)
            done = await asking
            assert [one.answers for one in done] == [one.answers for one in alone]
            assert (model.num_restarts, max(one.num_replays for one in done)) == (3, 3)

    run(main)


@pytest.mark.parametrize("kind", ["abort", "raise", "wrong_token", "missing_row", "garbage", "hang"])
def test_a_request_that_breaks_its_worker_is_ended_and_its_neighbours_are_not(kind: str) -> None:
    alone = undisturbed(5)

    async def main() -> None:
        async with served(faults=fault(kind), limits=LIMITS) as model:
            poison = asyncio.create_task(model.generate("poison", params(POISON_SEED)))
            healthy = await ask_all(model, 5)
            assert same(healthy, alone)
            end = (await poison).answers[0]
            assert (end.finish_reason, end.error) == ("error", POISON)
            assert model.num_restarts == 3

    run(main)


def test_a_row_that_fails_is_the_end_of_one_request_and_of_no_worker() -> None:
    alone = undisturbed(5)

    async def main() -> None:
        async with served(faults=fault("row")) as model:
            broken = asyncio.create_task(model.generate("spoilt", params(POISON_SEED)))
            assert same(await ask_all(model, 5), alone)
            assert (await broken).answers[0].error == "this row could not be computed"
            assert model.num_restarts == 0

    run(main)


def test_a_stuck_worker_is_not_ready_and_then_replaced() -> None:
    async def main() -> None:
        limits = Limits(stuck_s=1.0, beat_s=0.3)
        async with served(faults=fault("hold"), limits=limits) as model:
            asking = asyncio.create_task(model.generate("poison", params(POISON_SEED)))
            await until(lambda: not model.is_ready)
            assert model.num_restarts == 0
            await until(lambda: model.num_restarts > 0)
            await until(lambda: model.is_ready)
            assert (await asking).finish_reason == "error"

    run(main)


@pytest.mark.parametrize("command", [("false",), ("/no/such/program",)])
def test_a_worker_that_never_comes_to_life_is_an_error_and_not_a_loop(command: tuple[str, ...]) -> None:
    limits = Limits(max_fruitless=3, first_delay_s=0.0)

    async def main() -> None:
        failures: list[BaseException] = []
        plan = oracle_plan(5, limits=limits, command=command)
        supervisor = Supervisor(plan, lambda _events: None, failures.append)
        with pytest.raises(EngineDeadError, match="3 workers in a row brought nothing"):
            await supervisor.start()
        assert (supervisor.state.value, supervisor.num_restarts, len(failures)) == ("dead", 2, 1)
        await supervisor.close()

    run(main)


def test_a_setting_a_worker_refuses_is_an_error_at_once() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="must be a list of faults"):
            async with served(faults="no faults"):
                pass

    run(main)


def test_the_longer_lives_bring_nothing_the_longer_the_wait() -> None:
    limits = Limits(first_delay_s=0.25, max_delay_s=1.5)
    assert [limits.delay_s(count) for count in range(6)] == [0.0, 0.25, 0.5, 1.0, 1.5, 1.5]


def test_faults_are_refused_outside_tests() -> None:
    with pytest.raises(ConfigError, match="QUIRE_TESTING"):
        faults_from({"QUIRE_FAULTS": "[]"})
    with pytest.raises(ConfigError, match="must be one of"):
        faults_from({"QUIRE_FAULTS": '[{"kind": "sneeze"}]', "QUIRE_TESTING": "1"})
    assert faults_from({}) == []
    assert faults_from({"QUIRE_FAULTS": '[{"kind": "hang", "step": 3}]', "QUIRE_TESTING": "1"})[0].step == 3


def test_what_a_worker_refuses_is_refused_here_with_the_same_error() -> None:
    async def main() -> None:
        settings = ModelSettings(
            memory_bytes=64, block_size=4, max_step_tokens=40, max_running=2, max_sequence_tokens=96
        )
        async with served(settings, queue=QueueConfig(max_requests=10)) as model:
            with pytest.raises(RequestTooLargeError):
                await model.generate("x" * 400, params(1))
            asking = [asyncio.create_task(model.generate(f"q{at}", params(at, 30))) for at in range(30)]
            done = await asyncio.gather(*asking, return_exceptions=True)
            assert any(isinstance(one, QueueFullError) for one in done)
            assert sum(isinstance(one, Completion) for one in done) >= 5

    run(main)


def test_draining_lets_what_runs_finish_and_takes_nothing_new() -> None:
    async def main() -> None:
        async with served() as model:
            asking = asyncio.create_task(ask_all(model, 4))
            await until(lambda: model.num_open == 4)
            draining = asyncio.create_task(model.drain(20.0))
            await until(lambda: model.state == "draining")
            with pytest.raises(DrainingError):
                await model.generate("too late", params(1))
            assert await draining
            assert [one.finish_reason for one in await asking] == ["length"] * 4

    run(main)


def test_draining_has_a_bound_and_what_still_runs_is_told() -> None:
    async def main() -> None:
        async with served(faults=fault("hang"), limits=Limits(close_s=0.2)) as model:
            asking = asyncio.create_task(model.generate("poison", params(POISON_SEED)))
            await until(lambda: model.num_open == 1)
            assert not await model.drain(0.1)
        with pytest.raises(EngineDeadError):
            await asking

    run(main)


def test_clients_that_leave_while_there_is_no_worker_are_forgotten() -> None:
    async def main() -> None:
        async with served() as model:
            stream = model.stream("question", params(1, 400))
            await anext(stream)
            os.kill(model.supervisor.pid or 0, signal.SIGKILL)
            await until(lambda: model.state == "restarting")
            await stream.aclose()  # type: ignore[attr-defined]
            await until(lambda: model.supervisor.num_open == 0)
            await until(lambda: model.is_ready)
            assert (await model.generate("still there?", params(1, 5))).finish_reason == "length"

    run(main)


def test_a_parent_that_does_not_read_does_not_stall_the_loop() -> None:
    """Thousands of steps go by while nobody takes a message, and none of them is lost."""

    async def main() -> None:
        async with served() as model:
            hung = await model.ask(model.text.prompt("question"), params(1, 480))
            time.sleep(0.5)
            beat = model.supervisor.flight().beat_s
            assert time.monotonic() - beat < 0.4
            async for _ in hung:
                pass
            assert hung.completion().num_output_tokens == 480
            hung.close()

    run(main)


ENDS: dict[str, str] = {
    "returns": "pass",
    "raises": "raise SystemError('on purpose')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "is terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "leaves": "os._exit(3)",
}
PARENT = """
import asyncio, os, signal, sys
from tests.support.served import served
from quire import SamplingParams

async def main():
    async with served() as model:
        asking = asyncio.create_task(model.generate("question", SamplingParams(max_tokens=400, ignore_eos=True)))
        while model.supervisor.num_steps_forward < 10:
            await asyncio.sleep(0.001)
        print(model.supervisor.pid, flush=True)
        {end}

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_however_a_parent_ends_its_worker_ends_too_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT.replace("{end}", end)]
    parent = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    pid = int(parent.stdout)
    deadline_s = time.monotonic() + 5.0
    while _is_alive(pid):
        assert time.monotonic() < deadline_s, f"worker {pid} outlives a parent that {end}"
    assert list(tmp_path.iterdir()) == []


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_folder_too_deep_for_a_socket_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def main() -> None:
        with pytest.raises(ConfigError, match="TMPDIR"):
            WorkerProcess(4, [sys.executable], {})

    asyncio.run(main())


def test_memory_is_split_by_weights_and_then_evenly() -> None:
    assert split_memory(1_000, [100, 300]) == [400, 600]
    with pytest.raises(ConfigError, match="leave room"):
        split_memory(1_000, [500, 500])
    with pytest.raises(ConfigError, match="twice"):
        plan_workers(["a", "b", "a"])
