"""Converts GGUF metadata to the fields of Hugging Face's config.json and generation_config.json."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checkpoints.families import FAMILIES, MAX_SIZE
from quire.checkpoints.families.decoder_shape import LAYOUT
from quire.checkpoints.families.family import RecurrentKind
from quire.checkpoints.families.layer_rules import FULL, SLIDING
from quire.checkpoints.families.recurrent import RECURRENT_TYPES
from quire.checkpoints.gguf.architectures import ARCHITECTURES, MIXTRAL, Architecture
from quire.errors import CheckpointError

MODEL_CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gemma4_text": "Gemma4ForCausalLM", "ministral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM", "olmo3": "Olmo3ForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}  # fmt: skip
ROPE_SCALINGS = ("none", "linear", "yarn")
ARITHMETIC_KEYS = (
    "attention.scale", "logit_scale", "residual_scale", "embedding_scale", "expert_count", "expert_shared_count",
    "attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv", "nextn_predict_layers",
)  # fmt: skip
"""Keys that change what a model computes; they are rejected unless the architecture's tables map them."""
GEMMA3_LARGE_LAYERS = 62
"""Layer count of the Gemma 3 model that scales attention scores differently; its files do not record this."""
SAMPLING_KEYS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip
LLAMA3_FACTORS = (8.0, 32.0)
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class Metadata:
    """Typed access to the metadata; a value of the wrong type raises CheckpointError."""

    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        name = self.text("general.architecture")
        if name not in ARCHITECTURES:
            message = f"expected a GGUF file of {', '.join(ARCHITECTURES)}, got {(name or 'nameless')[:40]!r}"
            raise unsupported_model("unsupported_architecture", message)
        return name

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return the string under this key."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise _invalid_key(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under this key."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise _invalid_key(key, "true or false", value)
        return value

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the integer of this key, from `least` to MAX_SIZE."""
        value = self.values.get(key, default)
        if type(value) is not int or not minimum <= value <= MAX_SIZE:
            raise _invalid_key(key, f"a whole number from {minimum} to {MAX_SIZE:,}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive number of this key, rounded to the shortest decimal of its 32-bit float."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < 1e30:
            raise _invalid_key(key, "a positive number", value)
        return shortest_decimal(value)

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """Return the token id of this key; None if the key is missing or has the format's value for "none"."""
        value = self.values.get(key)
        if value is None or value in (-1, 2**32 - 1):
            return None
        if type(value) is not int or not 0 <= value < num_tokens:
            raise _invalid_key(key, f"a token id from 0 to {num_tokens - 1:,}", value)
        return value


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal number that is the same 32-bit float: 1e-05, not 9.999999747378752e-06."""
    single = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == single:
            return short
    return value


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the file's architecture; Mixtral's files declare themselves as llama."""
    arch = metadata.architecture
    return MIXTRAL if arch == "llama" and f"{arch}.expert_count" in metadata.values else ARCHITECTURES[arch]


def config_of(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return config.json; `shapes` are all tensor shapes. `with_rope_factors` adds RoPE factors stored as a tensor."""
    arch, mapping = metadata.architecture, architecture_of(metadata)
    _refuse_arithmetic_keys(metadata, arch, mapping)
    hidden, heads = metadata.count(f"{arch}.embedding_length"), metadata.count(f"{arch}.attention.head_count")
    num_layers = metadata.count(f"{arch}.block_count")
    if "nextn_predict_layers" in mapping.counts:  # layers for token prediction follow the others
        num_layers -= metadata.count(f"{arch}.nextn_predict_layers", 0, minimum=0)
    window = metadata.count(f"{arch}.attention.sliding_window", 0, minimum=0)
    model_type = "mistral" if mapping.model_type == "llama" and window else mapping.model_type
    key, activation = FAMILIES[model_type].activation
    config: dict[str, Any] = {
        LAYOUT: "gguf",
        "architectures": [MODEL_CLASSES[model_type]],
        "model_type": model_type,
        key: activation,
        "hidden_size": hidden,
        "intermediate_size": min(_layer_values(metadata, f"{arch}.feed_forward_length", num_layers)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(_layer_values(metadata, f"{arch}.attention.head_count_kv", num_layers, heads)),
        "max_position_embeddings": metadata.count(f"{arch}.context_length"),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": shapes["token_embd.weight"][0],
        **mapping.extra,
    }
    config |= {
        name: metadata.number(f"{arch}.{key}")
        for key, name in mapping.numbers.items()
        if f"{arch}.{key}" in metadata.values
    }
    config |= {
        name: metadata.count(f"{arch}.{key}", minimum=0)
        for key, name in mapping.counts.items()
        if f"{arch}.{key}" in metadata.values
    }
    config |= _window_fields(metadata, arch, num_layers, window)
    config |= _recurrent_fields(metadata, arch, mapping.model_type, num_layers)
    config |= _head_fields(metadata, arch, max(1, hidden // heads))
    if scaling := _rope_scaling(metadata, arch):
        config["rope_scaling"] = scaling
    return config | _own_fields(metadata, config, shapes)


def _window_fields(metadata: Metadata, arch: str, num_layers: int, window: int) -> dict[str, Any]:
    """Return the sliding window and layer types; the pattern in the file is true for layers with a window."""
    fields: dict[str, Any] = {"sliding_window": window} if window else {}
    if not window and FAMILIES[ARCHITECTURES[arch].model_type].full_interval:
        fields["layer_types"] = [FULL] * num_layers
    if arch.startswith("qwen"):
        fields |= {"use_sliding_window": bool(window), "max_window_layers": 0}
    pattern = metadata.values.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, list) and window:
        fields["layer_types"] = [SLIDING if is_sliding else FULL for is_sliding in pattern[:num_layers]]
    return fields


def _recurrent_fields(metadata: Metadata, arch: str, model_type: str, num_layers: int) -> dict[str, Any]:
    """Return layer types and sizes of recurrent layers, which the file lists or gives zero KV heads."""
    kind = FAMILIES[model_type].recurrent
    if kind is None:
        return {}
    fields: dict[str, Any] = {}
    kv_heads = metadata.values.get(f"{arch}.attention.head_count_kv")
    listed_layers = metadata.values.get(f"{arch}.attention.recurrent_layers")
    is_recurrent = [not one for one in kv_heads] if isinstance(kv_heads, list) else []
    is_recurrent = [bool(one) for one in listed_layers] if isinstance(listed_layers, list) else is_recurrent
    if is_recurrent:
        fields["layer_types"] = [RECURRENT_TYPES[0] if one else FULL for one in is_recurrent[:num_layers]]
    if kind is RecurrentKind.DELTA:
        inner = metadata.count(f"{arch}.ssm.inner_size")
        fields["linear_value_head_dim"] = inner // metadata.count(f"{arch}.ssm.time_step_rank")
    if kind is RecurrentKind.STATE_SPACE:
        fields["mamba_expand"] = metadata.count(f"{arch}.ssm.inner_size") // metadata.count(f"{arch}.embedding_length")
        if metadata.flag(f"{arch}.rope.scaling.finetuned", True):
            fields["position_embedding_type"] = "rope"
    return fields


def _own_fields(metadata: Metadata, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    arch = metadata.architecture
    match config["model_type"]:
        case "gpt_oss":
            return {"rope_scaling": {**config["rope_scaling"], "truncate": False}} if "rope_scaling" in config else {}
        case "gemma3_text":
            is_large = config["num_hidden_layers"] == GEMMA3_LARGE_LAYERS
            size = config["hidden_size"] // config["num_attention_heads"] if is_large else config["head_dim"]
            base = metadata.number(f"{arch}.rope.freq_base_swa", 10_000.0)
            return {"query_pre_attn_scalar": size, "rope_local_base_freq": base}
        case "gemma4_text":
            return _gemma4_fields(metadata, config, shapes)
        case "ministral3":
            beta_key = f"{arch}.attention.temperature_scale"
            beta = {"llama_4_scaling_beta": metadata.number(beta_key)} if beta_key in metadata.values else {}
            return {"rope_scaling": {**config.get("rope_scaling", {}), "mscale": 1.0, "mscale_all_dim": 1.0, **beta}}
    return {}


def _gemma4_fields(
    metadata: Metadata, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    arch, num_layers = "gemma4", config["num_hidden_layers"]
    full_layers = [layer for layer, kind in enumerate(config.get("layer_types", [])) if kind == FULL]
    widest_mlp = max(_layer_values(metadata, f"{arch}.feed_forward_length", num_layers))
    kv_heads = metadata.values.get(f"{arch}.attention.head_count_kv")
    embedding = shapes.get("per_layer_token_embd.weight")
    return {
        "head_dim": metadata.count(f"{arch}.attention.key_length_swa", config["head_dim"]),
        "global_head_dim": metadata.count(f"{arch}.attention.key_length"),
        "num_global_key_value_heads": kv_heads[full_layers[0]] if isinstance(kv_heads, list) and full_layers else None,
        "attention_k_eq_v": bool(full_layers) and f"blk.{full_layers[0]}.attn_v.weight" not in shapes,
        "use_double_wide_mlp": widest_mlp != config["intermediate_size"],
        "enable_moe_block": bool(config.get("num_experts")),
        "vocab_size_per_layer_input": embedding[0] if embedding else None,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": metadata.number(f"{arch}.rope.freq_base_swa", 10_000.0)},
            FULL: {"rope_type": "proportional", "rope_theta": config["rope_theta"], "partial_rotary_factor": 1.0},
        },
    }


def generation_of(metadata: Metadata, num_tokens: int) -> dict[str, Any]:
    """Return generation_config.json: special tokens, and the sampling defaults of the model's authors."""
    end_ids = [metadata.token_id(f"tokenizer.ggml.{kind}_token_id", num_tokens) for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in end_ids if token is not None))
    bos = metadata.token_id("tokenizer.ggml.bos_token_id", num_tokens)
    pad = metadata.token_id("tokenizer.ggml.padding_token_id", num_tokens)
    config: dict[str, Any] = {}
    if eos:
        config["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    if bos is not None:
        config["bos_token_id"] = bos
    if pad is not None:
        config["pad_token_id"] = pad
    for name, key in SAMPLING_KEYS.items():
        value: Any = metadata.values.get(f"general.sampling.{key}")
        if type(value) in (int, float) and math.isfinite(value):
            config[name] = shortest_decimal(value) if isinstance(value, float) else value
    return config


def llama3_scaling(config: Mapping[str, Any], factors: tuple[float, ...]) -> dict[str, Any] | None:
    """Return the RoPE settings with these factors of rope_freqs.weight; None if all are 1. Raises CheckpointError."""
    if all(factor == 1.0 for factor in factors):
        return None
    for factor in LLAMA3_FACTORS:
        llama3_factors = _llama3_factors(config["rope_theta"], config["head_dim"], factor)
        if len(llama3_factors) == len(factors) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(llama3_factors, factors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": LLAMA3_HIGH,
                "original_max_position_embeddings": LLAMA3_CONTEXT,
            }
    supported = "the factors of Llama 3 (factor 8 or 32, low 1, high 4, original context 8,192)"
    message = f"expected rope_freqs.weight to hold {supported}, got others"
    raise unsupported_model("unsupported_rope_factors", message)


def with_rope_factors(config: dict[str, Any], factors: tuple[float, ...]) -> dict[str, Any]:
    """Return the config with RoPE settings from the tensor rope_freqs.weight, which has one factor per frequency."""
    if config["model_type"] != "gemma4_text":
        scaling = llama3_scaling(config, factors)
        return config if scaling is None else {**config, "rope_scaling": scaling}
    rules = config["rope_parameters"]
    rotated_share = sum(factor == 1.0 for factor in factors) / len(factors)
    return {**config, "rope_parameters": {**rules, FULL: {**rules[FULL], "partial_rotary_factor": rotated_share}}}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Return the divisor of each frequency: 1 for high frequencies, `factor` for low ones, smooth in between."""
    factors = []
    for index in range(0, head_dim, 2):
        turns = LLAMA3_CONTEXT * theta ** (-index / head_dim) / (2 * math.pi)
        blend = min(1.0, max(0.0, (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)))
        factors.append(1.0 / ((1.0 - blend) / factor + blend))
    return factors


def _refuse_arithmetic_keys(metadata: Metadata, arch: str, architecture: Architecture) -> None:
    for key in ARITHMETIC_KEYS:
        if metadata.values.get(f"{arch}.{key}") and key not in (*architecture.numbers, *architecture.counts):
            code = f"unsupported_{key.replace('.', '_')}"
            raise unsupported_model(code, f"expected a plain decoder, got one with {arch}.{key}")


def _head_fields(metadata: Metadata, arch: str, default: int) -> dict[str, Any]:
    """Return the fields for the head size and for the part of a head that RoPE rotates."""
    head_dim = metadata.count(f"{arch}.attention.key_length", default)
    value_dim = metadata.count(f"{arch}.attention.value_length", head_dim)
    rotated = metadata.count(f"{arch}.rope.dimension_count", head_dim)
    if value_dim != head_dim or rotated > head_dim or head_dim % 2 or rotated % 2:
        message = "expected keys and values of one even size, of which an even part rotates"
        raise unsupported_model("unsupported_head_size", f"{message}, got {head_dim}, {value_dim} and {rotated}")
    if rotated < head_dim and ARCHITECTURES[arch].is_permuted:
        message = f"{arch}: expected {arch}.rope.dimension_count to be the whole head size {head_dim}, got {rotated}"
        raise unsupported_model("head_rotates_partly", message)
    return {"head_dim": head_dim} | ({"partial_rotary_factor": rotated / head_dim} if rotated < head_dim else {})


def _layer_values(metadata: Metadata, key: str, num_layers: int, default: int | None = None) -> list[int]:
    """Return [value] if the file has one value for all layers, otherwise the nonzero values of its list."""
    values = metadata.values.get(key)
    if not isinstance(values, list):
        return [metadata.count(key, default)]
    # A recurrent layer has no KV heads.
    are_sizes = all(type(value) is int and 0 <= value <= MAX_SIZE for value in values)
    if len(values) < num_layers or not are_sizes or not any(values):
        raise _invalid_key(key, f"a whole number for each of {num_layers} layers", values)
    return [value for value in values[:num_layers] if value]


def _rope_scaling(metadata: Metadata, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    old_factor = f"{arch}.rope.scale_linear"
    kind = metadata.text(f"{prefix}.type", "linear" if old_factor in metadata.values else "none")
    if kind not in ROPE_SCALINGS:
        message = f"expected RoPE scaling {', '.join(ROPE_SCALINGS)}, got {str(kind)[:40]!r}"
        raise unsupported_model("unsupported_rope_scaling", message)
    factor = metadata.number(f"{prefix}.factor", metadata.values.get(old_factor, 1.0))
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.count(f"{prefix}.original_context_length"),
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"{prefix}.{key}" in metadata.values:
            scaling[name] = metadata.number(f"{prefix}.{key}")
    return scaling


def _invalid_key(key: str, expected: str, value: Any) -> CheckpointError:
    shown = "nothing" if value is None else repr(value)[:60]
    code = f"invalid_{key.rpartition('.')[2]}"
    return CheckpointError(f"GGUF key {key}: expected {expected}, got {shown}; download the file again", code=code)


def unsupported_model(code: str, message: str) -> CheckpointError:
    """Return the error for a file that may be valid but is not supported."""
    return CheckpointError(f"{message}; use the model's safetensors instead", code=code)
