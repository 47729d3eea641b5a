"""Real processes, real sockets: what happens to a worker's clients when it dies, hangs, lies or is left alone."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.served import ServedModel
from quire.client.reply.outputs import Completion
from quire.client.request.params import SamplingParams
from quire.config import ModelSettings
from quire.core.events import Refused, RequestEvent
from quire.core.request import Request
from quire.core.scheduling.shares import MIN_RESERVED
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import ROW_FAILED, StepPlan, WorkItem
from quire.engine.engine import ModelIdentity
from quire.errors import (
    ConfigError,
    DisplacedError,
    DrainingError,
    EngineDeadError,
    InvalidParameterError,
    QueueFullError,
    RequestTooLargeError,
)
from quire.worker.child.faults import Fault, FaultyRunner, faults_from
from quire.worker.parent import spawned_worker
from quire.worker.parent import supervisor as supervisor_module
from quire.worker.parent.ledger import QUARANTINED
from quire.worker.parent.spawned_worker import _lock, _sweep
from quire.worker.parent.supervisor import LATE_S, Supervisor
from quire.worker.parent.worker_plan import Limits
from tests.support.errors import raises_code
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.served import served
from tests.support.servers.talkers import talker
from tests.support.workers.oracle_worker import SETTINGS, oracle_plan
from tests.support.workers.parents import end_a_parent, left_of

POISON_SEED = 666
NUM_TOKENS_BEFORE = 5
"""Tokens that a request of this seed brings before it does harm."""
PATIENT = Limits(stuck_s=600.0)
"""A busy machine must not make a healthy worker look stuck."""
HUNG = Limits(stuck_s=2.0)
"""Where one does hang: long beside a healthy step, however busy the machine."""


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Bounded, and nothing may be left of it."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
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


def fault(kind: str, after: int = NUM_TOKENS_BEFORE) -> str:
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
        num_tokens, due = 0, [10, 30, 50]
        async for piece in model.stream("question 0", params(0, 300)):
            num_tokens += len(piece.token_ids)
            if due and num_tokens >= due[0] and model.is_ready:
                due.pop(0)
                os.kill(model.supervisor.pid or 0, signal.SIGKILL)

    async def main() -> None:
        async with served(step_s=0.01) as model:  # else a worker is done before a busy parent has read the first
            asking = asyncio.create_task(ask_all(model, 8, 300))
            await killer(model)
            done = await asking
            assert [one.answers for one in done] == [one.answers for one in alone]
            assert (model.supervisor.num_restarts, max(one.num_replays for one in done)) == (3, 3)

    run(main)


def test_an_answer_that_has_ended_alone_stays_so_when_the_worker_is_killed() -> None:
    several = SamplingParams(n=4, max_tokens=200, seed=5, ignore_eos=True)

    async def main() -> None:
        async with served(step_s=0.003) as model:
            whole = await model.generate("question", several)
            stopped = replace(several, stop=(whole.answers[1].text[8:11],))
            alone = await model.generate("question", stopped)
            assert {one.finish_reason for one in alone.answers} == {"stop", "length"}
            asked = model.submit_ids(await model.prompt_ids("question"), stopped)
            (entry,) = model.supervisor.ledger.entries.values()
            async for piece in asked:
                if piece.finish_reason is not None and not model.supervisor.num_restarts:
                    os.kill(model.supervisor.pid or 0, signal.SIGKILL)
                    await until(lambda: model.supervisor.num_restarts == 1)
                    assert piece.index not in {one.index for one in entry.open_answers}
            asked.close()
            assert asked.completion().answers == alone.answers

    run(main)


def test_every_step_is_counted_with_its_tokens_and_a_new_worker_goes_on_counting() -> None:
    async def main() -> None:
        async with served() as model:
            for life in (1, 2):
                await model.generate("question", params(life, 20))
                os.kill(model.supervisor.pid or 0, signal.SIGKILL)
                await until(lambda: model.supervisor.num_restarts == life and model.is_ready)  # noqa: B023
            sizes = dict(model.supervisor.step_sizes.cumulative())
            prompt = len(model.text.prompt(model.text.tokenizer.encode("question", add_special_tokens=True)))
            assert sizes["+Inf"] == 2 * 20, "the prompt's step brings the first token"
            assert sizes["1.0"] == 2 * 19 + 2 * (prompt == 1)
            assert model.supervisor.step_sizes.num_tokens == 2 * (prompt + 19)

    run(main)


@pytest.mark.parametrize("kind", ["abort", "raise", "wrong_token", "missing_row", "garbage", "stranger", "hang"])
def test_a_request_that_breaks_its_worker_is_ended_and_its_neighbours_are_not(kind: str) -> None:
    alone = undisturbed(5)

    async def main() -> None:
        async with served(faults=fault(kind), limits=HUNG if kind == "hang" else PATIENT) as model:
            poison = asyncio.create_task(model.generate("poison", params(POISON_SEED)))
            healthy = await ask_all(model, 5)
            assert [one.answers for one in healthy] == [one.answers for one in alone]
            # What one of them shares with another may have died with a worker before it was found.
            assert all(
                ours.num_cached_tokens in (0, one.num_cached_tokens) for ours, one in zip(healthy, alone, strict=True)
            )
            end = (await poison).answers[0]
            assert (end.finish_reason, end.error_code) == ("error", QUARANTINED)
            # Twice among others with no token between and once alone: tokens die on their way with a worker, so the
            # first of these crashes is after any of its tokens.
            assert 3 <= model.supervisor.num_restarts <= NUM_TOKENS_BEFORE + 2
            assert model.supervisor.ledger.num_quarantined == 1

    run(main)


def test_a_row_that_fails_is_the_end_of_one_request_and_of_no_worker() -> None:
    alone = undisturbed(5)

    async def main() -> None:
        async with served(faults=fault("row")) as model:
            broken = asyncio.create_task(model.generate("spoilt", params(POISON_SEED)))
            assert same(await ask_all(model, 5), alone)
            assert (await broken).answers[0].error_code == ROW_FAILED
            assert model.supervisor.num_restarts == 0

    run(main)


def test_a_stuck_worker_is_replaced() -> None:
    async def main() -> None:
        async with served(faults=fault("hold"), limits=HUNG) as model:
            asking = asyncio.create_task(model.generate("poison", params(POISON_SEED)))
            await until(lambda: model.supervisor.num_restarts > 0)
            await until(lambda: model.is_ready)
            assert (await asking).finish_reason == "error"

    run(main)


def test_a_pause_of_the_parent_gives_its_worker_all_its_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # Time goes by only as it is told to: on a busy machine every look would be late, and a late look is a pause.
    began_s, ahead_s = time.monotonic(), 0.0
    monkeypatch.setattr(supervisor_module, "monotonic", lambda: began_s + ahead_s)

    async def main() -> None:
        nonlocal ahead_s
        async with served(limits=Limits(stuck_s=60.0)) as model:
            os.kill(model.supervisor.pid or 0, signal.SIGSTOP)
            looks_at, num_looks = model.supervisor.check_progress, 0

            def counted(life: Any, now_s: float) -> None:
                nonlocal num_looks
                num_looks += 1
                looks_at(life, now_s)

            monkeypatch.setattr(model.supervisor, "check_progress", counted)
            ahead_s, num_before = 1_000.0, num_looks  # the container was paused: no look in between
            await until(lambda: num_looks > num_before + 3)
            assert model.supervisor.num_restarts == 0
            # Time that goes by look by look is the worker's own.
            killed_s = ahead_s + 100.0
            while not model.supervisor.num_restarts:
                ahead_s, num_before = ahead_s + 0.9 * LATE_S, num_looks
                await until(lambda: num_looks > num_before or model.supervisor.num_restarts > 0)  # noqa: B023
                assert ahead_s < killed_s, "a worker whose beat stands still is killed"

    run(main)


@pytest.mark.parametrize("command", [("false",), ("/no/such/program",)])
def test_a_worker_that_never_comes_to_life_is_an_error_and_not_a_loop(command: tuple[str, ...]) -> None:
    limits = Limits(max_workers_without_progress=3, first_delay_s=0.0)

    async def main() -> None:
        failures: list[BaseException] = []
        plan = oracle_plan(5, limits=limits, command=command)
        supervisor = Supervisor(plan, lambda _events: None, failures.append)
        with raises_code(EngineDeadError, "workers_made_no_progress"):
            await supervisor.start()
        assert (supervisor.state.value, supervisor.num_restarts, len(failures)) == ("failed", 2, 1)
        await supervisor.close()

    run(main)


def test_a_setting_a_worker_refuses_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TESTING", "1")
    monkeypatch.setenv("QUIRE_FAULTS", "no faults")

    async def main() -> None:
        with raises_code(ConfigError, "invalid_faults"):
            async with served():
                pass

    run(main)


def test_the_longer_lives_bring_nothing_the_longer_the_wait() -> None:
    limits = Limits(first_delay_s=0.25, max_delay_s=1.5)
    assert [limits.delay_s(count) for count in range(6)] == [0.0, 0.25, 0.5, 1.0, 1.5, 1.5]


def test_faults_are_refused_outside_tests() -> None:
    with raises_code(ConfigError, "needs_testing"):
        faults_from({"QUIRE_FAULTS": "[]"})
    with raises_code(ConfigError, "unknown_fault_kind"):
        faults_from({"QUIRE_FAULTS": '[{"kind": "sneeze"}]', "QUIRE_TESTING": "1"})
    assert faults_from({}) == []
    assert faults_from({"QUIRE_FAULTS": '[{"kind": "hang", "step": 3}]', "QUIRE_TESTING": "1"})[0].step == 3
    with raises_code(ConfigError, "invalid_faults"):
        faults_from({"QUIRE_FAULTS": '[{"kind": "slow", "by": 0.5}]', "QUIRE_TESTING": "1"})


def test_a_slow_build_takes_its_share_longer_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    ticks = itertools.count()
    monkeypatch.setattr(
        "quire.worker.child.faults.time", SimpleNamespace(perf_counter=ticks.__next__, sleep=slept_s.append)
    )
    slow = FaultyRunner(talker().engine.runner, [Fault("slow", by=1.5, step=1)])
    for step in range(3):
        items = tuple(WorkItem(at, (0,), 0, (at + 1,)) for at in range(2))
        slow.start(StepPlan(step, (), items)).wait()
    assert slept_s == [0.0, 0.5, 0.5]


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
            prompts = [await model.prompt_ids(f"question {at}") for at in range(4)]
            handles = [model.submit_ids(ids, params(at, 60)) for at, ids in enumerate(prompts)]
            draining = asyncio.create_task(model.supervisor.drain(PATIENCE_S))
            await until(lambda: model.supervisor.state.value == "draining")
            with pytest.raises(DrainingError):
                await model.generate("too late", params(1))
            assert await draining
            ends = [[piece.finish_reason async for piece in handle][-1] for handle in handles]
            assert ends == ["length"] * 4

    run(main)


def test_draining_has_a_bound_and_what_still_runs_is_told() -> None:
    async def main() -> None:
        async with served(faults=fault("hang"), limits=Limits(close_s=0.2)) as model:
            asking = asyncio.create_task(model.generate("poison", params(POISON_SEED)))
            await until(lambda: model.num_open == 1)
            assert not await model.supervisor.drain(0.1)
        with pytest.raises(EngineDeadError):
            await asking

    run(main)


def test_clients_that_leave_while_there_is_no_worker_are_forgotten() -> None:
    async def main() -> None:
        async with served() as model:
            stream = model.stream("question", params(1, 400))
            await anext(stream)
            os.kill(model.supervisor.pid or 0, signal.SIGKILL)
            await until(lambda: model.supervisor.state.value == "restarting")
            await stream.aclose()  # type: ignore[attr-defined]
            await until(lambda: model.supervisor.num_open == 0)
            await until(lambda: model.is_ready)
            assert (await model.generate("still there?", params(1, 5))).finish_reason == "length"

    run(main)


def test_while_the_parent_is_busy_the_worker_goes_on_stepping() -> None:
    async def main() -> None:
        async with served() as model:
            asked = model.submit_ids(model.text.prompt("question"), params(1, 480))
            beats = {model.supervisor.worker_status().num_heartbeats}
            while len(beats) < 20:  # nothing else runs on this loop meanwhile
                time.sleep(0.005)
                beats.add(model.supervisor.worker_status().num_heartbeats)
            async for _ in asked:
                pass
            assert asked.completion().num_output_tokens == 480
            asked.close()

    run(main)


def test_an_idle_worker_may_be_killed_any_number_of_times() -> None:
    limits = Limits(max_workers_without_progress=2)

    async def main() -> None:
        async with served(limits=limits) as model:
            for num_kills in range(1, 5):
                os.kill(model.supervisor.pid or 0, signal.SIGKILL)
                await until(lambda count=num_kills: model.supervisor.num_restarts == count and model.is_ready)  # type: ignore[misc]
            assert (await model.generate("still there?", params(1, 5))).finish_reason == "length"

    run(main)


def test_clients_who_give_up_do_not_make_a_hopeless_worker_look_alive() -> None:
    limits = Limits(max_workers_without_progress=3, first_delay_s=0.0)

    async def main() -> None:
        supervisor = Supervisor(
            oracle_plan(5, limits=limits, command=("false",)), lambda _events: None, lambda _e: None
        )
        starting = asyncio.create_task(supervisor.start())
        await asyncio.sleep(0)
        for at in range(200):
            request = Request(f"r{at}", (1,), ModelIdentity("m", "l").namespace(4, "g"), 0.0)
            supervisor.submit(request)
            supervisor.cancel(f"r{at}")
            await asyncio.sleep(0)
        with raises_code(EngineDeadError, "workers_made_no_progress"):
            await starting
        await supervisor.close()

    run(main)


def test_closing_while_no_worker_is_there_tells_who_waits_to_be_let_in() -> None:
    limits = Limits(first_delay_s=30.0)

    async def main() -> None:
        heard: list[RequestEvent] = []
        plan = oracle_plan(5, limits=limits, command=("false",))
        supervisor = Supervisor(plan, heard.extend, lambda _error: None)
        starting = asyncio.create_task(supervisor.start())
        await until(lambda: supervisor.num_restarts == 1)
        supervisor.submit(Request("r1", (1,), ModelIdentity("m", "l").namespace(4, "g"), 0.0))
        await supervisor.close()
        assert [type(one.error) for one in heard if isinstance(one, Refused)] == [EngineDeadError]
        with pytest.raises(EngineDeadError):
            await starting
        supervisor.submit(Request("r2", (1,), ModelIdentity("m", "l").namespace(4, "g"), 0.0))
        assert [type(one.error) for one in heard if isinstance(one, Refused)] == [EngineDeadError] * 2

    run(main)


def test_a_stuck_worker_does_not_let_the_queue_grow() -> None:
    async def main() -> None:
        queue, settings = QueueConfig(max_requests=5), replace(SETTINGS, max_running=4)
        limits = Limits(stuck_s=600.0, close_s=0.1)
        async with served(settings, faults=fault("hang", 0), limits=limits, queue=queue) as model:
            asking = [asyncio.create_task(model.generate("poison", params(POISON_SEED)))]
            await until(lambda: bool(model.supervisor.worker_status().request_ids))  # its first step is its last
            asking += [asyncio.create_task(model.generate(f"q{at}", params(at))) for at in range(40)]
            await until(lambda: sum(task.done() for task in asking) == 32)
            assert all(isinstance(task.exception(), QueueFullError) for task in asking if task.done())
            assert model.supervisor.num_open == 9
        await asyncio.gather(*asking, return_exceptions=True)

    run(main)


def test_a_displaced_request_is_an_error_to_who_asked_and_the_other_tenant_is_served() -> None:
    async def main() -> None:
        settings, queue = replace(SETTINGS, max_running=1, max_step_tokens=40), QueueConfig(2, class_reserve=0.0)
        async with served(settings, queue=queue, step_s=0.05) as model:
            running = asyncio.create_task(model.generate("long", params(0, 20), tenant="a"))
            await until(lambda: model.supervisor.load.num_running == 1)
            asking = [asyncio.create_task(model.generate(f"q{at}", params(at, 5), tenant="a")) for at in (1, 2)]
            await until(lambda: model.supervisor.load.num_waiting == 2)
            other = await model.generate("mine", params(5, 5), tenant="b")
            assert other.num_output_tokens == 5
            done = await asyncio.gather(running, *asking, return_exceptions=True)
            assert [type(one) for one in done] == [Completion, Completion, DisplacedError]
            assert isinstance(done[2], DisplacedError)
            assert 1 <= done[2].retry_after_s <= 60

    run(main)


def test_a_tenant_is_let_in_though_another_has_all_that_wait_for_a_worker_that_is_stuck() -> None:
    async def main() -> None:
        queue, settings = QueueConfig(max_requests=5), replace(SETTINGS, max_running=4)
        limits = Limits(stuck_s=20.0, close_s=0.1)
        async with served(settings, faults=fault("hang", 0), limits=limits, queue=queue) as model:
            asking = [asyncio.create_task(model.generate("poison", params(POISON_SEED)))]
            await until(lambda: bool(model.supervisor.worker_status().request_ids))  # its first step is its last
            asking += [asyncio.create_task(model.generate(f"q{at}", params(at))) for at in range(20)]
            await until(lambda: sum(task.done() for task in asking) == 12)
            others = [asyncio.create_task(model.generate(f"b{at}", params(at), tenant="b")) for at in range(3)]
            promised = asyncio.create_task(model.generate("promised", params(1), has_reservation=True))
            await until(lambda: model.supervisor.num_open == 13)
            crowd = [asyncio.create_task(model.generate("c", params(1), tenant=f"t{at}")) for at in range(256)]
            await until(lambda: sum(task.done() for task in crowd) == 4)
            assert model.supervisor.num_open == 9 + MIN_RESERVED, "and yet it is bounded"
        await asyncio.gather(*asking, *others, promised, *crowd, return_exceptions=True)

    run(main)


def test_draining_is_over_when_the_last_one_was_refused() -> None:
    async def main() -> None:
        async with served() as model:
            with pytest.raises(RequestTooLargeError):
                await model.generate([1] * 600, params(1))
            assert await model.supervisor.drain(60.0)

    run(main)


def test_a_tenant_that_is_no_text_is_refused_at_the_door() -> None:
    async def main() -> None:
        async with served() as model:
            with raises_code(InvalidParameterError, "invalid_parameter") as refused:
                await model.generate("question", params(1), tenant="\ud800")
            assert refused.value.parameter == "tenant"
            assert await model.supervisor.drain(1.0)

    run(main)


@pytest.mark.parametrize("end", ["returns", "raises", "leaves", "SIGKILL", "SIGTERM"])
def test_however_a_parent_ends_its_worker_ends_too_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    end_a_parent(end, tmp_path, Random(end))
    assert left_of(tmp_path) == []


def test_a_folder_that_a_killed_parent_left_is_taken_away_by_the_next(tmp_path: Path) -> None:
    old, ours = tmp_path / "quire-socket-old", tmp_path / "quire-socket-ours"
    for folder in (old, ours):
        folder.mkdir()
    (tmp_path / "quire-socket-file").touch()
    lock = _lock(ours)
    assert lock is not None
    assert _lock(ours) is None
    _sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"quire-socket-ours", "quire-socket-file"}
    os.close(lock)
    _sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["quire-socket-file"]
    assert _lock(ours) is None


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path may have about a hundred characters, and pytest's own folders grow with every run."""
    with TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


def test_a_folder_that_was_swept_before_it_was_locked_is_made_anew(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = spawned_worker._lock
    lost: list[Path] = []

    def sweeps_first(folder: Path) -> int | None:
        if not lost:
            lost.append(folder)
            folder.rmdir()
        return really(folder)

    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    monkeypatch.setattr(spawned_worker, "_lock", sweeps_first)
    with contextlib.ExitStack() as held:
        folder = spawned_worker.private_folder(held)
        assert folder.is_dir()
        assert folder != lost[0]
    assert list(short_folder.iterdir()) == []


def test_a_folder_too_deep_for_a_socket_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def main() -> None:
        with raises_code(ConfigError, "invalid_config"):
            async with served():
                pass

    run(main)


def test_of_two_models_one_may_die_and_the_other_does_not_notice() -> None:
    async def main() -> None:
        async with served() as first, served() as second:
            stream = first.stream("question", params(1, 480))
            tokens = len((await anext(stream)).token_ids)
            os.kill(first.supervisor.pid or 0, signal.SIGKILL)
            done = await second.generate("question", params(1, 20))
            assert (done.finish_reason, done.num_replays, second.supervisor.num_restarts) == ("length", 0, 0)
            assert tokens + sum([len(piece.token_ids) async for piece in stream]) == 480
            await until(lambda: first.supervisor.num_restarts == 1)

    run(main)
