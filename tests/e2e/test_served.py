"""The real model in a worker that is killed under its streams."""

import asyncio
import os
import signal

import pytest

from benchmarks.test_model import smollm2_directory, smollm2_file
from quire.checkpoints import resolve
from quire.client.engines.park_plan import plan_park, settings_of
from quire.client.engines.served import ServedModel, plan_worker
from quire.client.reply.outputs import Completion
from quire.client.request.params import SamplingParams
from quire.config import ModelSettings, OnDemandModel

SETTINGS = ModelSettings(memory_bytes=5 << 29, max_sequence_tokens=512)
PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "My favourite colour is"]


def params(at: int) -> SamplingParams:
    return SamplingParams(max_tokens=48, temperature=0.0 if at % 2 else 1.0, seed=at, ignore_eos=True, logprobs=1)


@pytest.mark.model
def test_a_killed_worker_goes_on_with_the_next_byte_of_every_answer() -> None:
    async def ask(model: ServedModel) -> list[Completion]:
        return await asyncio.gather(*(model.generate(text, params(at)) for at, text in enumerate(PROMPTS)))

    async def main() -> None:
        async with ServedModel(plan_worker(str(smollm2_directory()), SETTINGS)) as model:
            asking = asyncio.create_task(ask(model))
            async for piece in model.stream("Count to ten:", params(7)):
                # One the worker has not taken yet is not replayed but asked for the first time.
                is_all_taken = all(one.is_queued for one in model.supervisor.ledger.entries.values())
                if piece.token_ids and is_all_taken and not model.supervisor.num_restarts:
                    os.kill(model.supervisor.pid or 0, signal.SIGKILL)
                    break
            disturbed, undisturbed = await asking, await ask(model)
            assert [one.answers for one in disturbed] == [one.answers for one in undisturbed]
            assert (model.supervisor.num_restarts, disturbed[0].num_replays, undisturbed[0].num_replays) == (1, 1, 0)

    asyncio.run(main())


@pytest.mark.model
def test_two_models_share_one_memory_budget_and_answer_each_for_itself() -> None:
    names = [str(smollm2_directory()), str(smollm2_file())]

    async def main() -> None:
        # Both in float32: the directory was converted, the file has 4 bits, in which sums would be rounded otherwise.
        settings = ModelSettings(
            memory_bytes=3 << 30, max_sequence_tokens=256, max_running=4, max_step_tokens=64, dtype="float32"
        )
        models = [OnDemandModel(name, name, is_kept=True) for name in names]
        weighed = plan_park(models, settings).by_name.values()
        budgets = [one.needed_bytes for one in weighed]
        first, second = (
            plan_worker(str(one.path), settings_of(model, settings, one.needed_bytes))
            for model, one in zip(models, weighed, strict=True)
        )
        sizes = [sum(file.stat().st_size for file in resolve(name).weight_files) for name in names]
        assert sum(budgets) == 3 << 30
        assert budgets[0] - sizes[0] == budgets[1] - sizes[1]
        async with ServedModel(first) as one, ServedModel(second) as other:
            done = [await model.generate(PROMPTS[1], params(1)) for model in (one, other)]
        assert done[0].answers == done[1].answers
        assert [each.num_cached_tokens for each in done] == [0, 0]

    asyncio.run(main())
