"""GGUF architectures of the supported families: their model types, metadata keys and tensor names.

keys      metadata keys begin with the architecture's name; the tables here contain the rest of each key
tensors   GGUF names norms by their function, Hugging Face by their position; a family's `norms` define the mapping
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.checkpoints.families import FAMILIES
from quire.checkpoints.families.decoder_shape import TILED
from quire.checkpoints.families.family import ExpertNames, Family, RecurrentKind
from quire.checkpoints.families.recurrent_tensors import NAME_PREFIXES

SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
SOFT_CAPS = {"final_logit_softcapping": "final_logit_softcapping"}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERT_SIZES = {**EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"}
DELTA_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval", "nextn_predict_layers": "num_nextn_predict_layers",
}  # fmt: skip
SHARED_EXPERT_SIZES = {**EXPERT_SIZES, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.norm.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A GGUF architecture and how its metadata maps to config.json."""

    model_type: str
    is_permuted: bool = False
    """Whether query and key rows are stored in another order, for interleaved RoPE, than in Hugging Face's files."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Float keys -> fields of config.json."""
    counts: Mapping[str, str] = field(default_factory=dict)  # integer keys -> fields of config.json
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that GGUF files omit, with their values."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", is_permuted=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        counts=EXPERT_SIZES,
        extra={"norm_topk_prob": True},
    ),
    "gpt-oss": Architecture(model_type="gpt_oss", counts=EXPERTS),
    "gemma3": Architecture(model_type="gemma3_text", numbers=SOFT_CAPS),
    "gemma4": Architecture(
        model_type="gemma4_text",
        numbers=SOFT_CAPS,
        counts={
            "expert_count": "num_experts", "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size", "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
    ),
    "mistral3": Architecture(model_type="ministral3", is_permuted=True),
    "phi3": Architecture(model_type="phi3"),
    "smollm3": Architecture(model_type="smollm3", is_permuted=True),
    "glm4": Architecture(model_type="glm4"),
    "granite": Architecture(model_type="granite", is_permuted=True, numbers=SCALES),
    "olmo2": Architecture(model_type="olmo3"),
    "qwen3next": Architecture(model_type="qwen3_next", counts={**DELTA_SIZES, **SHARED_EXPERT_SIZES}),
    "qwen35": Architecture(model_type="qwen3_5_text", counts=DELTA_SIZES, extra={TILED: True}),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text", counts={**DELTA_SIZES, **SHARED_EXPERT_SIZES}, extra={TILED: True}
    ),
    "lfm2": Architecture(
        model_type="lfm2", counts={"shortconv.l_cache": "conv_L_cache"}, extra={"block_auto_adjust_ff_dim": False}
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        counts={
            **EXPERT_SIZES, "shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers",
        },
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        is_permuted=True,
        numbers=SCALES,
        counts={
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size", "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
        },
    ),
}  # fmt: skip
MIXTRAL = Architecture(model_type="mixtral", is_permuted=True, counts=EXPERTS, extra={"norm_topk_prob": True})
"""Used for files that declare the architecture llama but have experts."""


def tensor_name(model_type: str, name: str) -> str | None:
    """Return Hugging Face's name of this tensor in this family, or None if the tensor is unknown."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    # isdecimal alone accepts digits of other scripts, for which int() would map two names to one.
    if block != "blk" or not (index.isascii() and index.isdecimal()) or index != str(int(index[:9])):
        return None
    name_in_layer = _layer_names(FAMILIES[model_type]).get(rest)
    return None if name_in_layer is None else f"model.layers.{index}.{name_in_layer}"


def _layer_names(family: Family) -> dict[str, str]:
    norms = family.norms
    names = {
        "attn_norm.weight": f"{norms.input}.weight",
        "post_attention_norm.weight": f"{norms.attention or norms.mlp}.weight",
        "ffn_norm.weight": f"{norms.mlp}.weight",
        "post_ffw_norm.weight": f"{norms.after}.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "attn_sinks.weight": "self_attn.sinks",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate.weight": "per_layer_input_gate.weight",
        "proj.weight": "per_layer_projection.weight",
        "post_norm.weight": "post_per_layer_input_norm.weight",
    }
    projections = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.gate_up_proj" if family.is_fused or family.has_fused_gate else "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    if family.recurrent is not None:
        names |= _recurrent_names(family.recurrent, NAME_PREFIXES[family.recurrent])
        projections.pop("attn_qkv")
    if family.is_split_in_gguf:
        projections["ffn_up"] = "mlp.up_proj"
    if family.experts is not None:
        projections |= {"ffn_gate_inp": family.experts.router}
        if family.experts.shared_size:
            projections |= {f"ffn_{kind}_shexp": f"mlp.{kind}_proj" for kind in ("gate", "up", "down")}
        projections |= {f"ffn_{kind}_exps": f"mlp.experts.{kind}_proj" for kind in ("gate", "up", "down")}
        names |= _expert_names(family.experts)
    for name, target in projections.items():
        for kind in ("weight", "bias"):
            names.setdefault(f"{name}.{kind}", f"{target}.{kind}")
    return names


def _expert_names(experts: ExpertNames) -> dict[str, str]:
    names = {}
    if experts.shared_size:
        names["ffn_gate_inp_shexp.weight"] = experts.dense_gate
    if experts.choice_bias:
        names["exp_probs_b.bias"] = experts.choice_bias
    if experts.is_beside_mlp:
        names |= {
            "ffn_gate_up_exps.weight": experts.gate_up, "ffn_down_exps.weight": experts.down,
            "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
            "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
            "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
        }  # fmt: skip
    return names


def _recurrent_names(kind: RecurrentKind, prefix: str) -> dict[str, str]:
    if kind is RecurrentKind.CONVOLUTION:
        return {f"shortconv.{name}.weight": f"{prefix}{name}.weight" for name in ("in_proj", "conv", "out_proj")}
    weights = {
        "ssm_in": "in_proj", "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_ba": "in_proj_ba",
        "ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a", "ssm_out": "out_proj", "ssm_conv1d": "conv1d",
        "ssm_norm": "norm",
    }  # fmt: skip
    names = {f"{name}.weight": f"{prefix}{target}.weight" for name, target in weights.items()}
    return names | {
        "ssm_conv1d.bias": f"{prefix}conv1d.bias", "ssm_dt.bias": f"{prefix}dt_bias", "ssm_a": f"{prefix}A_log",
        "ssm_d": f"{prefix}D",
    }  # fmt: skip
