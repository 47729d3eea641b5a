"""The fields of a row in the family table: tensor and config names, and the family's differences from Llama."""

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

    DELTA = "delta"  # gated delta net
    STATE_SPACE = "space"  # state space (Mamba-2)
    CONVOLUTION = "convolution"


class HeadNorms(StrEnum):
    """Normalization of queries and keys: none, each head alone, or all heads of a row together (whole)."""

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"


class SlidingRope(StrEnum):
    """RoPE of sliding-window layers, if the config has one set of RoPE parameters for all layers."""

    SAME = "same"
    UNSCALED = "unscaled"
    """The config's rope_theta, without scaling."""
    LOCAL = "local"
    """The config's rope_local_base_freq as base, without scaling."""


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms: before and after attention, before and after the MLP. None: no such norm."""

    input: str | None = "input_layernorm"
    attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a layer's mixture of experts, and names of the config fields with its sizes."""

    router: str
    gate: str = ""
    up: str = ""
    """Tensor name per expert, with `{}` for the expert's number."""
    down: str = ""
    gate_up: str = ""
    """One tensor for all experts, [expert, out, in]; `down` then is one tensor too."""
    is_transposed: bool = False
    """Layout [expert, in, out], where gate and up alternate along `out`, with biases (`gate_up` + "_bias")."""
    num_used: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    is_beside_mlp: bool = False
    """Whether layers also have a dense MLP with its own norms."""
    shared_size: str = ""
    """Config field for the width of a dense MLP without its own norms (shared expert); empty if there is none."""
    dense_gate: str = ""
    """Tensor of the gate that scales the shared expert's output per row."""
    is_sigmoid: bool = False
    """Whether router scores are sigmoids. The bias `choice_bias` is added only to select experts, not to weigh them."""
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
    """Queries, keys and values are stored as one tensor, and gate and up as another."""
    has_fused_gate: bool = False
    """Gate and up are stored as one tensor, but queries, keys and values are not."""
    is_interleaved: bool = False
    """RoPE rotates adjacent elements of a head as pairs, not elements half a head apart."""
    sliding_rope: SlidingRope = SlidingRope.SAME
    full_interval: int = 0
    """If the config has no layer_types: each n-th layer has full attention, the others a window. 0: no such pattern."""
    has_sinks: bool = False
    has_output_gate: bool = False
    """The query projection also computes a gate for the attention output of each head."""
    recurrent: RecurrentKind | None = None
    """Kind of the family's recurrent layers; None if it has none."""
    has_grouped_inputs: bool = False
    """Rows of the input projections of recurrent layers are grouped by key head."""
    rope_switch: str = ""
    """Config field that must have the value `rope`, or the model has no RoPE. Empty: RoPE is always used."""
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
