"""What `quire info` says of a model whose layers keep a state, and who runs it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire import cli
from quire.backends.load import load_backend
from quire.checkpoints import resolve
from quire.checkpoints.families import feature_phrases, read_shape
from quire.cli.models.info import facts_of
from quire.config import ModelSettings
from quire.errors import ConfigError
from tests.support.machine.process_memory import AMPLE_BYTES
from tests.support.models.plain_hybrids import CONFIGS, write_hybrid
from tests.support.models.tiny_hybrids import make_hybrid

GIB = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home and no settings."""
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "XDG_")):
            monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)


def told(folder: Path, *words: str) -> str:
    result = CliRunner().invoke(cli.app, ["info", str(folder), *words], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def large(name: str, **fields: Any) -> dict[str, Any]:
    """The config of a model with 30 layers of which 24 keep a state."""
    kinds = (["linear_attention"] * 4 + ["full_attention"]) * 6
    return {**CONFIGS[name], "num_hidden_layers": 30, "layer_types": kinds, **fields}


def test_info_says_how_many_layers_keep_a_state_and_of_which_kind(tmp_path: Path) -> None:
    out = told(make_hybrid(tmp_path / "model"))
    assert "2 of 3 layers with 0.001 MB of state per sequence (short convolutions)" in out
    assert "on the CPU backend, with quire's own kernels" in out
    assert ["state", "1,024", "bytes", "per", "sequence"] in [line.split() for line in out.splitlines()]
    assert "float32 KV and slots for states, and 0.5 GiB for libraries" in out
    assert "earlier layer" not in out


@pytest.mark.parametrize(("config", "words"), [
    (CONFIGS["delta"], ("2 of 3 layers with 0.082 MB of state per sequence (gated delta nets)", "query and key norms")),
    (
        CONFIGS["ssm"],
        ("2 of 3 layers with 0.025 MB of state per sequence (Mamba-2)", "1 layers without position encoding"),
    ),
    (
        large("delta", linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128),
        ("24 of 30 layers with 52 MB of state per sequence (gated delta nets)", "query and key norms"),
    ),
    (
        large("delta", linear_num_value_heads=96, linear_key_head_dim=128, linear_value_head_dim=128),
        ("24 of 30 layers with 155 MB of state per sequence (gated delta nets)", "query and key norms"),
    ),
])  # fmt: skip
def test_parts_of_a_hybrid_are_told_in_words(config: dict[str, Any], words: tuple[str, ...]) -> None:
    assert tuple(feature_phrases(read_shape(config))) == words


def test_layers_that_keep_a_state_take_no_keys_and_values(tmp_path: Path) -> None:
    facts = json.loads(told(make_hybrid(tmp_path / "model"), "--json"))
    assert facts["kv_bytes_per_token"] == {"float32": 2 * 32 * 4, "bfloat16": 2 * 32 * 2}
    assert facts["state_bytes_per_sequence"] == 4 * 2 * (2 * 64)


def test_what_fits_leaves_room_for_states_as_loading_does(tmp_path: Path) -> None:
    write_hybrid(tmp_path, CONFIGS["delta"])
    facts = facts_of(resolve(str(tmp_path)), ModelSettings(max_running=8))
    assert facts.fits is not None
    for fit in facts.fits:
        left_bytes = fit.memory_gib * GIB - GIB // 2 - facts.weight_bytes - (5 * 8 + 1 + 1) * 81_792
        assert fit.kv_tokens == left_bytes // 256 // 32 * 32


def test_a_plain_model_is_told_nothing_of_states() -> None:
    config = {**CONFIGS["delta"], "model_type": "qwen3", "layer_types": ["full_attention"] * 3}
    shape = read_shape(config)
    assert shape.state_bytes == 0
    assert not any("state" in words for words in feature_phrases(shape))


@pytest.mark.parametrize(("settings", "reason"), [
    ({"backend": "torch"}, "backend is torch"),
    ({"block_size": 8}, "blocks of 16, 32 or 64, got 32 and 8"),
])  # fmt: skip
def test_torch_refuses_a_hybrid_with_the_reason_it_was_asked(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    write_hybrid(tmp_path, CONFIGS["ssm"])
    with pytest.raises(ConfigError, match=f"{reason}; models with recurrent layers run on the CPU backend only"):
        load_backend(resolve(str(tmp_path)), ModelSettings(memory_bytes=AMPLE_BYTES, **settings))
