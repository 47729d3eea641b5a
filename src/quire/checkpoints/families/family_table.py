"""The families that quire implements. A new family is a row of `FAMILIES`: see CONTRIBUTING, "Add a model family"."""

from dataclasses import replace

from quire.checkpoints.families.family import (
    ExpertNames,
    Family,
    GateActivation,
    HeadNorms,
    NormNames,
    RecurrentKind,
    SlidingRope,
)

NORMS_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
NORMS_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GELU_TANH = ("hidden_activation", "gelu_pytorch_tanh")
EACH_EXPERT = ExpertNames("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
SHARED_EXPERT = replace(
    EACH_EXPERT, shared_size="shared_expert_intermediate_size", dense_gate="mlp.shared_expert_gate.weight"
)
GATED_DELTA = Family(
    norm_offset=1.0,
    head_norms=HeadNorms.HEAD,
    has_output_gate=True,
    recurrent=RecurrentKind.DELTA,
    stored_names={"mlp.shared_expert.": "mlp."},
    ignored="mtp.",
    defaults={
        "full_attention_interval": 4, "partial_rotary_factor": 0.25, "head_dim": 256, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    },
)  # fmt: skip
"""Qwen3-Next and its successors."""
SHORT_CONVOLUTION = Family(
    norms=NormNames("operator_norm", None, "ffn_norm"),
    head_norms=HeadNorms.HEAD,
    query_bias=False,
    out_bias=False,
    recurrent=RecurrentKind.CONVOLUTION,
    aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size", "norm_eps": "rms_norm_eps"},
    stored_names={
        "model.embedding_norm.": "model.norm.", "self_attn.out_proj.": "self_attn.o_proj.",
        "self_attn.q_layernorm.": "self_attn.q_norm.", "self_attn.k_layernorm.": "self_attn.k_norm.",
        "feed_forward.w1.": "mlp.gate_proj.", "feed_forward.w3.": "mlp.up_proj.", "feed_forward.w2.": "mlp.down_proj.",
    },
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 8, "conv_L_cache": 3, "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
)  # fmt: skip
"""LFM2."""

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(query_bias=False, out_bias=False),
    "qwen2": Family(query_bias=True, out_bias=False),
    "qwen3": Family(head_norms=HeadNorms.HEAD),
    "qwen3_moe": Family(
        head_norms=HeadNorms.HEAD,
        experts=EACH_EXPERT,
        defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
    ),
    "gpt_oss": Family(
        has_sinks=True,
        gate=GateActivation.CLAMPED_SILU,
        full_interval=2,
        experts=ExpertNames(
            "mlp.router", gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", is_transposed=True,
            size="intermediate_size",
        ),
        defaults={
            "attention_bias": True, "sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8,
            "num_experts_per_tok": 4, "norm_topk_prob": True, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
            },
        },
    ),
    "gemma3_text": Family(
        norms=NORMS_AROUND,
        norm_offset=1.0,
        head_norms=HeadNorms.HEAD,
        gate=GateActivation.GELU_TANH,
        activation=GELU_TANH,
        sliding_rope=SlidingRope.LOCAL,
        full_interval=6,
        scales_embedding=True,
        defaults={
            "tie_word_embeddings": True, "sliding_window": 4096, "query_pre_attn_scalar": 256, "head_dim": 256,
            "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "rms_norm_eps": 1e-6,
        },
    ),
    "gemma4_text": Family(
        norms=NORMS_AROUND,
        head_norms=HeadNorms.HEAD,
        has_value_norm=True,
        gate=GateActivation.GELU_TANH,
        activation=GELU_TANH,
        full_interval=6,
        experts=ExpertNames(
            "router.proj", gate_up="experts.gate_up_proj", down="experts.down_proj", num_used="top_k_experts",
            is_beside_mlp=True,
        ),
        scales_embedding=True,
        defaults={
            "tie_word_embeddings": True, "sliding_window": 512, "head_dim": 256, "global_head_dim": 512,
            "num_key_value_heads": 4, "hidden_size_per_layer_input": 256, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
            "attention_multiplier": 1.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0
                },
            },
        },
    ),
    "ministral3": Family(
        query_bias=False,
        out_bias=False,
        defaults={
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 16384, "mscale_all_dim": 1.0, "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "phi3": Family(query_bias=False, out_bias=False, is_fused=True),
    "smollm3": Family(
        defaults={
            "tie_word_embeddings": True, "no_rope_layer_interval": 4, "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0, "rms_norm_eps": 1e-6,
        },
    ),
    "glm4": Family(
        norms=NormNames(attention="post_self_attn_layernorm", after="post_mlp_layernorm"),
        out_bias=False,
        has_fused_gate=True,
        is_interleaved=True,
        defaults={
            "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
    ),
    "granite": Family(defaults={"attention_multiplier": 1.0, "rms_norm_eps": 1e-6}),
    "olmo2": Family(norms=NORMS_AFTER, head_norms=HeadNorms.WHOLE, defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Family(
        norms=NORMS_AFTER,
        head_norms=HeadNorms.WHOLE,
        sliding_rope=SlidingRope.UNSCALED,
        full_interval=4,
        defaults={"sliding_window": 4096, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
    ),
    "mixtral": Family(
        query_bias=False,
        out_bias=False,
        experts=ExpertNames(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2", size="intermediate_size",
        ),
        defaults={
            "num_experts_per_tok": 2, "norm_topk_prob": True, "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3_next": replace(GATED_DELTA, experts=SHARED_EXPERT, has_grouped_inputs=True),
    "qwen3_5_text": GATED_DELTA,
    "qwen3_5_moe_text": replace(GATED_DELTA, experts=SHARED_EXPERT),
    "lfm2": SHORT_CONVOLUTION,
    "lfm2_moe": replace(
        SHORT_CONVOLUTION,
        experts=ExpertNames(
            "feed_forward.gate", "feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3",
            "feed_forward.experts.{}.w2", is_sigmoid=True, choice_bias="feed_forward.expert_bias",
        ),
        defaults={
            **SHORT_CONVOLUTION.defaults, "block_auto_adjust_ff_dim": False, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792, "num_dense_layers": 2, "norm_topk_prob": True, "use_expert_bias": True,
        },
    ),
    "granitemoehybrid": Family(
        recurrent=RecurrentKind.STATE_SPACE,
        has_fused_gate=True,
        is_split_in_gguf=True,
        rope_switch="position_embedding_type",
        dense_size="shared_intermediate_size",
        aliases={"layers_block_type": "layer_types"},
        stored_names={"shared_mlp.input_linear.": "mlp.gate_up_proj.", "shared_mlp.output_linear.": "mlp.down_proj."},
        experts=ExpertNames(
            "block_sparse_moe.router.layer", gate_up="block_sparse_moe.input_linear.weight",
            down="block_sparse_moe.output_linear.weight", size="intermediate_size",
            shared_size="shared_intermediate_size",
        ),
        defaults={
            "attention_multiplier": 1.0, "rms_norm_eps": 1e-6, "num_experts_per_tok": 2, "norm_topk_prob": True,
            "num_local_experts": 8, "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
    ),
}  # fmt: skip
