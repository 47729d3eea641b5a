"""What a GGUF file's metadata means in Hugging Face's words: config.json, generation_config.json and tensor names."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checkpoints.families import MAX_SIZE
from quire.errors import CheckpointError

MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_SCALINGS = ("none", "linear", "yarn")
CHANGES_ARITHMETIC = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale", "expert_count")
SAMPLING_KEYS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA3_FACTORS = (8.0, 32.0)
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class Metadata:
    """Typed reading of the metadata: a value of the wrong type is a CheckpointError."""

    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The architecture, one of those that quire converts."""
        given = self.text("general.architecture")
        if given not in ARCHITECTURES:
            raise CheckpointError(
                f"quire converts GGUF files of {', '.join(ARCHITECTURES)}; this one is {(given or 'nameless')[:40]!r}; "
                "use the model's safetensors instead"
            )
        return given

    def text(self, key: str, default: str | None = None) -> str | None:
        """The text under this key."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise _wrong(key, "a text", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The yes or no under this key."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, "true or false", value)
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """The whole number under this key."""
        value = self.values.get(key, default)
        if type(value) is not int or not least <= value <= MAX_SIZE:
            raise _wrong(key, f"a whole number from {least} to {MAX_SIZE:,}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The positive number under this key, written as short as its 32 bits allow."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < 1e30:
            raise _wrong(key, "a positive number", value)
        return shortest(value)

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """The token id under this key; none if there is none, or the format's mark for none."""
        value = self.values.get(key)
        if value is None or value in (-1, 2**32 - 1):
            return None
        if type(value) is not int or not 0 <= value < num_tokens:
            raise _wrong(key, f"a token id from 0 to {num_tokens - 1:,}", value)
        return value


def shortest(value: float) -> float:
    """The decimal with fewest digits that is the same 32-bit float: 1e-05, not 9.999999747378752e-06."""
    single = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == single:
            return short
    return value


def config_of(metadata: Metadata, num_vocabulary: int, tied: bool) -> dict[str, Any]:
    """config.json, but for RoPE factors kept in a tensor (`llama3_scaling`)."""
    arch = metadata.architecture
    _refuse_what_changes_arithmetic(metadata, arch)
    hidden, heads = metadata.count(f"{arch}.embedding_length"), metadata.count(f"{arch}.attention.head_count")
    window = metadata.count(f"{arch}.attention.sliding_window", 0, least=0)
    model_type = "mistral" if arch == "llama" and window else arch
    config: dict[str, Any] = {
        "architectures": [MODEL_CLASSES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.count(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.count(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{arch}.attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata, arch, max(1, hidden // heads)),
        "max_position_embeddings": metadata.count(f"{arch}.context_length"),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": tied,
        "vocab_size": num_vocabulary,
    }
    if window:
        config["sliding_window"] = window
    if arch != "llama":
        config |= {"use_sliding_window": bool(window), "max_window_layers": 0}
    if scaling := _rope_scaling(metadata, arch):
        config["rope_scaling"] = scaling
    return config


def generation_of(metadata: Metadata, num_tokens: int) -> dict[str, Any]:
    """generation_config.json: what ends a text, and the sampling the model's makers wrote into the file."""
    ends = [metadata.token_id(f"tokenizer.ggml.{kind}_token_id", num_tokens) for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
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
            config[name] = shortest(value) if isinstance(value, float) else value
    return config


def hugging_face_name(name: str) -> str | None:
    """The name Hugging Face gives this tensor, or None if quire knows none."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    # isdecimal alone takes digits of other scripts; int() would make two names of one.
    if block != "blk" or not (index.isascii() and index.isdecimal()) or kind not in {"weight", "bias"}:
        return None
    if part not in LAYER_NAMES or index != str(int(index[:9])):
        return None
    return f"model.layers.{index}.{LAYER_NAMES[part]}.{kind}"


def llama3_scaling(config: Mapping[str, Any], factors: tuple[float, ...]) -> dict[str, Any] | None:
    """The RoPE settings that make these factors (the tensor rope_freqs.weight); None if all are one."""
    if all(factor == 1.0 for factor in factors):
        return None
    for factor in LLAMA3_FACTORS:
        made = _llama3_factors(config["rope_theta"], config["head_dim"], factor)
        if len(made) == len(factors) and all(
            math.isclose(mine, theirs, rel_tol=1e-4) for mine, theirs in zip(made, factors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": LLAMA3_HIGH,
                "original_max_position_embeddings": LLAMA3_CONTEXT,
            }
    raise CheckpointError(
        "rope_freqs.weight must hold the factors of Llama 3 (factor 8 or 32, low 1, high 4, original context 8,192) "
        "and holds others; use the model's safetensors instead"
    )


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """By how much each frequency is divided: not at all if fast, by `factor` if slow, smoothly between."""
    made = []
    for index in range(0, head_dim, 2):
        turns = LLAMA3_CONTEXT * theta ** (-index / head_dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)))
        made.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return made


def _refuse_what_changes_arithmetic(metadata: Metadata, arch: str) -> None:
    for key in CHANGES_ARITHMETIC:
        if metadata.values.get(f"{arch}.{key}"):
            raise CheckpointError(
                f"quire converts plain decoders, this file has {arch}.{key}; use the model's safetensors instead"
            )


def _head_dim(metadata: Metadata, arch: str, default: int) -> int:
    head_dim = metadata.count(f"{arch}.attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = metadata.count(f"{arch}.{key}", head_dim)
        if other != head_dim:
            raise CheckpointError(
                f"quire converts models whose heads are rotated whole: {arch}.{key} must be {head_dim}, it is {other}; "
                "use the model's safetensors instead"
            )
    if head_dim % 2:
        raise CheckpointError(f"a head must have an even number of values, it has {head_dim}; download the file again")
    return head_dim


def _rope_scaling(metadata: Metadata, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    old_factor = f"{arch}.rope.scale_linear"
    kind = metadata.text(f"{prefix}.type", "linear" if old_factor in metadata.values else "none")
    if kind not in ROPE_SCALINGS:
        raise CheckpointError(
            f"quire converts RoPE scaling {', '.join(ROPE_SCALINGS)}; this file has {str(kind)[:40]!r}; "
            "use the model's safetensors instead"
        )
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


def _wrong(key: str, rule: str, value: Any) -> CheckpointError:
    given = "missing" if value is None else repr(value)[:60]
    return CheckpointError(f"the GGUF key {key} must be {rule}, it is {given}; download the file again")
