"""Which tensors a decoder of a known family has, with their shapes, as its config states them.

A config that does not fit its weights is found here, before a byte of weights is read. Other families pass through
unchecked: the loader that builds them must compare for itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import CheckpointError

MAX_SIZE = 2**31 - 1
BIASED = frozenset({"qwen2"})
QK_NORMED = frozenset({"qwen3"})
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers of a config that decide every shape."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Read and check the sizes in the config of a known family."""
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    hidden = _size(config, "hidden_size")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads must be a multiple of num_key_value_heads, they are {heads} and "
            f"{kv_heads}; download the model again"
        )
    return ModelSizes(
        num_layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", hidden // heads),
        vocabulary=_size(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
    )


def expected_shapes(model_type: str, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Every tensor the family's decoder needs. `lm_head.weight` is not needed when it is the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocabulary, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
    }
    if not sizes.tied:
        shapes["lm_head.weight"] = (sizes.vocabulary, sizes.hidden)
    layer = _layer_shapes(model_type, sizes)
    for index in range(sizes.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_shapes(config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a known family's tensors with its config. More tensors than needed are no harm."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        return
    sizes = sizes_of(config)
    check_numbers(config)
    if sizes.num_layers > len(found):
        raise CheckpointError(
            f"config.json says num_hidden_layers is {sizes.num_layers:,} and the weights have {len(found):,} tensors "
            "in all; download the model again"
        )
    for name, shape in expected_shapes(model_type, sizes).items():
        if name not in found:
            raise CheckpointError(f"the weights must hold {name!r} and do not; download the model again")
        if found[name] != shape:
            raise CheckpointError(
                f"{name!r} must have shape {list(shape)} by config.json and has {list(found[name])}; "
                "download the model again"
            )


def check_numbers(config: Mapping[str, Any]) -> None:
    """The numbers that decide no shape but every value."""
    _number(config, "rms_norm_eps", 1.0)
    _number(config, "rope_theta", 1e30)
    _size(config, "max_position_embeddings", MAX_SIZE)
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"config.json: hidden_act must be 'silu', it is {str(config['hidden_act'])[:40]!r}; choose another model"
        )
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise CheckpointError(f"config.json: {key} must be an object, it is {str(rope)[:40]!r}; mend it")
        for name in ("rope_theta", "factor", "original_max_position_embeddings"):
            _number(rope, name, 1e30)


def _layer_shapes(model_type: str, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (sizes.hidden,),
        "self_attn.q_proj.weight": (query, sizes.hidden),
        "self_attn.k_proj.weight": (key, sizes.hidden),
        "self_attn.v_proj.weight": (key, sizes.hidden),
        "self_attn.o_proj.weight": (sizes.hidden, query),
        "post_attention_layernorm.weight": (sizes.hidden,),
        "mlp.gate_proj.weight": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj.weight": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj.weight": (sizes.hidden, sizes.intermediate),
    }
    biased: list[str] = []
    if model_type in BIASED or sizes.attention_bias:
        biased += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if sizes.attention_bias and model_type not in BIASED:
        biased += ["self_attn.o_proj"]
    if sizes.mlp_bias:
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    if model_type in QK_NORMED:
        shapes |= {"self_attn.q_norm.weight": (sizes.head_dim,), "self_attn.k_norm.weight": (sizes.head_dim,)}
    return shapes


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        raise CheckpointError(
            f"config.json: {key} must be a whole number from 1 to {MAX_SIZE:,}, it is {str(value)[:40]!r}; "
            "download the model again"
        )
    return value


def _number(config: Mapping[str, Any], key: str, high: float) -> None:
    value = config.get(key)
    if value is not None and (type(value) not in (int, float) or not 0 < value <= high):
        raise CheckpointError(
            f"config.json: {key} must be a number above 0, up to {high:g}, it is {str(value)[:40]!r}; "
            "download the model again"
        )


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {key} must be true or false, it is {str(value)[:40]!r}; download the model again"
        )
    return bool(value)
