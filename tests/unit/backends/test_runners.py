"""Both runners with small models of every architecture: parity with transformers, failing rows, what is refused.

Which backend runs a model is the registry's choice: the CPU backend those of `architectures.NATIVE` and of families
that came later, torch all others.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from quire.backends.cpu import load as cpu_load
from quire.backends.cpu.formats.source import RowPiece, Source
from quire.backends.cpu.formats.weight_format import FORMATS
from quire.backends.cpu.linear import Linear, Packer
from quire.backends.cpu.runner import CpuRunner
from quire.backends.host.batch import make_batch
from quire.backends.host.wanted import NOT_FINITE
from quire.backends.load import load_backend
from quire.backends.protocol import Runner
from quire.backends.torch.linear import padded
from quire.backends.torch.runner import TorchRunner
from quire.checkpoints import resolve
from quire.config import Backend, Dtype, ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.scheduling.sequence import Sequence
from quire.core.step import RowResult, Sampling, Scoring, StepPlan, WorkItem
from quire.errors import CheckpointError, ConfigError, InvariantError
from tests.support.changed import changed
from tests.support.errors import raises_code
from tests.support.machine.process_memory import kept_for_this_file
from tests.support.models import architectures
from tests.support.models.models import GREEDY, Ask, Machine, load_runner, opened, random_params

SETTINGS = ModelSettings(memory_bytes=8 << 30, block_size=8, max_step_tokens=64, max_running=8, max_sequence_tokens=256)


@kept_for_this_file
def runner_of(name: str) -> Runner:
    # Blocks of 16 where the CPU backend can run, of 8 where torch must.
    is_native = name in architectures.NATIVE | architectures.TODAY | architectures.HYBRIDS | architectures.WIDE_HYBRID
    settings = replace(SETTINGS, block_size=16) if is_native else SETTINGS
    return load_backend(resolve(str(architectures.directory(name))), settings).runner


def greedy_item(sequence_id: int, tokens: list[int], blocks: tuple[int, ...], first: int = 0) -> WorkItem:
    sampling = Sampling(GREEDY, 0, 0, len(tokens), 1, None)
    return WorkItem(sequence_id, tuple(tokens[first:]), first, blocks, sampling)


def run(runner: Runner, *items: WorkItem) -> dict[int, RowResult]:
    return runner.start(StepPlan(1, (), items)).wait().rows


@pytest.mark.parametrize("name", [*architectures.MODELS])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    torch.manual_seed(5)
    prompts = [torch.randint(3, 131, (length,)).tolist() for length in (1, 2, 9, 40, 90)]
    params = ResolvedSampling(temperature=0.0, max_tokens=12)
    asks = Machine(runner_of(name), max_running=4).run([Ask(prompt, params) for prompt in prompts])
    for ask in asks:
        ids = torch.tensor([ask.prompt])
        generate: Any = architectures.reference(name).generate
        out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=None)
        assert out[0, len(ask.prompt) :].tolist() == ask.tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama-native"])
def test_a_row_that_is_not_finite_fails_alone(name: str) -> None:
    size = 16 if name in architectures.NATIVE else 8
    runner = load_runner(architectures.directory(name), memory_bytes=8 << 30, block_size=size, max_sequence_tokens=256)
    tokens = list(range(3, 20))
    healthy = run(runner, greedy_item(1, tokens, (1, 2, 3)))[1]
    poison = torch.full((runner.capacity.num_kv_bytes // 4,), float("nan")).numpy().tobytes()
    runner.write_blocks([4], [poison])
    rows = run(runner, greedy_item(1, tokens, (5, 6, 7)), greedy_item(2, tokens, (4, 8, 9), size))
    assert rows[1] == healthy
    assert rows[2].error == NOT_FINITE
    assert rows[2].token_ids == ()


@pytest.mark.parametrize(("name", "size"), [("llama", 8), ("llama-native", 16)])
def test_a_chunk_that_samples_nothing_fails_too(name: str, size: int) -> None:
    runner = load_runner(architectures.directory(name), memory_bytes=8 << 30, block_size=size, max_sequence_tokens=256)
    poison = torch.full((runner.capacity.num_kv_bytes // 4,), float("inf")).numpy().tobytes()
    runner.write_blocks([4], [poison])
    row = run(runner, WorkItem(1, (5, 6, 7), size, (4, 5)))[1]
    assert row.error == NOT_FINITE


def poisoned(embedding: Linear, shape: tuple[int, int], token_id: int) -> Linear:
    """The same embedding, in which one token has no numbers."""
    numbers = embedding.rows(np.arange(shape[0]))
    numbers[token_id] = np.nan
    source = Source(FORMATS["F32"], *shape, lambda first, end: RowPiece(numbers[first:end].view(np.uint8)))
    return Packer("float", has_amx=False).pack([source])


def test_a_draft_whose_row_is_not_finite_ends_the_tokens_before_it() -> None:
    settings = {"memory_bytes": 8 << 30, "block_size": 16, "max_sequence_tokens": 256}
    runner = load_runner(architectures.directory("llama-native"), **settings)
    tokens = list(range(3, 12))
    first = run(runner, greedy_item(1, tokens, (1, 2, 3)))[1].token_ids
    second = run(runner, greedy_item(1, [*tokens, *first], (1, 2, 3), 9))[1].token_ids
    assert isinstance(runner, CpuRunner)
    model = opened(runner)[0]
    embedding: Any = model._weights._live[0]
    poison = poisoned(embedding, (model.shape.vocabulary_size, model.shape.hidden_size), second[0])
    model._call.fields["embedding"] = poison.reference
    item = greedy_item(1, tokens, (1, 2, 3))
    row = run(runner, changed(item, token_ids=(*tokens, *first, *second, 5)))[1]
    assert (row.token_ids, row.error) == (first + second, None)
    assert run(runner, greedy_item(1, [*tokens, *first, *second], (1, 2, 3), 10))[1].error is not None


@pytest.mark.parametrize("name", ["qwen3", "qwen3-native"])
def test_hidden_states_are_those_of_transformers(name: str) -> None:
    tokens = list(range(3, 33))
    item = WorkItem(1, tuple(tokens), 0, (1, 2, 3, 4), hidden_positions=(0, 7, 29))
    got = run(runner_of(name), item)[1].hidden_states
    reference: Any = architectures.reference(name)
    with torch.inference_mode():
        expected = reference.base_model(torch.tensor([tokens])).last_hidden_state[0, [0, 7, 29]]
    found = torch.stack([torch.frombuffer(bytearray(one), dtype=torch.float32) for one in got])
    assert torch.allclose(found, expected.float(), atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-native"])
def test_guesses_never_change_an_answer(name: str) -> None:
    random = Random(7)

    def asks() -> list[Ask]:
        dice = Random(3)
        return [Ask([dice.randrange(3, 90) for _ in range(dice.randint(1, 30))], random_params(dice, 12), seed=at, n=2)
                for at in range(5)]  # fmt: skip

    plain = Machine(runner_of(name)).run(asks())
    answers = {(f"r{at}", index): tokens for at, ask in enumerate(plain) for index, tokens in ask.answers.items()}

    def propose(sequence: Sequence, limit: int) -> Draft:
        said = sequence.num_output_tokens
        guess = answers[sequence.request.request_id, sequence.index][said : said + min(limit, random.randint(0, 4))]
        return Draft(tuple(token if random.random() < 0.8 else 5 for token in guess))

    machine = Machine(runner_of(name))
    machine.engine.scheduler.propose = propose
    assert [ask.answers for ask in machine.run(asks())] == [ask.answers for ask in plain]
    stats = machine.engine.scheduler.stats
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(("name", "size"), [("llama", 8), ("llama-native", 16)])
def test_what_a_failed_row_left_in_a_block_does_not_reach_the_next_owner(name: str, size: int) -> None:
    runner = load_runner(architectures.directory(name), memory_bytes=8 << 30, block_size=size, max_sequence_tokens=256)
    expected = run(runner, greedy_item(1, [3, 4, 5], (1,)))[1]
    poison = torch.full((runner.capacity.num_kv_bytes // 4,), float("nan")).numpy().tobytes()
    runner.write_blocks([2], [poison])
    assert run(runner, greedy_item(2, [3, 4, 5], (2,)))[2] == expected


@pytest.mark.parametrize(("name", "size"), [("llama", 8), ("llama-native", 16)])
def test_a_closed_runner_and_a_step_too_large_are_bugs(name: str, size: int) -> None:
    runner = load_runner(architectures.directory(name), memory_bytes=8 << 30, block_size=size, max_sequence_tokens=256)
    with raises_code(InvariantError, "step_too_large"):
        run(runner, WorkItem(1, (1,) * 300, 0, tuple(range(1, 40))))
    runner.close()
    with raises_code(InvariantError, "runner_is_closed"):
        run(runner)


def changed_model(tmp_path: Path, name: str, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy of a small model with some of its config and weights replaced; None takes away."""
    target = tmp_path / name
    shutil.copytree(architectures.directory(name), target)
    fields = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    if tensors:
        weights = load_file(target / "model.safetensors") | tensors
        save_file({key: value for key, value in weights.items() if value is not None}, target / "model.safetensors")
    return target


@pytest.mark.parametrize(("name", "size"), [("llama", 8), ("llama-native", 16)])
@pytest.mark.parametrize(("config", "tensors", "words"), [
    ({}, {"model.layers.9.strange": torch.zeros(2)}, "unused"),
    ({}, {"model.norm.weight": None}, "model.norm.weight"),
    ({}, {"model.norm.weight": torch.zeros(5)}, "shape"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "RoPE"),
    ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, {}, "linear_attention"),
    ({"model_type": "t5"}, {}, "encoder-decoder"),
    ({"model_type": "mamba"}, {}, "mamba"),
    ({"model_type": "never-heard-of"}, {}, "never-heard-of"),
])  # fmt: skip
def test_a_model_that_is_not_what_it_says_is_refused(
    tmp_path: Path, name: str, size: int, config: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_backend(resolve(str(changed_model(tmp_path, name, config, tensors))), replace(SETTINGS, block_size=size))


def test_bfloat16_weights_and_kv_run() -> None:
    settings = ModelSettings(memory_bytes=8 << 30, block_size=8, dtype="bfloat16", max_sequence_tokens=256)
    loaded = load_backend(resolve(str(architectures.directory("llama"))), settings)
    assert "using torch instead of the CPU backend: the CPU backend needs heads of 32 to 512" in loaded.notes[0]
    assert "may depend on its batch" in loaded.notes[2]
    ask = Machine(loaded.runner).alone(Ask(list(range(3, 30)), ResolvedSampling(temperature=0.0, max_tokens=5)))
    assert len(ask.tokens) == 5


def test_a_model_without_products_for_it_is_run_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load, "probe", lambda _dtype: "no products here")
    settings = ModelSettings(memory_bytes=8 << 30, dtype="bfloat16", max_sequence_tokens=256)
    loaded = load_backend(resolve(str(architectures.directory("llama-native"))), settings)
    assert loaded.notes[0] == "using torch instead of the CPU backend: no products here"
    assert isinstance(loaded.runner, TorchRunner)
    ask = Machine(loaded.runner).alone(Ask(list(range(3, 30)), ResolvedSampling(temperature=0.0, max_tokens=5)))
    assert len(ask.tokens) == 5


def logits_of(runner: Runner, *items: WorkItem) -> NDArray[np.float32]:
    """Of every row."""
    rows = np.arange(sum(len(item.token_ids) for item in items))
    if isinstance(runner, CpuRunner):
        decoder, blocks = opened(runner)
        return decoder.compute(make_batch(items, blocks.block_size), blocks, rows).logits.copy()
    assert isinstance(runner, TorchRunner)
    model, store = runner._opened()
    with torch.inference_mode():
        return model.compute(make_batch(items, store.block_size, padded), store, rows).logits


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, "float32") for name in ("llama", "qwen2", "gemma2", *architectures.NATIVE, *architectures.TODAY)),
    *((name, "bfloat16") for name in architectures.NATIVE),
])  # fmt: skip
def test_a_rows_logits_have_the_same_bits_beside_any_number_of_others(name: str, dtype: Dtype) -> None:
    size = 16 if name in architectures.NATIVE | architectures.TODAY else 8
    settings = replace(SETTINGS, block_size=size, dtype=dtype)
    runner = load_backend(resolve(str(architectures.directory(name))), settings).runner
    alone = [logits_of(runner, greedy_item(at, [3 + at], (1,)))[0] for at in range(40)]
    for count in (2, 3, 5, 13, 31, 40):
        together = logits_of(runner, *(greedy_item(at, [3 + at], (1 + at,)) for at in range(count)))
        assert np.array_equal(together, np.stack(alone[:count])), count


def test_what_the_caller_makes_torchs_default_type_changes_nothing() -> None:
    settings = replace(SETTINGS, block_size=16)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            loaded = load_backend(resolve(str(architectures.directory("gemma2"))), settings)
            asks = [Ask(list(range(3, 20)), ResolvedSampling(temperature=0.0, max_tokens=6))]
            found.append([ask.tokens for ask in Machine(loaded.runner).run(asks)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert found[0] == found[1] == found[2]


def test_bfloat16_weights_on_the_fast_path_are_near_float32_and_the_same_in_company() -> None:
    asks = [Ask(list(range(3 + at, 30 + at)), ResolvedSampling(temperature=0.0, max_tokens=9)) for at in range(5)]
    found = {}
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        settings = ModelSettings(memory_bytes=8 << 30, dtype=dtype, max_sequence_tokens=256)
        loaded = load_backend(resolve(str(architectures.directory("llama-native"))), settings)
        assert loaded.notes == ()
        alone = [Machine(loaded.runner).alone(ask) for ask in asks]
        together = Machine(loaded.runner).run(asks)
        assert [one.tokens for one in alone] == [one.tokens for one in together]
        found[dtype] = (loaded.memory_plan, logits_of(loaded.runner, greedy_item(0, list(range(3, 30)), (1,))))
    (full_plan, full), (half_plan, half) = found.values()
    assert half_plan.block_bytes * 2 == full_plan.block_bytes
    assert not np.array_equal(full, half)
    lengths = np.linalg.norm(full, axis=1) * np.linalg.norm(half, axis=1)
    alike = (full * half).sum(axis=1) / lengths
    assert np.median(alike) > 0.999
    assert alike.min() > 0.98


def test_the_memory_plan_says_that_layers_with_a_window_keep_everything() -> None:
    loaded = load_backend(resolve(str(architectures.directory("gemma3"))), replace(SETTINGS, block_size=16))
    assert loaded.notes == (
        "6 of 7 layers have a sliding window of 21 tokens; the KV cache keeps all tokens for them, as for other layers",
    )


def test_a_device_that_is_not_there_is_refused() -> None:
    with raises_code(ConfigError, "invalid_config"):
        load_backend(resolve(str(architectures.directory("llama"))), ModelSettings(device="cuda"))


def test_torch_refuses_keys_and_values_in_int8_and_says_what_to_do() -> None:
    with raises_code(ConfigError, "no_int8_kv") as caught:
        load_backend(resolve(str(architectures.directory("gemma2"))), replace(SETTINGS, kv_dtype="int8"))
    assert "gemma2" in str(caught.value)


def test_an_adapted_model_says_so() -> None:
    loaded = load_backend(resolve(str(architectures.directory("gemma2"))), SETTINGS)
    assert "got 'gemma2' (supported:" in loaded.notes[0]
    assert "transformers" in loaded.notes[1]


def test_a_backend_that_is_asked_for_runs_the_model_or_says_why_not() -> None:
    native, adapted = (resolve(str(architectures.directory(name))) for name in ("llama-native", "gemma2"))
    settings = replace(SETTINGS, block_size=16)
    assert isinstance(load_backend(native, replace(settings, backend="cpu")).runner, CpuRunner)
    assert isinstance(load_backend(native, replace(settings, backend="torch")).runner, TorchRunner)
    with raises_code(ConfigError, "not_for_cpu"):
        load_backend(adapted, replace(settings, backend="cpu"))


@pytest.mark.parametrize("name", [*architectures.NATIVE])
def test_both_backends_choose_the_same_tokens(name: str) -> None:
    checkpoint, settings = resolve(str(architectures.directory(name))), replace(SETTINGS, block_size=16)
    backends: tuple[Backend, ...] = ("cpu", "torch")
    dice = Random(name)
    asks = [([dice.randrange(3, 130) for _ in range(length)], random_params(dice, 10)) for length in (1, 17, 60)]
    found = []
    for backend in backends:
        runner = load_backend(checkpoint, replace(settings, backend=backend)).runner
        done = Machine(runner, max_running=4).run([Ask(prompt, params, seed=5) for prompt, params in asks])
        found.append([ask.tokens for ask in done])
    assert found[0] == found[1]


def test_n_continuations_share_the_prompt_and_draw_their_own_tokens() -> None:
    ask = Machine(runner_of("llama")).alone(Ask(list(range(3, 40)), ResolvedSampling(max_tokens=8), seed=5, n=4))
    assert len({tuple(tokens) for tokens in ask.answers.values()}) == 4


def test_prompt_logprobs_are_those_of_transformers() -> None:
    tokens = list(range(3, 33))
    item = WorkItem(1, tuple(tokens), 0, (1, 2, 3, 4), scoring=Scoring(1, tuple(tokens[1:]), 2))
    got = run(runner_of("qwen3"), item)[1].scores
    reference: Any = architectures.reference("qwen3")
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].double(), dim=-1)
    assert len(got) == 29
    for at, entry in enumerate(got):
        assert entry.logprob == pytest.approx(float(expected[at, tokens[at + 1]]), abs=1e-4)
        assert [token for token, _ in entry.alternatives] == expected[at].topk(2).indices.tolist()
