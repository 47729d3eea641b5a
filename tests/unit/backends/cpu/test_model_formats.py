"""Whole models in the formats of their files: bits in any company, both arithmetics, what is refused."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.formats.gguf_source import _warn_converted
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic
from quire.backends.cpu.layers import LAYER
from quire.backends.cpu.runner import CpuRunner
from quire.backends.kernels import extension
from quire.backends.kernels.threads import num_threads, use_threads
from quire.backends.load import load_backend
from quire.backends.loaded import LoadedRunner
from quire.checkpoints import resolve
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import TokenLogprobs
from quire.engine.loading import open_engine
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code
from tests.support.machine.process_memory import AMPLE_BYTES
from tests.support.models.models import Ask, Machine, opened
from tests.support.models.tiny_models import Tiny, write_gguf

pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)

SETTINGS = ModelSettings(
    memory_bytes=AMPLE_BYTES, block_size=16, max_step_tokens=64, max_running=8, kv_dtype="float32", backend="cpu"
)
TINY = Tiny("qwen2", hidden=256, num_heads=4, num_kv_heads=2, num_layers=2, intermediate=256, tied=False)
MIXED = replace(TINY, kind="Q4_K", kinds={"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "ffn_up": "Q8_0"})
MODELS = {
    **{kind: replace(TINY, kind=kind) for kind in FORMATS if not FORMATS[kind].has_group},
    "mixed": MIXED,
    "llama in Q4_0": replace(TINY, arch="llama", kind="Q4_0", tied=True),
}
PARAMS = (ResolvedSampling(temperature=0.0, max_tokens=6, logprobs=3), ResolvedSampling(max_tokens=6, top_p=0.9))
Told = list[tuple[list[int], list[TokenLogprobs | None]]]


def loaded(folder: Path, tiny: Tiny, **settings: object) -> LoadedRunner:
    path = write_gguf(folder / "model.gguf", tiny)
    checkpoint = resolve(str(path), cache=folder / "cache")
    return load_backend(checkpoint, replace(SETTINGS, **settings))  # type: ignore[arg-type]


def asks() -> list[Ask]:
    prompts = ([5], list(range(3, 40)), [7, 8] * 10, [9, 200, 30])
    return [Ask(prompt, PARAMS[at % 2], seed=at) for at, prompt in enumerate(prompts)]


def told(given: list[Ask]) -> Told:
    return [(ask.tokens, ask.logprobs[0]) for ask in given]


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    before = num_threads()
    yield
    use_threads(before)


@pytest.mark.parametrize("arithmetic", ["float", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_an_answer_has_its_bits_in_any_company_and_with_any_threads(name: str, arithmetic: str, tmp_path: Path) -> None:
    runner = loaded(tmp_path, MODELS[name], arithmetic=arithmetic).runner
    use_threads(1)
    alone = [told([Machine(runner).alone(ask)])[0] for ask in asks()]
    for threads in (1, 2, 3):
        use_threads(threads)
        assert told(Machine(runner).run(asks())) == alone


def weights_of(runner: object) -> tuple[list[int], list[int]]:
    """Of the first layer: outputs of what is side by side for queries, keys and values, and the arithmetics of all."""
    assert isinstance(runner, CpuRunner)
    decoder: Decoder = opened(runner)[0]
    layer = decoder._layers[0]
    assert decoder._layers.dtype == LAYER
    linears = [*layer["qkv"], layer["out"], *layer["gate_up"], layer["down"]]
    return [int(one["num_out"]) for one in layer["qkv"]], [int(one["arithmetic"]) for one in linears if one["num_out"]]


def test_neighbours_of_one_format_are_one_weight_and_others_stand_beside_it(tmp_path: Path) -> None:
    assert weights_of(loaded(tmp_path, MODELS["Q4_K"]).runner) == ([512, 0, 0, 0], [Arithmetic.INTEGER] * 4)
    mixed = loaded(tmp_path, MIXED, arithmetic="float").runner
    assert weights_of(mixed) == ([384, 128, 0, 0], [Arithmetic.FLOAT] * 6)


def test_the_arithmetics_differ_and_float_is_that_of_float32(tmp_path: Path) -> None:
    wide = told(Machine(loaded(tmp_path, MIXED, dtype="float32").runner).run(asks()))
    assert told(Machine(loaded(tmp_path, MIXED, arithmetic="float").runner).run(asks())) == wide
    assert told(Machine(loaded(tmp_path, MIXED, arithmetic="int8").runner).run(asks())) != wide


def test_int8_is_refused_where_no_weight_has_so_few_bits(tmp_path: Path) -> None:
    with raises_code(ConfigError, "no_integer_weights"):
        loaded(tmp_path, MODELS["BF16"], arithmetic="int8")
    with pytest.raises(ConfigError) as refused:
        replace(SETTINGS, arithmetic="int8", dtype="float32")
    assert refused.value.settings == ("arithmetic", "dtype")


def test_types_without_kernels_are_widened_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_converted.cache_clear()  # once for each type in a process
    with caplog.at_level(logging.WARNING, "quire.backends"):
        runner = loaded(tmp_path, replace(TINY, kind="Q3_K")).runner
    assert weights_of(runner)[1] == [Arithmetic.INTEGER] * 4
    assert "no kernels for weights of type Q3_K" in caplog.text


@pytest.mark.parametrize(("kind", "at", "value"), [
    ("Q4_K", 2, b"\x00\x7c"), ("Q6_K", 208, b"\x01\xfe"), ("Q8_0", 0, b"\x00\xfc"), ("MXFP4", 0, b"\xff"),
    ("F16", 6, b"\x00\x7e"), ("BF16", 4, b"\x80\x7f"), ("F32", 8, b"\x00\x00\xc0\xff"),
])  # fmt: skip
def test_weights_that_are_not_finite_are_refused_in_every_format(
    kind: str, at: int, value: bytes, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", replace(TINY, kind=kind))
    checkpoint = resolve(str(path), cache=tmp_path / "cache")
    place = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"].offset + at
    with path.open("r+b") as file:
        file.seek(place)
        file.write(value)
    with raises_code(CheckpointError, "weights_not_finite"):
        load_backend(resolve(str(path), cache=tmp_path / "cache"), SETTINGS)


def test_keys_and_values_of_two_arithmetics_never_meet(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", MIXED)
    checkpoint = resolve(str(path), cache=tmp_path / "cache")
    names = {
        open_engine(checkpoint, settings, QueueConfig(), bytes(32)).info.namespace("group")
        for settings in (
            SETTINGS, replace(SETTINGS, arithmetic="float"), replace(SETTINGS, dtype="float32"),
            replace(SETTINGS, dtype="bfloat16"), replace(SETTINGS, kv_dtype="bfloat16"),
        )
    }  # fmt: skip
    assert len(names) == 5
