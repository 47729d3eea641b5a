"""Small models with random weights, one for each architecture, made from transformers' configs when a test needs them.

Odd sizes on purpose: GQA groups of 1, 3, 4 and 8, tied and untied heads, biases, QK-norm, windows shorter than a
prompt, RoPE scalings. Weights are spread wide enough that greedy tokens are seldom ties.
"""

import atexit
import shutil
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from tests.support.machine.process_memory import kept_for_this_file

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
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
TODAY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", {**_sizes(96, 6, 2, 32, 160), **_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {**_sizes(64, 4, 1, 32, 96), **_EXPERTS, "mlp_only_layers": [1], "moe_intermediate_size": 40},
    ),
    "gpt-oss": (
        "gpt_oss",
        {**_sizes(96, 6, 2, 32, 64), "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "gemma3": (
        "gemma3_text",
        {**_sizes(96, 4, 2, 32, 120), "sliding_window": 21, "query_pre_attn_scalar": 32, "num_hidden_layers": 7,
         "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    ),
    "gemma4": (
        "gemma4_text",
        {**_sizes(96, 4, 2, 32, 120), "sliding_window": 21, "num_hidden_layers": 8, "global_head_dim": 64,
         "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": VOCABULARY_SIZE, "num_kv_shared_layers": 3,
         "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                         "full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma4-moe": (
        "gemma4_text",
        {**_sizes(96, 4, 2, 32, 120), "sliding_window": 21, "num_hidden_layers": 6, "global_head_dim": 48,
         "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40},
    ),
    "ministral3": (
        "ministral3",
        {**_sizes(96, 6, 2, 32, 160),
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "original_max_position_embeddings": 16, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "phi4": ("phi3", {**_sizes(128, 4, 2, 32, 120), "sliding_window": None}),
    "phi4-partial": (
        "phi3",
        {**_sizes(128, 4, 2, 32, 120),
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
    "smollm3": ("smollm3", {**_sizes(96, 6, 2, 32, 120), "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "glm4": (
        "glm4",
        {**_sizes(96, 6, 2, 32, 120), "attention_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "granite": (
        "granite",
        {**_sizes(192, 6, 2, 32, 120), "embedding_multiplier": 3.0, "attention_multiplier": 0.11,
         "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "olmo3": (
        "olmo3",
        {**_sizes(96, 6, 2, 32, 120), "sliding_window": 20, "num_hidden_layers": 5, "rope_parameters": {
            "full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "olmo2": ("olmo2", {**_sizes(128, 4, 2, 32, 120), "num_hidden_layers": 2}),
    "mixtral": ("mixtral", {**_sizes(96, 6, 2, 32, 56), "num_local_experts": 5, "num_experts_per_tok": 2}),
}  # fmt: skip
"""Families that came later, in shapes that the kernels take."""
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
}
_DELTA_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
_CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "qwen3_next",
        {**_sizes(96, 4, 2, 64, 160), **_EXPERTS, **_DELTA, **_DELTA_ROPE, "shared_expert_intermediate_size": 56},
    ),
    "qwen3-next-mixed": (
        "qwen3_next",
        {**_sizes(80, 4, 1, 32, 96), **_EXPERTS, **_DELTA, **_DELTA_ROPE, "shared_expert_intermediate_size": 40,
         "mlp_only_layers": [1], "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3},
    ),
    "qwen3.5": ("qwen3_5_text", {**_sizes(96, 4, 2, 64, 160), **_DELTA, **_DELTA_ROPE, "tie_word_embeddings": True}),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {**_sizes(96, 4, 2, 64, 160), **_EXPERTS, **_DELTA, **_DELTA_ROPE, "shared_expert_intermediate_size": 56,
         "linear_num_key_heads": 3},
    ),
    "lfm2": ("lfm2", {**_sizes(128, 4, 2, 32, 120), **_CONVOLUTIONS, "block_multiple_of": 8}),
    "lfm2-moe": (
        "lfm2_moe",
        {**_sizes(128, 4, 2, 32, 120), **_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    ),
    "lfm2-moe-scaled": (
        "lfm2_moe",
        {**_sizes(96, 3, 1, 32, 88), **_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 2, "routed_scaling_factor": 1.7,
         "use_expert_bias": False},
    ),
    "granite4": (
        "granitemoehybrid",
        {**_sizes(96, 3, 1, 32, 72), "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"],
         "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 56, "mamba_n_heads": 8,
         "mamba_d_head": 24, "mamba_d_state": 20, "mamba_n_groups": 1, "embedding_multiplier": 3.0,
         "attention_multiplier": 0.11, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "granite4-dense": (
        "granitemoehybrid",
        {**_sizes(128, 4, 2, 32, 72), "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
         "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 88, "mamba_n_heads": 4,
         "mamba_d_head": 64, "mamba_d_state": 16, "attention_multiplier": 0.2},
    ),
    "granite4-turned": (
        "granitemoehybrid",
        {**_sizes(128, 4, 2, 32, 72), "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
         "num_local_experts": 4, "num_experts_per_tok": 1, "shared_intermediate_size": 88, "mamba_n_heads": 16,
         "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "position_embedding_type": "rope",
         "attention_multiplier": 0.2, "mamba_conv_bias": False, "mamba_proj_bias": True},
    ),
}  # fmt: skip
"""Families with recurrent layers."""
WIDE_HYBRID = {
    "hybrid-wide": (
        "qwen3_5_text",
        {**_sizes(256, 4, 2, 64, 320), **_DELTA, **_DELTA_ROPE, "linear_num_key_heads": 4, "linear_num_value_heads": 16,
         "linear_key_head_dim": 64, "linear_value_head_dim": 64, "vocab_size": 4096, "num_hidden_layers": 12,
         "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3},
    ),
}  # fmt: skip
"""One whose states take a share of the memory: 2.5 MB each."""
FAST |= NATIVE
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {**_sizes(48, 4, 2, 16, 80), "sliding_window": 36, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "mixtral-adapted": ("mixtral", {**_sizes(48, 6, 2, 8, 56), "num_local_experts": 4, "num_experts_per_tok": 2}),
}
MODELS = FAST | ADAPTED | TODAY | HYBRIDS | WIDE_HYBRID


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


@kept_for_this_file
def reference(name: str) -> PreTrainedModel:
    """The same model as transformers runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.float32).eval()
    for module in model.modules():
        groups, norm = getattr(module, "n_groups", 1), getattr(module, "norm", None)
        if groups > 1 and norm is not None and not hasattr(norm, "group_size"):
            norm.forward = partial(_grouped_norm, norm, groups)
    return model


def _grouped_norm(norm: Any, groups: int, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Each group by itself, as Mamba-2's authors and llama.cpp have it; transformers since 5.23, before that all groups
    at once. Files with more than one group are not published."""
    gated = (rows.float() * functional.silu(gate.float())).reshape(*rows.shape[:-1], groups, -1)
    squares = gated.square().mean(-1, keepdim=True)
    normed = (gated * torch.rsqrt(squares + norm.variance_epsilon)).reshape(rows.shape).to(rows.dtype)
    weighed: torch.Tensor = norm.weight * normed
    return weighed


def _spread(model: PreTrainedModel) -> None:
    """Biases and norms start at 0 and 1: a mix-up of them would not show."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "expert_bias" in name:
                value.copy_(torch.rand(value.shape, generator=generator))
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value.add_(torch.randn(value.shape, generator=generator) * (0.1 if "norm" in name else 0.2))
