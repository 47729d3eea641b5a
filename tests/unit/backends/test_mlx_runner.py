"""A runner over MLX with small models: the tokens of other backends, rows that fail alone, and one thread for all."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier, current_thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.backends.host.wanted import NOT_FINITE
from quire.backends.mlx.decoder import Decoder, LazyOutputs
from quire.backends.mlx.kv_store import KVStore
from quire.backends.mlx.runner import MlxRunner
from quire.config import Backend
from quire.core.request import ResolvedSampling
from quire.core.step import RowResult, Sampling, StepPlan, WorkItem
from quire.errors import InvariantError
from tests.support.changed import changed
from tests.support.errors import raises_code
from tests.support.machine.process_memory import kept_for_this_file
from tests.support.models import architectures
from tests.support.models.mlx_models import Reference, made_by_mlx
from tests.support.models.models import GREEDY, Ask, Machine, load_runner

SETTINGS: dict[str, Any] = {
    "memory_bytes": 8 << 30, "block_size": 16, "max_step_tokens": 64, "max_running": 8, "max_sequence_tokens": 256,
}  # fmt: skip
SPOILT = 99
"""A token whose embedding is made to be no number."""


def loaded(name: str) -> MlxRunner:
    runner = load_runner(made_by_mlx(name), **SETTINGS, backend="mlx")
    assert isinstance(runner, MlxRunner)
    return runner


kept = kept_for_this_file(loaded)


def greedy_item(sequence_id: int, tokens: Sequence[int], blocks: tuple[int, ...], first: int = 0) -> WorkItem:
    sampling = Sampling(GREEDY, 0, 0, len(tokens), 1, None)
    return WorkItem(sequence_id, tuple(tokens[first:]), first, blocks, sampling)


def run(runner: MlxRunner, *items: WorkItem) -> dict[int, RowResult]:
    return runner.start(StepPlan(1, (), items)).wait().rows


# -- the same tokens --


@pytest.mark.parametrize(
    ("name", "other"),
    [("mistral-native", "cpu"), ("qwen3-native", "cpu"), ("llama3-rope", "torch"), ("qwen2-windows", "torch"),
     ("gemma3", "cpu"), ("phi4-partial", "cpu")],
)  # fmt: skip
def test_windows_and_rotations_of_the_config_are_followed(name: str, other: Backend) -> None:
    """mlx-lm sees past the windows of some, and reads older words for the rotations."""
    dice = Random(name)
    prompts = [[dice.randrange(3, 130) for _ in range(length)] for length in (1, 30, 60, 200)]
    params = ResolvedSampling(temperature=0.0, max_tokens=10)
    backends: tuple[Backend, ...] = ("mlx", other)
    found = []
    for backend in backends:
        runner = load_runner(architectures.directory(name), **SETTINGS, backend=backend)
        found.append([ask.tokens for ask in Machine(runner, max_running=4).run([Ask(p, params) for p in prompts])])
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "bits"), [("gpt-oss", None), ("gemma4", None), ("qwen2", 4)])
def test_greedy_tokens_are_those_of_mlx_lm(name: str, bits: int | None) -> None:
    dice = Random(name)
    prompts = [[dice.randrange(3, 130) for _ in range(length)] for length in (1, 20, 70)]
    runner = load_runner(made_by_mlx(name, bits), **SETTINGS, backend="mlx")
    params = ResolvedSampling(temperature=0.0, max_tokens=10)
    asks = Machine(runner, max_running=4).run([Ask(prompt, params) for prompt in prompts])
    reference = Reference(made_by_mlx(name, bits))
    assert [ask.tokens for ask in asks] == [reference.answer(prompt, 10) for prompt in prompts]


@kept_for_this_file
def alone(name: str) -> tuple[list[WorkItem], dict[int, RowResult]]:
    """Sequences of which some feed as many tokens and see as many blocks, and what each says alone."""
    dice = Random(name)
    items = [
        greedy_item(at, [dice.randrange(3, 130) for _ in range(length)], tuple(range(1 + 2 * at, 3 + 2 * at)))
        for at, length in enumerate((1, 5, 1, 17, 5, 1, 17))
    ]
    return items, {item.sequence_id: run(kept(name), item)[item.sequence_id] for item in items}


@settings(max_examples=8)
@given(st.sampled_from(["llama", "gemma3"]), st.permutations(range(7)))
def test_every_sequence_gets_its_own_rows_in_whatever_order_they_stand(name: str, order: list[int]) -> None:
    items, said = alone(name)
    assert len({row.token_ids for row in said.values()}) > 4
    assert run(kept(name), *(items[at] for at in order)) == said


# -- rows that fail --


def spoil(runner: MlxRunner, token_id: int) -> None:
    """Make this token's embedding no number."""
    embedding = runner._opened()[0]._owner.model.embed_tokens

    def change() -> None:
        embedding.weight[token_id] = float("nan")
        mx.eval(embedding.weight)

    runner._mlx_thread.call(change)


@kept_for_this_file
def spoilt() -> tuple[MlxRunner, RowResult]:
    """A model with a head of its own and a token that spoils a row; what it says to a sound prompt."""
    runner = loaded("qwen2")
    sound = run(runner, greedy_item(1, range(3, 20), (1, 2)))[1]
    spoil(runner, SPOILT)
    return runner, sound


def test_a_row_that_is_not_finite_fails_alone() -> None:
    runner, sound = spoilt()
    rows = run(runner, greedy_item(1, range(3, 20), (1, 2)), greedy_item(2, [5, SPOILT, 7], (3,)))
    assert rows == {1: sound, 2: RowResult(error=NOT_FINITE)}


def test_a_chunk_that_samples_nothing_fails_too() -> None:
    runner, _ = spoilt()
    assert run(runner, WorkItem(2, (5, SPOILT), 0, (3,)))[2].error == NOT_FINITE


def test_the_block_of_a_failed_row_serves_another() -> None:
    runner, sound = spoilt()
    run(runner, WorkItem(2, (SPOILT,) * 32, 0, (4, 5)))
    content = np.frombuffer(b"".join(runner.read_blocks([4, 5])), np.float32)
    assert np.isfinite(content).all()
    assert run(runner, greedy_item(3, range(3, 20), (4, 5)))[3] == sound


def test_a_draft_whose_row_is_not_finite_ends_the_tokens_before_it() -> None:
    runner = loaded("qwen2")
    prompt = list(range(3, 12))
    first = run(runner, greedy_item(1, prompt, (1, 2)))[1].token_ids
    second = run(runner, greedy_item(1, [*prompt, *first], (1, 2), 9))[1].token_ids
    assert {*first, *second}.isdisjoint(prompt)
    assert first != second
    spoil(runner, second[0])
    item = greedy_item(1, prompt, (1, 2))
    row = run(runner, changed(item, token_ids=(*prompt, *first, *second, 5)))[1]
    assert (row.token_ids, row.error) == (first + second, None)


# -- one thread --


def test_whoever_calls_mlx_is_called_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    compute, wait, read, write = Decoder.compute, LazyOutputs.wait, KVStore.read_blocks, KVStore.write_blocks

    def told(real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            threads.append(current_thread().name)
            return real(*given, **named)

        return call

    for owner, name, real in (
        (Decoder, "compute", compute), (LazyOutputs, "wait", wait), (KVStore, "read_blocks", read),
        (KVStore, "write_blocks", write),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, told(real))
    runner = loaded("llama")
    prompts = [list(range(3 + at, 30 + at)) for at in range(4)]
    alone = [run(runner, greedy_item(1, prompt, (1, 2)))[1] for prompt in prompts]
    together = Barrier(len(prompts))

    def ask(at: int) -> RowResult:
        together.wait()
        row = run(runner, greedy_item(1, prompts[at], (2 * at + 1, 2 * at + 2)))[1]
        runner.write_blocks([20 + at], runner.read_blocks([2 * at + 1]))
        return row

    with ThreadPoolExecutor(len(prompts)) as callers:
        assert list(callers.map(ask, range(len(prompts)))) == alone
    assert len(threads) >= 2 * 8 + 2 * 4
    assert len(set(threads)) == 1
    assert threads[0].startswith("mlx")


def test_start_does_not_wait_for_the_step() -> None:
    """Two are begun before the first is waited for; each gives what it gives alone."""
    runner = kept("llama")
    items = greedy_item(1, range(3, 40), (1, 2, 3)), greedy_item(2, range(50, 60), (4,))
    alone = [run(runner, item) for item in items]
    begun = [runner.start(StepPlan(at, (), (item,))) for at, item in enumerate(items)]
    assert [step.wait().rows for step in reversed(begun)] == alone[::-1]


def test_a_closed_runner_and_a_step_too_large_are_bugs() -> None:
    runner = loaded("llama")
    with raises_code(InvariantError, "step_too_large"):
        run(runner, WorkItem(1, (1,) * 65, 0, (1, 2, 3, 4, 5)))
    runner.close()
    with raises_code(InvariantError, "runner_is_closed"):
        run(runner)
    with raises_code(InvariantError, "runner_is_closed"):
        runner.read_blocks([1])
