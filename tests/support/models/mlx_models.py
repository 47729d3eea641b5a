"""Small models with random weights made by mlx-lm's own classes, as its converter writes them; and what mlx-lm itself
says to a prompt. Everything that calls MLX runs in the thread of whoever calls."""

import atexit
import importlib
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from quire.backends.mlx.imported import utils
from quire.backends.mlx.kv_store import KVStore
from quire.backends.mlx.load import legacy_config_fields
from quire.backends.mlx.runner import MlxRunner
from quire.backends.protocol import Runner
from quire.checkpoints.strict_json import read_json_object

VOCABULARY_SIZE = 131
SPREAD = 6.0
"""Weights are spread wide enough that greedy tokens are seldom ties."""
SPREADS = {"gemma4": 0.5}
"""Of models that say their last token again and again if their embeddings are as wide as the others'."""
SETTINGS: dict[str, Any] = {
    "memory_bytes": 8 << 30, "block_size": 16, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024,
    "backend": "mlx",
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3,
    "intermediate_size": 192, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 21, "num_hidden_layers": 7, "rope_global_base_freq": 1_000_000.0,
         "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "rope_scaling": None,
         "layer_types": [_SLIDING, _FULL, _SLIDING], "tie_word_embeddings": False},
    ),
    "gemma4": (
        "gemma4_text",
        {"num_hidden_layers": 8, "global_head_dim": 64, "hidden_size_per_layer_input": 32,
         "vocab_size_per_layer_input": VOCABULARY_SIZE, "num_kv_shared_layers": 3, "sliding_window": 21,
         "use_double_wide_mlp": True,
         "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL]},
    ),
    "phi3": ("phi3", {"rope_scaling": None}),
    "granite": (
        "granite",
        {"logits_scaling": 2.0, "attention_multiplier": 0.11, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
         "attention_bias": False, "mlp_bias": False},
    ),
}  # fmt: skip
"""Six families and two more, in their own layouts: grouped heads, experts, windows, sinks, layers that share KV."""


@cache
def made_by_mlx(name: str, bits: int | None = None) -> Path:
    """A directory as mlx-lm writes it, quantised to so many bits in groups of 32."""
    kind, fields = MODELS[name]
    config = {**_COMMON, "model_type": kind, **fields}
    classes = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(3)
    model = classes.Model(classes.ModelArgs.from_dict(config))
    spread = SPREADS.get(name, SPREAD)
    model.update(tree_map(lambda one: one * spread if one.ndim > 1 else one, model.parameters()))
    if bits is not None:
        model, config = utils.quantize_model(model, config, 32, bits)
    folder = Path(mkdtemp(prefix="quire-mlx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    utils.save_model(folder, model, donate_model=False)
    utils.save_config(config, folder / "config.json")
    return folder


class Reference:
    """What mlx-lm answers by itself."""

    def __init__(self, directory: Path) -> None:
        older = legacy_config_fields(read_json_object(directory / "config.json"))
        self.model, _ = utils.load_model(directory, model_config=older)

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens."""
        from mlx_lm.generate import generate_step  # noqa: PLC0415 - behind the import with care

        return [int(token) for token, _ in generate_step(mx.array(list(prompt)), self.model, max_tokens=num_tokens)]

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """Behind the last of these tokens."""
        found: mx.array = self.model(mx.array(list(tokens))[None])[0, -1].astype(mx.float32)
        return found


def mlx_runners(first: Runner) -> Callable[[], Runner]:
    """Makes runners like this one, each with a pool of its own, over the same model."""
    assert isinstance(first, MlxRunner)
    (model, pool), capacity, owner = first._opened(), first.capacity, first._mlx_thread
    shape = (capacity.num_blocks, capacity.block_size, pool.dtype)
    return lambda: MlxRunner(owner, model, owner.call(lambda: KVStore(model.kv_shapes, *shape)), capacity)
