"""Small models with random weights, one for each architecture, made from transformers' configs when a test needs them.

Odd sizes on purpose: GQA groups of 1, 3, 4 and 8, tied and untied heads, biases, QK-norm, windows shorter than a
prompt, RoPE scalings. Weights are spread wide enough that greedy tokens are seldom ties.
"""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

VOCABULARY_SIZE = 131

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}


def _sizes(hidden: int, heads: int, kv_heads: int, head: int, wide: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head, "intermediate_size": wide,
    }  # fmt: skip


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 128}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}

FAST: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_sizes(48, 6, 2, 8, 88), "tie_word_embeddings": True}),
    "llama-biased": ("llama", {**_sizes(40, 4, 4, 10, 72), "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {**_sizes(64, 8, 1, 8, 96), "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {**_sizes(48, 8, 2, 12, 80), "sliding_window": 40}),
    "qwen2": ("qwen2", {**_sizes(56, 4, 1, 14, 100), "tie_word_embeddings": True, "rope_parameters": LINEAR_ROPE}),
    "qwen2-windows": (
        "qwen2",
        {**_sizes(48, 4, 4, 12, 64), "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_sizes(48, 6, 2, 16, 90), "rope_parameters": YARN_ROPE}),
}
# Shapes that the native kernels take: heads of 32 to 256 in steps of 8.
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-native": ("llama", {**_sizes(96, 6, 2, 32, 160), "tie_word_embeddings": True}),
    "mistral-native": ("mistral", {**_sizes(80, 4, 4, 40, 120), "sliding_window": 45}),
    "qwen3-native": ("qwen3", {**_sizes(64, 8, 1, 64, 96), "rope_parameters": YARN_ROPE}),
    "qwen2-native": ("qwen2", {**_sizes(96, 4, 1, 48, 96), "tie_word_embeddings": True}),
}
FAST |= NATIVE
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {**_sizes(48, 4, 2, 16, 80), "sliding_window": 36, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {**_sizes(48, 6, 2, 8, 56), "num_local_experts": 4, "num_experts_per_tok": 2}),
}
MODELS = FAST | ADAPTED


@cache
def directory(name: str) -> Path:
    """A Hugging Face directory of this model; the same for the whole run."""
    logging.disable_progress_bar()
    kind, fields = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**_COMMON, **fields}))
    _spread(model)
    path = Path(mkdtemp(prefix=f"quire-{name}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    model.save_pretrained(path)
    return path


@cache
def reference(name: str) -> PreTrainedModel:
    """The same model as transformers runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.float32).eval()
    return model


def _spread(model: PreTrainedModel) -> None:
    """Biases and norms start at 0 and 1: a mix-up of them would not show."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value.add_(torch.randn(value.shape, generator=generator) * (0.1 if "norm" in name else 0.2))
