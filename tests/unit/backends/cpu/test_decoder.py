"""The CPU backend without torch: the tokens of small models for ever, files it reads, what it refuses."""

import json
import math
import sys
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from subprocess import run
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.backends.cpu.kv_store import KVStore
from quire.backends.cpu.load import why_not_cpu
from quire.backends.cpu.runner import CpuRunner
from quire.backends.host.batch import make_batch
from quire.backends.host.block_store import LayerShape
from quire.backends.kernels import extension
from quire.backends.load import load_backend
from quire.checkpoints import resolve
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.step import BlockCopy, WorkItem
from quire.errors import CheckpointError, ConfigError, InvariantError
from tests.support.errors import raises_code
from tests.support.machine.process_memory import AMPLE_BYTES
from tests.support.models.models import Ask, Machine, opened
from tests.support.models.quantised import retyped
from tests.support.models.tiny_models import Tiny, make_directory, write_gguf

pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)

SETTINGS = ModelSettings(
    memory_bytes=AMPLE_BYTES, block_size=16, max_step_tokens=64, max_running=8, kv_dtype="float32", backend="cpu"
)
LLAMA = Tiny(hidden=96, num_heads=3, num_kv_heads=1, num_layers=2, intermediate=64)
MODELS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, arch="qwen2", tied=False),
    "qwen3": replace(LLAMA, arch="qwen3"),
    "mistral": replace(LLAMA, metadata={"llama.attention.sliding_window": 20}),
}

GOLDEN = {
    "llama": "710b237636a9b0cb",
    "qwen2": "a479be66db84244e",
    "qwen3": "0eab555c15beacc1",
    "mistral": "b57b86749eae0145",
}
"""Digests of all answers, the same on every instruction set, and as the decoder in torch gave them."""


def answers(path: Path, settings: ModelSettings = SETTINGS) -> list[list[int]]:
    runner = load_backend(resolve(str(path), cache=path.parent / "cache"), settings).runner
    params = (ResolvedSampling(temperature=0.0, max_tokens=12), ResolvedSampling(max_tokens=12, top_p=0.9, top_k=50))
    prompts = ([5], list(range(3, 40)), [7, 8] * 20)
    asks = [Ask(prompt, one, seed=at) for at, prompt in enumerate(prompts) for one in params]
    return [ask.tokens for ask in Machine(runner, max_running=4).run(asks)]


@pytest.mark.parametrize("head_size", [32, 40, 64, 128])
def test_angles_are_right_to_the_last_bit_of_a_float(head_size: int, tmp_path: Path) -> None:
    tiny = replace(LLAMA, hidden=3 * head_size)
    runner = load_backend(resolve(str(write_gguf(tmp_path / "model.gguf", tiny))), SETTINGS).runner
    assert isinstance(runner, CpuRunner)
    model, store = opened(runner)
    items = [WorkItem(at, (5,), position, (1,) * 128) for at, position in enumerate((0, 1, 77, 1_999))]
    model.compute(make_batch(items, store.block_size), store, np.empty(0, np.int64))
    for row, item in enumerate(items):
        angles = [float(np.float32(item.first_position) * one) for one in model._ropes[0].frequencies] * 2
        assert model._buffers.cos[row].tolist() == [float(np.float32(math.cos(one))) for one in angles]
        assert model._buffers.sin[row].tolist() == [float(np.float32(math.sin(one))) for one in angles]


def test_a_token_or_a_row_that_nobody_has_is_refused(tmp_path: Path) -> None:
    runner = load_backend(resolve(str(write_gguf(tmp_path / "model.gguf", LLAMA))), SETTINGS).runner
    assert isinstance(runner, CpuRunner)
    model, store = opened(runner)
    for token, row in ((model.vocabulary_size, 0), (-1, 0), (5, 1), (5, -1)):
        batch = make_batch([WorkItem(1, (token,), 0, (1,))], store.block_size)
        with raises_code(InvariantError, "unknown_data"):
            model.compute(batch, store, np.array([row]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_that_nobody_needs_change_nothing_of_those_that_are(name: str, threads: int, tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_threads=threads)
    runner = load_backend(resolve(str(write_gguf(tmp_path / "model.gguf", MODELS[name]))), settings).runner
    assert isinstance(runner, CpuRunner)
    model, store = opened(runner)
    items = [
        WorkItem(0, tuple(range(5, 45)), 0, (1, 2, 3)),
        WorkItem(1, (9, 8, 7), 0, (4,)),
        WorkItem(2, (6,), 0, (5,)),
    ]
    batch, random = make_batch(items, store.block_size), Random(3)
    num_rows = len(batch.tokens)
    whole = model.compute(batch, store, np.arange(num_rows))
    hidden, logits, kept = whole.hidden.copy(), whole.logits.copy(), store.read_blocks([1, 2, 3, 4, 5])
    for count in (0, 1, 2, 17, num_rows - 1):
        needed = np.array(sorted(random.sample(range(num_rows), count)), np.int64)
        wanted = np.array(random.sample(needed.tolist(), count // 2), np.int64)
        store.write_blocks([1, 2, 3, 4, 5], [bytes(len(one)) for one in kept])
        found = model.compute(batch, store, wanted, 0, needed)
        assert found.hidden[needed].tobytes() == hidden[needed].tobytes()
        assert found.logits.tobytes() == logits[wanted].tobytes()
        assert store.read_blocks([1, 2, 3, 4, 5]) == kept
        assert found.is_finite.all()


def test_of_a_row_that_nobody_needs_numbers_that_are_none_are_told(tmp_path: Path) -> None:
    runner = load_backend(resolve(str(write_gguf(tmp_path / "model.gguf", LLAMA))), SETTINGS).runner
    assert isinstance(runner, CpuRunner)
    model, store = opened(runner)
    poisoned = [np.full(len(one) // 4, np.nan, np.float32).tobytes() for one in store.read_blocks([1])]
    store.write_blocks([1], poisoned)
    items = [WorkItem(0, (5, 6), 16, (1, 2)), WorkItem(1, (9, 8), 0, (3,))]
    found = model.compute(make_batch(items, store.block_size), store, np.array([3]), 0, np.array([3]))
    assert found.is_finite.tolist() == [False, False, True, True]


@pytest.mark.parametrize("needed", [[1, 0], [0, 0], [0, 4], [-1], [0]])
def test_rows_that_are_needed_come_in_order_and_hold_those_that_are_wanted(needed: list[int], tmp_path: Path) -> None:
    runner = load_backend(resolve(str(write_gguf(tmp_path / "model.gguf", LLAMA))), SETTINGS).runner
    assert isinstance(runner, CpuRunner)
    model, store = opened(runner)
    batch = make_batch([WorkItem(0, (5, 6, 7, 8), 0, (1,))], store.block_size)
    with raises_code(InvariantError, "unknown_data"):
        model.compute(batch, store, np.array([1]), 0, np.array(needed))


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_what_they_always_were(name: str, tmp_path: Path) -> None:
    given = json.dumps(answers(write_gguf(tmp_path / "model.gguf", MODELS[name]))).encode()
    assert blake2b(given, digest_size=8).hexdigest() == GOLDEN[name]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Q8_0") for name in MODELS), *(("llama", kind) for kind in ("Q4_0", "Q5_1", "F16"))]
)
def test_a_gguf_file_answers_in_float_as_its_conversion_does(name: str, kind: str, tmp_path: Path) -> None:
    tiny = replace(MODELS[name], kind=kind)
    directory, file = make_directory(tmp_path / "model", tiny=tiny), write_gguf(tmp_path / "model.gguf", tiny)
    expected = answers(directory, replace(SETTINGS, dtype="float32"))
    assert answers(file, replace(SETTINGS, arithmetic="float")) == expected
    assert answers(file, replace(SETTINGS, dtype="float32")) == expected
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_weights_of_any_type_of_floating_point_are_read(dtype: str, tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "model", num_shards=1, tiny=LLAMA)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if dtype == "BF16":  # numbers that bfloat16 holds, so that float32 files of them must answer alike
        halves = {name: (one.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, one in tensors.items()}
        save_file(halves, file)
        expected = answers(directory)
        raw = {name: (one.view(np.uint32) >> 16).astype(np.uint16) for name, one in halves.items()}
        save_file(raw, file)
        file.write_bytes(retyped(file.read_bytes(), "U16", "BF16"))
    else:
        kind: Any = {"F16": np.float16, "F64": np.float64}[dtype]
        narrow = {name: one.astype(np.float16).astype(np.float32) for name, one in tensors.items()}
        save_file(narrow, file)
        expected = answers(directory)
        save_file({name: one.astype(kind) for name, one in narrow.items()}, file)
    assert answers(directory) == expected


def test_weights_in_other_types_or_not_finite_are_refused(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "model", num_shards=1, tiny=LLAMA)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, value, code in (
        ("model.norm.weight", tensors["model.norm.weight"].astype(np.int8), "invalid_checkpoint"),
        ("model.norm.weight", np.full(96, np.nan, np.float32), "weights_not_finite"),
    ):
        save_file({**tensors, name: value}, file)
        with raises_code(CheckpointError, code):
            load_backend(resolve(str(directory)), SETTINGS)


def test_what_it_cannot_run_is_told_with_the_rule(tmp_path: Path) -> None:
    checkpoint = resolve(str(make_directory(tmp_path / "model", tiny=LLAMA)))
    assert why_not_cpu(checkpoint, SETTINGS) is None
    told = {
        "device": why_not_cpu(checkpoint, replace(SETTINGS, device="cuda")),
        "float16": why_not_cpu(checkpoint, replace(SETTINGS, dtype="float16")),
        "blocks of 16, 32 or 64": why_not_cpu(checkpoint, replace(SETTINGS, block_size=8)),
        "got 'gemma2' (supported:": why_not_cpu(
            replace(checkpoint, config={**checkpoint.config, "model_type": "gemma2"}), SETTINGS
        ),
    }
    assert all(reason is not None and word in reason for word, reason in told.items())
    with raises_code(ConfigError, "weights_exceed_memory"):
        load_backend(checkpoint, replace(SETTINGS, memory_bytes=1 << 20))


def test_a_model_is_served_without_torch(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", LLAMA)
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None\n"
        "from quire.backends.load import load_backend\n"
        "from quire.checkpoints import resolve\n"
        "from quire.config import ModelSettings\n"
        f"checkpoint = resolve({str(file)!r})\n"
        "print(type(load_backend(checkpoint, ModelSettings(memory_bytes=4 << 30)).runner).__name__)\n"
    )
    done = run([sys.executable, "-c", program], capture_output=True, text=True, env={"QUIRE_CACHE": str(tmp_path)})
    assert (done.stdout, done.returncode) == ("CpuRunner\n", 0), done.stderr


def test_a_block_as_bytes_is_keys_then_values_layer_after_layer() -> None:
    store = KVStore((LayerShape(2, 4, 6), LayerShape(1, 4, 4)), 5, 16, "float32")
    for at, array in enumerate((*store.keys, *store.values)):
        array[...] = np.arange(array.size).reshape(array.shape) + 10_000 * at
    (data,) = store.read_blocks([3])
    expected = [store.keys[0][3], store.values[0][3], store.keys[1][3], store.values[1][3]]
    assert data == b"".join(array.tobytes() for array in expected)
    assert len(data) == store.num_block_bytes == (2 * 10 + 8) * 16 * 4
    store.copy([BlockCopy(3, 4), BlockCopy(4, 5), BlockCopy(1, 3)])
    assert store.read_blocks([4, 5, 3]) == [data, data, *store.read_blocks([1])]
    store.write_blocks([2], [data])
    assert store.read_blocks([2]) == [data]
    with raises_code(InvariantError, "invariant_broken"):
        store.write_blocks([1], [b"abc"])
