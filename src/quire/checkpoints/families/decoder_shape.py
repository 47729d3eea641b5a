"""The shape of a decoder of any family: the sizes and rules of each layer, from which all tensor shapes follow.

A config that the decoder cannot compute is rejected here with a reason, before any weights are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checkpoints.families.config_fields import config_error, count_of, flag_of, number_of, object_of, size_of
from quire.checkpoints.families.family import ExpertNames, Family
from quire.checkpoints.families.family_table import FAMILIES
from quire.checkpoints.families.layer_rules import FULL, SLIDING, RopeRule, rope_of, windows_of
from quire.checkpoints.families.recurrent import RecurrentShape, recurrent_layers, recurrent_shape
from quire.errors import CheckpointError

MAX_HEAD_SIZE = 1024
FLOAT_BYTES = 4
"""Bytes per number of a recurrent state."""
LAYOUT = "quire_layout"
"""Field that quire adds to the config converted from a GGUF file: the tensor layout."""
TILED = "quire_tiled_heads"
"""Field that quire adds to a converted config: whether value heads share key heads in tiled order (`is_tiled`)."""
NUM_EXPERTS = ("num_experts", "num_local_experts")
"""Config fields for the number of experts; both names occur, also within a family."""


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A mixture of experts. Each row (token) uses `num_used` of them."""

    names: ExpertNames
    num_experts: int
    num_used: int
    intermediate_size: int
    is_shared_by_all: bool
    """Whether the weights of experts are normalized over all experts, not only over the selected experts."""
    has_choice_bias: bool = False
    scale: float = 1.0
    """Factor that multiplies the weights of the selected experts."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The shape of one layer."""

    number: int
    num_kv_heads: int
    head_size: int
    window: int | None
    """Sliding window in tokens; None: full attention."""
    rope: RopeRule
    intermediate_size: int
    """Width of the dense MLP; 0 if there is none."""
    mixture: MixtureShape | None
    kv_layer: int
    """Number of the layer whose keys and values are read: this layer or an earlier one."""
    has_values: bool = True
    """False: there is no value projection; values equal the keys before the key norm."""
    recurrent: RecurrentShape | None = None
    """Shape of the recurrent state that replaces keys and values; None for attention layers."""

    @property
    def has_kv(self) -> bool:
        return self.kv_layer == self.number and self.recurrent is None


@dataclass(frozen=True, slots=True)
class PositionScale:
    """Llama 4's query scaling: queries are multiplied by 1 + beta x log(1 + floor(position / origin))."""

    beta: float
    origin: float


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors of a model, and soft caps of logits (`logit_cap`) and attention scores (`score_cap`)."""

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    """Factor of every attention and MLP output before it is added to the residual stream."""
    logits: float = 1.0
    logit_cap: float | None = None
    score_cap: float | None = None
    position: PositionScale | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes and rules of one model."""

    model_type: str
    vocabulary_size: int
    hidden_size: int
    num_heads: int
    layers: tuple[DecoderLayer, ...]
    norm_eps: float
    has_tied_head: bool
    has_query_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    scales: Scales
    per_layer_size: int = 0
    """Row size of per-layer embeddings; 0 if there are none."""
    per_layer_vocabulary: int = 0
    is_gguf: bool = False
    """Whether tensors have GGUF's layout: one tensor for all experts per gate, up and down, and norm weights that
    include the family's offset."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_size(self) -> int:
        """Largest head size of all layers."""
        return max(layer.head_size for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Largest number of KV heads of all layers."""
        return max(layer.num_kv_heads for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """Largest dense MLP width; without dense MLPs, the largest expert width."""
        dense_width = max(layer.intermediate_size for layer in self.layers)
        return dense_width or max(layer.mixture.intermediate_size for layer in self.layers if layer.mixture)

    @property
    def recurrent(self) -> RecurrentShape | None:
        """Shape of the recurrent layers, which are all equal; None if there are none."""
        return next((layer.recurrent for layer in self.layers if layer.recurrent), None)

    @property
    def num_recurrent(self) -> int:
        return sum(layer.recurrent is not None for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state over all recurrent layers."""
        layer = self.recurrent
        return FLOAT_BYTES * self.num_recurrent * (layer.history_size + layer.state_size) if layer else 0

    @property
    def query_size(self) -> int:
        """Largest total size of all query heads of a layer."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Largest total size of all KV heads of a layer."""
        return max(layer.num_kv_heads * layer.head_size for layer in self.layers)

    @property
    def group_size(self) -> int:
        """Largest number of query heads per KV head."""
        return max(self.num_heads // layer.num_kv_heads for layer in self.layers)


def is_decoder(config: Mapping[str, Any]) -> bool:
    """Whether the config is a decoder that quire implements."""
    return why_not_decoder(config) is None


def why_not_decoder(config: Mapping[str, Any]) -> str | None:
    """Return None if quire implements this decoder; otherwise the reason."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        model_type = str(config.get("model_type"))[:40]
        return f"expected a supported model_type, got {model_type!r} (supported: {', '.join(sorted(FAMILIES))})"
    config = _with_defaults(family, config)
    key, required = family.activation
    activation = config.get(key, config.get("hidden_act", required))
    if activation != required:
        return f"expected {key} to be {required!r}, got {str(activation)[:40]!r}"
    if config.get("use_bidirectional_attention") in ("all", True):
        return "its attention is bidirectional (use_bidirectional_attention)"
    return None


def read_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Read the shape from an untrusted config. Raises CheckpointError for unsupported models and invalid sizes."""
    if (reason := why_not_decoder(config)) is not None:
        raise CheckpointError(f"quire has no implementation of its own for this model: {reason}; choose another model")
    model_type = str(config["model_type"])
    family = FAMILIES[model_type]
    config = _with_defaults(family, config)
    heads = size_of(config, "num_attention_heads")
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float | int) or not 0 <= eps < 1:
        raise config_error("invalid_rms_norm_eps", f"rms_norm_eps to be a number from 0 to 1, got {str(eps)[:40]!r}")
    size_of(config, "max_position_embeddings", 1)
    has_bias = flag_of(config, "attention_bias")
    per_layer_size = count_of(config, "hidden_size_per_layer_input")
    vocabulary = size_of(config, "vocab_size")
    layers = _layers(family, config, heads)
    return DecoderShape(
        model_type=model_type,
        vocabulary_size=vocabulary,
        hidden_size=size_of(config, "hidden_size"),
        num_heads=heads,
        layers=layers,
        norm_eps=float(eps),
        has_tied_head=flag_of(config, "tie_word_embeddings"),
        has_query_bias=has_bias if family.query_bias is None else family.query_bias,
        has_out_bias=has_bias if family.out_bias is None else family.out_bias,
        has_mlp_bias=flag_of(config, "mlp_bias"),
        scales=_scales(family, config, layers[0]),
        is_gguf=config.get(LAYOUT) == "gguf",
        per_layer_size=per_layer_size,
        per_layer_vocabulary=size_of(config, "vocab_size_per_layer_input", vocabulary) if per_layer_size else 0,
    )


def _with_defaults(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {family.aliases.get(key, key): value for key, value in config.items() if value is not None}
    if "rope_scaling" in fields or "rope_theta" in fields:  # an older config: the newer field's default does not apply
        fields.setdefault("rope_parameters", {})
    return {**family.defaults, **fields}


def _layers(family: Family, config: Mapping[str, Any], num_heads: int) -> tuple[DecoderLayer, ...]:
    num_layers = size_of(config, "num_hidden_layers")
    if num_layers > 10_000:
        raise config_error("invalid_num_hidden_layers", f"num_hidden_layers of at most 10,000, got {num_layers:,}")
    windows = windows_of(config, num_layers)
    is_recurrent = recurrent_layers(family, config, num_layers)
    if all(is_recurrent):
        expected = f"at least one attention layer, got {num_layers} recurrent layers"
        raise config_error("no_attention_layer", expected, "choose another model")
    recurrent = recurrent_shape(family, config, is_tiled=flag_of(config, TILED)) if any(is_recurrent) else None
    kinds = [FULL if window is None else SLIDING for window in windows]
    num_shared = count_of(config, "num_kv_shared_layers")
    first_shared = num_layers - num_shared if 0 < num_shared < num_layers else num_layers
    layers: list[DecoderLayer] = []
    for index, kind in enumerate(kinds):
        is_shared = index >= first_shared
        kv_heads, head_size = _head_sizes(config, num_heads, kind, index)
        mixture = _mixture(family.experts, config, index) if family.experts else None
        size = _dense_size(family, config, mixture) * (2 if is_shared and flag_of(config, "use_double_wide_mlp") else 1)
        layers.append(
            DecoderLayer(
                number=index,
                num_kv_heads=kv_heads,
                head_size=head_size,
                window=windows[index],
                rope=rope_of(family, config, kind, index, head_size),
                intermediate_size=size,
                mixture=mixture,
                kv_layer=_last_layer_of_kind(kinds[:first_shared], kind) if is_shared else index,
                has_values=not (flag_of(config, "attention_k_eq_v") and kind == FULL),
                recurrent=recurrent if is_recurrent[index] else None,
            )
        )
    return tuple(layers)


def _dense_size(family: Family, config: Mapping[str, Any], mixture: MixtureShape | None) -> int:
    """Return the width of a layer's dense MLP; 0 if the layer has only experts."""
    if mixture is not None and not mixture.names.is_beside_mlp:
        return size_of(config, mixture.names.shared_size) if mixture.names.shared_size else 0
    size = size_of(config, family.dense_size)
    if not flag_of(config, "block_auto_adjust_ff_dim"):
        return size
    size = int(number_of(config, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = size_of(config, "block_multiple_of", 1)
    return -(-size // multiple) * multiple


def _last_layer_of_kind(kinds: list[str], kind: str) -> int:
    if kind not in kinds:
        expected = f"a layer of kind {kind} with keys and values of its own before those that share them"
        raise config_error("no_shared_kv_layer", expected)
    return len(kinds) - 1 - kinds[::-1].index(kind)


def _head_sizes(config: Mapping[str, Any], num_heads: int, kind: str, layer: int) -> tuple[int, int]:
    """Return a layer's number of KV heads and its head size, which full-attention and single layers may override."""
    num_kv_heads = size_of(config, "num_key_value_heads", num_heads)
    head_size = size_of(config, "head_dim", max(1, size_of(config, "hidden_size") // num_heads))
    per_layer = object_of(config, "per_layer_config")
    if per_layer:
        layer_fields = object_of(per_layer, str(layer))
        num_kv_heads = size_of(layer_fields, "num_key_value_heads", num_kv_heads)
        head_size = size_of(layer_fields, "head_dim", head_size)
    elif kind == FULL:
        head_size = size_of(config, "global_head_dim", head_size)
        if flag_of(config, "attention_k_eq_v"):
            num_kv_heads = size_of(config, "num_global_key_value_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        expected = "num_attention_heads to be a multiple of num_key_value_heads"
        raise config_error("heads_not_divisible", f"{expected}, got {num_heads} and {num_kv_heads}")
    if head_size % 2 or head_size > MAX_HEAD_SIZE:
        expected = f"an even head size up to {MAX_HEAD_SIZE}, got {head_size}"
        raise config_error("unsupported_head_size", expected, "choose another model")
    return num_kv_heads, head_size


def _mixture(names: ExpertNames, config: Mapping[str, Any], layer: int) -> MixtureShape | None:
    if names.is_beside_mlp and not flag_of(config, "enable_moe_block"):
        return None
    if config.get("mlp_only_layers") and layer in config["mlp_only_layers"]:
        return None
    if (layer + 1) % size_of(config, "decoder_sparse_step", 1) or layer < count_of(config, "num_dense_layers"):
        return None
    num_experts = next((config[key] for key in NUM_EXPERTS if key in config), None)
    if num_experts == 0 and names.shared_size:
        return None
    num_experts, num_used = size_of({"num_experts": num_experts}, "num_experts"), size_of(config, names.num_used)
    if num_used > num_experts or num_experts > 65_536:
        expected = "at most 65,536 experts, and at most as many used per token"
        raise config_error("too_many_experts", f"{expected}, got {num_used:,} used of {num_experts:,}")
    return MixtureShape(
        names,
        num_experts,
        num_used,
        intermediate_size=size_of(config, names.size),
        is_shared_by_all=not flag_of(config, "norm_topk_prob"),
        has_choice_bias=bool(names.choice_bias) and flag_of(config, "use_expert_bias"),
        scale=number_of(config, "routed_scaling_factor", 1.0),
    )


def _scales(family: Family, config: Mapping[str, Any], first: DecoderLayer) -> Scales:
    rope = dict(first.rope.parameters)
    position = None
    if rope.get("llama_4_scaling_beta"):
        origin = number_of(rope, "original_max_position_embeddings", 1.0)
        position = PositionScale(number_of(rope, "llama_4_scaling_beta", 1.0), origin)
    hidden = size_of(config, "hidden_size")
    embedding = math.sqrt(hidden) if family.scales_embedding else number_of(config, "embedding_multiplier", 1.0)
    if "attention_multiplier" in config:
        attention = number_of(config, "attention_multiplier", 1.0)
    else:
        attention = number_of(config, "query_pre_attn_scalar", first.head_size) ** -0.5
    return Scales(
        attention=attention,
        embedding=embedding,
        residual=number_of(config, "residual_multiplier", 1.0),
        logits=1.0 / number_of(config, "logits_scaling", 1.0),
        logit_cap=number_of(config, "final_logit_softcapping", 1.0) if "final_logit_softcapping" in config else None,
        score_cap=number_of(config, "attn_logit_softcapping", 1.0) if "attn_logit_softcapping" in config else None,
        position=position,
    )
