"""The fields of a row in the family table: names, and differences from Llama."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class GateActivation(StrEnum):
    """Activation of the MLP gate; see native/builds/kernels.hpp."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SILU = "clamped_silu"


class RecurrentKind(StrEnum):
    """Kind of recurrent layer; see native/layers/recurrent.hpp."""

    DELTA = "delta"
    SPACE = "space"
    CONVOLUTION = "convolution"


class HeadNorms(StrEnum):
    """Normalization of queries and keys: none, per head, or over all heads together."""

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"


class SlidingRope(StrEnum):
    """RoPE of sliding-window layers when the config has one rule for all layers."""

    SAME = "same"
    UNSCALED = "unscaled"
    """The base of the config, without scaling."""
    LOCAL = "local"
    """A separate base, rope_local_base_freq, without scaling."""


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms: before and after attention, before and after the MLP."""

    input: str | None = "input_layernorm"
    attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's tensors in a layer, and of the config fields with its sizes."""

    router: str
    gate: str = ""
    up: str = ""
    """Tensor name per expert, with `{}` for the expert's number."""
    down: str = ""
    gate_up: str = ""
    """One tensor for all experts, [expert, out, in]; `down` then is one tensor too."""
    is_transposed: bool = False
    """Layout [expert, in, out] with alternating gate and up, each with a bias (`gate_up` + "_bias")."""
    num_used: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    is_beside_mlp: bool = False
    """Whether layers also have a dense MLP with its own norms."""
    shared_size: str = ""
    """Config field for the width of a dense MLP without its own norms (shared expert); empty if there is none."""
    dense_gate: str = ""
    """Tensor that gates the shared expert per row."""
    is_sigmoid: bool = False
    """Whether scores are sigmoids; the bias `choice_bias` is added only for the selection of experts."""
    choice_bias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of the family table. The defaults are Llama's."""

    norms: NormNames = NormNames()
    norm_offset: float = 0.0
    """Offset added to every norm weight."""
    head_norms: HeadNorms = HeadNorms.NONE
    has_value_norm: bool = False
    query_bias: bool | None = None
    """Whether queries, keys and values have a bias; None: attention_bias decides."""
    out_bias: bool | None = None
    gate: GateActivation = GateActivation.SILU
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Config field of the activation, and its required value."""
    is_fused: bool = False
    """Queries, keys and values are one tensor, and so are gate and up."""
    has_fused_gate: bool = False
    """Gate and up are one tensor, but queries, keys and values are not."""
    is_interleaved: bool = False
    """RoPE rotates adjacent elements of a head as pairs, not elements half a head apart."""
    sliding_rope: SlidingRope = SlidingRope.SAME
    full_every: int = 0
    """Without layer_types: every n-th layer has full attention, the others a window; 0: sliding_window decides."""
    has_sinks: bool = False
    has_output_gate: bool = False
    """The query projection also returns gates of the attention output, per head."""
    recurrent: RecurrentKind | None = None
    """Kind of the family's recurrent layers; None if it has none."""
    has_grouped_inputs: bool = False
    """Input projections of recurrent layers are stored key head by key head."""
    turns_by: str = ""
    """Config field that must be `rope` for the family to use RoPE; empty: always."""
    dense_size: str = "intermediate_size"
    is_split_in_gguf: bool = False
    """Gate and up are two tensors in GGUF files although they are one elsewhere."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names of config fields."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensor names in safetensors -> names used here."""
    ignored: str = ""
    """Name prefix of unused tensors."""
    experts: ExpertNames | None = None
    scales_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of config fields."""
