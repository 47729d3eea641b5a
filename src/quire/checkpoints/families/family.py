"""What a row of the table of families says: names, and what the decoder has to do otherwise than Llama does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class GateActivation(StrEnum):
    """What a gate lets through; see native/builds/kernels.hpp."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SILU = "clamped_silu"


class RecurrentKind(StrEnum):
    """What layers do that keep a state instead of keys and values; see native/layers/recurrent.hpp."""

    DELTA = "delta"
    SPACE = "space"
    CONVOLUTION = "convolution"


class HeadNorms(StrEnum):
    """Whether queries and keys are normed: each head by itself, or all heads together."""

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"


class SlidingRope(StrEnum):
    """The rotation of layers that look back a window, where the config has one rule for all layers."""

    SAME = "same"
    UNSCALED = "unscaled"
    """The same base, without the scaling."""
    LOCAL = "local"
    """A base of its own, rope_local_base_freq, without the scaling."""


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer: before and after attention, before and after what follows it."""

    input: str | None = "input_layernorm"
    attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where the tensors of a mixture are in a layer, and which fields of a config say how large it is."""

    router: str
    gate: str = ""
    up: str = ""
    """One tensor for each expert: `{}` is its number."""
    down: str = ""
    gate_up: str = ""
    """One tensor for all experts, [expert, out, in], and `down` too."""
    is_transposed: bool = False
    """[expert, in, out], gates and ups in turn, each with a bias (`gate_up` + "_bias")."""
    num_used: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    is_beside_mlp: bool = False
    """Whether layers have a dense part too, with norms of its own."""
    shared_size: str = ""
    """The field that says how wide the dense part beside experts is, where there is one without such norms."""
    dense_gate: str = ""
    """A row's product with this tensor opens that part."""
    is_sigmoid: bool = False
    """Whether scores count by their sigmoids; a bias (`choice_bias`) decides with them who is chosen."""
    choice_bias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. The defaults are Llama's."""

    gguf: str | None = None
    """The architecture's name in GGUF files, if quire reads them."""
    norms: NormNames = NormNames()
    norm_offset: float = 0.0
    """What is added to every norm's weight."""
    head_norms: HeadNorms = HeadNorms.NONE
    has_value_norm: bool = False
    query_bias: bool | None = None
    """Of queries, keys and values; None: as attention_bias says."""
    out_bias: bool | None = None
    gate: GateActivation = GateActivation.SILU
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The field of a config that names the activation, and what it must say."""
    is_fused: bool = False
    """Queries, keys and values are one tensor, and so are gate and up."""
    has_fused_gate: bool = False
    """Gate and up are one tensor, queries, keys and values are not."""
    is_interleaved: bool = False
    """Neighbouring numbers of a head turn together, not those half a head apart."""
    sliding_rope: SlidingRope = SlidingRope.SAME
    full_every: int = 0
    """Without layer_types: every so many layers one sees everything, the others a window; 0: as sliding_window says."""
    has_sinks: bool = False
    has_output_gate: bool = False
    """With queries come gates of what attention answers, head by head."""
    recurrent: RecurrentKind | None = None
    """Of layers that layer_types names so."""
    has_grouped_inputs: bool = False
    """What a recurrent layer makes of a row is stored key head by key head."""
    turns_by: str = ""
    """The field that must say `rope` for heads to turn at all."""
    dense_size: str = "intermediate_size"
    is_split_in_gguf: bool = False
    """What is one tensor for gate and up is two in GGUF files."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of config fields."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensors' names in safetensors that are others here."""
    ignored: str = ""
    """Prefixes of the names of unused tensors."""
    experts: ExpertNames | None = None
    scales_embedding: bool = False
    """By the square root of its size."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of fields that a config may leave out."""
