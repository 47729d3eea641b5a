"""A model that is set aside gives its worker up, and what it answered goes on with the next one."""

import asyncio
from pathlib import Path

import pytest

from quire.client.engines.async_engine import AsyncEngine
from quire.client.request.params import SamplingParams
from quire.errors import CheckpointError, EngineDeadError, InvariantError, QuireError
from tests.support.errors import raises_code
from tests.support.servers.served import served
from tests.support.servers.talkers import talker
from tests.support.workers.oracle_worker import NEEDS
from tests.unit.worker.test_supervisor import ask_all, children, params, run, same, undisturbed, until

COUNT = 6


def test_what_was_under_way_and_what_came_meanwhile_is_answered_as_alone_with_the_next_worker() -> None:
    async def main() -> None:
        async with served(step_s=0.01) as model:
            asking = asyncio.ensure_future(ask_all(model, COUNT))
            for _ in range(2):
                before = model.supervisor.ledger.num_progress
                await until(lambda: model.supervisor.ledger.num_progress > before + COUNT)  # noqa: B023
                await model.suspend()
                assert not model.is_ready
                assert children() == []
                held = model.supervisor.ledger.num_progress
                late = asyncio.ensure_future(model.generate("question 1", params(1)))
                await asyncio.sleep(0)
                assert model.supervisor.ledger.num_progress == held
                await model.resume()
                assert model.is_ready
            completions = await asking
            assert same(completions, undisturbed_ones)
            assert (await late).answers == undisturbed_ones[1].answers
            assert max(one.num_replays for one in completions) >= 1
            assert model.supervisor.num_restarts == 0

    undisturbed_ones = undisturbed(COUNT)
    run(main)


def test_a_request_that_is_left_or_late_while_it_is_set_aside_ends_there() -> None:
    async def main() -> None:
        async with served(step_s=0.01) as model:
            left = asyncio.ensure_future(model.generate("left", params(1, 200)))
            late = asyncio.ensure_future(
                model.generate("late", SamplingParams(max_tokens=200, ignore_eos=True), timeout_s=1.0)
            )
            await until(lambda: model.supervisor.ledger.num_progress > 4)
            await model.suspend()
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert (await late).answers[0].finish_reason == "deadline"
            assert model.supervisor.num_open == 0
            await model.resume()
            assert (await model.generate("question 0", params(0))).answers == alone.answers

    (alone,) = undisturbed(1)
    run(main)


def test_a_model_that_is_closed_while_it_is_set_aside_ends_what_waits() -> None:
    async def main() -> None:
        model = served(step_s=0.01)
        async with model:
            asking = asyncio.ensure_future(model.generate("question", params(1, 200)))
            await until(lambda: model.supervisor.ledger.num_progress > 4)
            await model.suspend()
        with pytest.raises(EngineDeadError):
            await asking

    run(main)


def test_a_model_that_cannot_be_loaded_again_says_why_and_ends_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = tmp_path / "weights"
    needed.touch()
    monkeypatch.setenv(NEEDS, str(needed))

    async def main() -> None:
        async with served(step_s=0.01) as model:
            asking = asyncio.ensure_future(model.generate("question", params(1, 200)))
            await until(lambda: model.supervisor.ledger.num_progress > 4)
            await model.suspend()
            needed.unlink()
            with raises_code(CheckpointError, "weights_are_gone"):
                await model.resume()
            with pytest.raises(QuireError):
                await asking
            with pytest.raises(EngineDeadError):
                await model.resume()
            await model.suspend()  # there is nothing left to end

    run(main)


def test_a_model_that_computes_in_this_process_cannot_be_set_aside() -> None:
    async def main() -> None:
        async with AsyncEngine(talker()) as model:
            with raises_code(InvariantError, "invariant_broken"):
                await model.suspend()
            with raises_code(InvariantError, "invariant_broken"):
                await model.resume()

    run(main)
