"""Which models MLX takes and which it refuses, in which words; which backend `auto` takes; what is told of a model."""

import gc
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import quire.backends
from quire.backends import load as registry
from quire.backends.cpu.runner import CpuRunner
from quire.backends.load import load_backend
from quire.backends.loaded import LoadedRunner
from quire.backends.mlx.decoder import Decoder
from quire.backends.mlx.imported import utils
from quire.backends.mlx.load import EXPERIMENTAL
from quire.backends.mlx.runner import MlxRunner
from quire.checkpoints import Checkpoint, resolve
from quire.config import Backend, ModelSettings
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code
from tests.support.machine.process_memory import kept_for_this_file
from tests.support.models import architectures, mlx_models
from tests.support.models.mlx_models import made_by_mlx
from tests.support.models.tiny_models import write_gguf

SETTINGS = ModelSettings(
    memory_bytes=8 << 30, block_size=16, max_step_tokens=32, max_running=4, max_sequence_tokens=128
)
ON_MLX = replace(SETTINGS, backend="mlx")
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "v_head_dim": 32, "qk_nope_head_dim": 16,
    "n_routed_experts": None, "first_k_dense_replace": 0, "tie_word_embeddings": False, "num_key_value_heads": 4,
    "rope_scaling": None,
}  # fmt: skip


@kept_for_this_file
def checkpoint_of(name: str) -> Checkpoint:
    return resolve(str(architectures.directory(name)))


@kept_for_this_file
def checkpoint_by_mlx(name: str, bits: int | None = None) -> Checkpoint:
    return resolve(str(made_by_mlx(name, bits)))


@kept_for_this_file
def loaded(name: str) -> LoadedRunner:
    return load_backend(checkpoint_by_mlx(name), ON_MLX)


def changed(folder: Path, **fields: Any) -> Checkpoint:
    """A copy of a small model with another config.json."""
    target = folder / "model"
    shutil.copytree(made_by_mlx("llama"), target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return resolve(str(target))


# -- what is refused --


def test_what_mlx_does_not_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    packed = resolve(str(write_gguf(tmp_path / "tiny.gguf")), cache=tmp_path / "cache")
    plain = checkpoint_by_mlx("llama")
    for checkpoint, settings, reason in (
        (checkpoint_of("lfm2"), ON_MLX, "attention layers only, the model has recurrent layers"),
        (packed, ON_MLX, r"reads directories of safetensors, got the GGUF file tiny\.gguf"),
        (plain, replace(ON_MLX, kv_dtype="int8"), "float32, bfloat16, float16 or auto for the MLX backend, got int8"),
        (plain, replace(ON_MLX, arithmetic="int8"), "the MLX backend does not support arithmetic int8"),
        (plain, replace(ON_MLX, device="mps"), "which selects its device itself, got mps"),
    ):
        with pytest.raises(ConfigError, match=f"{reason}; set backend") as refused:
            load_backend(checkpoint, settings)
        assert refused.value.code == "not_for_mlx"


def test_a_model_whose_attention_cannot_be_replaced_is_refused() -> None:
    with raises_code(CheckpointError, "attention_not_replaced"):
        load_backend(checkpoint_of("gemma2"), ON_MLX)


def test_a_model_that_keeps_other_things_than_keys_and_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mlx_models.MODELS, "mla", ("deepseek_v3", MLA))
    with raises_code(CheckpointError, "invalid_checkpoint"):
        load_backend(checkpoint_by_mlx("mla"), ON_MLX)


def test_caches_that_are_no_keys_and_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class StrangeCache:
        """Of nobody."""

    model: Any = utils.load_model(made_by_mlx("llama"))[0]
    monkeypatch.setattr(type(model), "make_cache", lambda _: [StrangeCache()], raising=False)
    with raises_code(CheckpointError, "unknown_cache_type"):
        Decoder(model)


def test_a_model_that_attends_otherwise_than_it_is_told_is_refused() -> None:
    """The windows are made up: the model sees everything."""
    model: Any = utils.load_model(made_by_mlx("llama"))[0]
    assert Decoder(model).windows == (None, None, None)
    with raises_code(CheckpointError, "attention_differs"):
        Decoder(model, (3, None, None))


def test_code_that_a_directory_brings_is_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    checkpoint = changed(tmp_path, model_file="code.py")
    (checkpoint.directory / "code.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
    )
    with raises_code(CheckpointError, "mlx_cannot_load"):
        load_backend(checkpoint, ON_MLX)
    assert not marker.exists()


@pytest.mark.parametrize("fields", [{"model_type": "never-heard-of"}, {"num_hidden_layers": 2}])
def test_what_mlx_lm_cannot_load_is_told_in_a_sentence(tmp_path: Path, fields: dict[str, Any]) -> None:
    checkpoint = changed(tmp_path)
    file = checkpoint.directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    told = replace(checkpoint, config=checkpoint.config | fields)
    with raises_code(CheckpointError, "mlx_cannot_load"):
        load_backend(told, ON_MLX)


def test_a_model_that_asks_its_cache_for_more_than_it_has_is_refused(tmp_path: Path) -> None:
    """Here for how long the text is, as one number: rows are of many texts."""
    with raises_code(CheckpointError, "mlx_needs_own_cache"):
        load_backend(changed(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}), ON_MLX)


def test_a_budget_that_does_not_hold_the_model_is_refused() -> None:
    with raises_code(ConfigError, "weights_exceed_memory"):
        load_backend(checkpoint_by_mlx("llama"), replace(ON_MLX, memory_bytes=100 << 20))


# -- which backend --


@pytest.mark.parametrize(
    ("system", "machine", "is_one"),
    [("darwin", "arm64", True), ("darwin", "x86_64", False), ("linux", "arm64", False), ("linux", "aarch64", False)],
)
def test_apple_silicon_is_a_mac_with_its_own_processor(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, is_one: bool
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", system)
        patched.setattr(platform, "machine", lambda: machine)
        found = registry._is_on_apple_silicon()
    assert found is is_one


@pytest.fixture
def on_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_on_apple_silicon", lambda: True)


@pytest.mark.usefixtures("on_apple_silicon")
def test_on_apple_silicon_auto_takes_mlx() -> None:
    found = load_backend(checkpoint_of("llama-native"), SETTINGS)
    assert isinstance(found.runner, MlxRunner)
    assert found.notes == (EXPERIMENTAL,)


@pytest.mark.usefixtures("on_apple_silicon")
@pytest.mark.parametrize(
    ("name", "words"),
    [("lfm2", "not using MLX: the MLX backend runs attention layers only, the model has recurrent layers"),
     ("qwen2-native", "not using MLX: mlx-lm cannot load this qwen2 model: ")],
)  # fmt: skip
def test_on_apple_silicon_the_cpu_backend_runs_what_mlx_refuses_and_says_why(name: str, words: str) -> None:
    found = load_backend(checkpoint_of(name), SETTINGS)
    assert isinstance(found.runner, CpuRunner)
    assert found.notes[0].startswith(words)


@pytest.mark.usefixtures("on_apple_silicon")
def test_on_apple_silicon_a_backend_that_is_asked_for_is_taken() -> None:
    found = load_backend(checkpoint_of("llama-native"), replace(SETTINGS, backend="cpu"))
    assert isinstance(found.runner, CpuRunner)
    assert found.notes == ()


@pytest.mark.usefixtures("on_apple_silicon")
def test_on_apple_silicon_without_mlx_lm_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _name: None)
    found = load_backend(checkpoint_of("llama-native"), SETTINGS)
    assert isinstance(found.runner, CpuRunner)
    assert found.notes == ()


def test_elsewhere_auto_does_not_take_mlx() -> None:
    found = load_backend(checkpoint_of("llama-native"), SETTINGS)
    assert isinstance(found.runner, CpuRunner)
    assert found.notes == ()


@pytest.mark.parametrize(("name", "bits"), [("llama", 4), ("qwen3-moe", None)])
def test_weights_as_mlx_lm_writes_them_are_run_by_mlx_anywhere(name: str, bits: int | None) -> None:
    assert isinstance(load_backend(checkpoint_by_mlx(name, bits), SETTINGS).runner, MlxRunner)


@pytest.mark.parametrize(
    ("backend", "code"),
    [("cpu", "not_for_cpu"), ("torch", "weights_need_mlx")],
)  # fmt: skip
def test_no_other_backend_takes_weights_as_mlx_lm_writes_them(backend: Backend, code: str) -> None:
    for bits in (4, 8):
        with raises_code(ConfigError, code):
            load_backend(checkpoint_by_mlx("llama", bits), replace(SETTINGS, backend=backend))


def test_the_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire.backends, "mlx", quire.backends.mlx)  # put back what a second import leaves there
    for name in [name for name in sys.modules if name.startswith("quire.backends.mlx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    checkpoint = checkpoint_by_mlx("llama")
    with raises_code(ConfigError, "mlx_not_installed"):
        load_backend(checkpoint, ON_MLX)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_mlx_without_mlx_lm_is_told_as_the_missing_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    checkpoint = checkpoint_by_mlx(name)
    for module in [module for module in sys.modules if module.partition(".")[0] == "mlx_lm"]:
        monkeypatch.setitem(sys.modules, module, None)
    with raises_code(ConfigError, "mlx_not_installed"):
        load_backend(checkpoint, ON_MLX)


def test_importing_mlx_lm_leaves_the_limit_of_open_files_alone() -> None:
    code = (
        "import resource\nbefore = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import quire.backends.mlx.load\nprint(resource.getrlimit(resource.RLIMIT_NOFILE) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


# -- what is told and held --


def test_a_model_says_that_mlx_is_experimental_and_what_fits() -> None:
    found = loaded("llama")
    assert found.notes == (EXPERIMENTAL,)
    assert found.memory_plan.summary.startswith("memory 8.00 GiB: model and libraries ")
    assert found.memory_plan.summary.endswith("32 blocks of 16 = 512 tokens: 4 sequences of 128 or 4 of 128")
    assert found.kv_layout == "mlx float32"


def test_a_model_with_windows_says_that_it_keeps_all_tokens() -> None:
    assert loaded("gemma3").notes == (
        EXPERIMENTAL,
        "6 of 7 layers have a sliding window; the KV cache keeps all tokens for them",
    )


def test_keys_and_values_are_held_as_the_model_makes_them_or_as_is_asked_for() -> None:
    checkpoint = checkpoint_by_mlx("llama")
    block_bytes = loaded("llama").memory_plan.block_bytes
    halves = (replace(ON_MLX, dtype="bfloat16"), "mlx bfloat16"), (replace(ON_MLX, kv_dtype="float16"), "mlx float16")
    for settings, layout in halves:
        found = load_backend(checkpoint, settings)
        assert found.kv_layout == layout
        assert found.memory_plan.block_bytes * 2 == block_bytes
        assert found.runner.capacity.num_kv_bytes == found.memory_plan.block_bytes


def test_the_pool_is_there_from_the_start_and_close_gives_it_back() -> None:
    checkpoint = checkpoint_by_mlx("llama")
    gc.collect()
    before = mx.get_active_memory()
    found = load_backend(checkpoint, replace(ON_MLX, max_sequence_tokens=1024, max_running=16))
    held = mx.get_active_memory() - before
    pool_bytes = (found.memory_plan.num_blocks + 1) * found.memory_plan.block_bytes
    assert found.memory_plan.num_blocks == 1024
    assert held >= pool_bytes
    found.runner.close()
    gc.collect()
    assert mx.get_active_memory() - before < pool_bytes / 100


def test_what_mlx_holds_and_keeps_for_later_is_bounded() -> None:
    found = load_backend(checkpoint_by_mlx("llama"), ON_MLX)
    limit, kept = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)
    mx.set_memory_limit(limit)
    mx.set_cache_limit(kept)
    assert limit == found.memory_plan.budget_bytes
    assert kept == found.memory_plan.step_bytes


def test_progress_ends_with_every_byte_of_the_files() -> None:
    told: list[tuple[int, int]] = []
    checkpoint = checkpoint_by_mlx("llama")
    load_backend(checkpoint, ON_MLX, lambda done, total: told.append((done, total)))
    num_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    assert told[-1] == (num_bytes, num_bytes)


def test_memory_is_wired_only_where_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines were reported to panic with it: ml-explore/mlx#3186."""
    wired: list[int] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1 << 30})
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    load_backend(checkpoint_of("llama"), ON_MLX).runner.close()
    assert wired == []
    load_backend(checkpoint_of("llama"), replace(ON_MLX, wired_memory=True)).runner.close()
    assert wired == [1 << 30]
