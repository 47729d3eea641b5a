"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families over flat batches: the fast path.

The families differ in biases, QK-norm and windows only, and the weights say which are there. Queries, keys and values
are one product, gate and up another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

from quire.backends.torch.inputs import Batch
from quire.backends.torch.kv_store import KVStore, LayerShape
from quire.backends.torch.linear import LinearKind, PackedLinear
from quire.backends.torch.models.decoder_config import DecoderShape
from quire.backends.torch.models.model import Computed
from quire.backends.torch.ops import Ops
from quire.backends.torch.weight_reader import WeightReader
from quire.errors import CheckpointError

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, ready to be used."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Decoder:
    """A model of these families. Every row's arithmetic depends on that row alone."""

    def __init__(self, shape: DecoderShape, reader: WeightReader, linear: LinearKind, ops: Ops) -> None:
        self._shape = shape
        self._linear = linear
        self._ops = ops
        self._embedding, tied = self._read_embedding(reader)
        self._layers = [self._read_layer(reader, f"model.layers.{at}.") for at in range(shape.num_layers)]
        self._norm = reader.read("model.norm.weight", (shape.hidden_size,))
        self._head = tied or linear.prepare(reader.read(HEAD, (shape.vocabulary_size, shape.hidden_size)))
        _refuse_unread(reader)

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """What a token takes, layer by layer."""
        return (self._shape.layer,) * self._shape.num_layers

    @property
    def vocabulary_size(self) -> int:
        """Rows of the head."""
        return self._shape.vocabulary_size

    def padded(self, num_rows: int) -> int:
        """How many rows are computed for this many."""
        return max(self._linear.padded(num_rows), self._ops.padded(num_rows))

    def compute(self, batch: Batch, store: KVStore, wanted: torch.Tensor) -> Computed:
        """Write the rows' KV, and return the last hidden states, and the logits of the wanted rows."""
        residual = F.embedding(batch.tokens, self._embedding).to(self._linear.row_dtype)
        row_chunks = self._linear.row_chunks(len(residual))
        ops = self._ops.begin(batch, store, residual, row_chunks)
        added: list[torch.Tensor | None] = [None] * len(row_chunks)
        for at, layer in enumerate(self._layers):
            for chunk in range(len(row_chunks)):
                ops.write(at, chunk, layer.qkv(ops.norm(chunk, added[chunk], layer.input_norm)), layer)
            for chunk, answers in enumerate(ops.attend(at)):
                normed = ops.norm(chunk, layer.out(answers), layer.post_norm)
                added[chunk] = layer.down(ops.silu_mul(chunk, layer.gate_up(normed)))
        hidden = torch.cat([ops.norm(chunk, one, self._norm) for chunk, one in enumerate(added)])
        return Computed(torch.isfinite(hidden).all(dim=-1), hidden, self._logits(hidden[wanted]))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows = len(hidden)
        if num_rows == 0:
            return hidden.new_empty(0, self._shape.vocabulary_size)
        filled = F.pad(hidden, (0, 0, 0, self._linear.padded(num_rows) - num_rows))
        return self._head(filled)[:num_rows].float()

    def _read_embedding(self, reader: WeightReader) -> tuple[torch.Tensor, PackedLinear | None]:
        """And the head, if it is the same numbers: no larger tensor is held while others are read."""
        shape = self._shape
        whole = reader.read("model.embed_tokens.weight", (shape.vocabulary_size, shape.hidden_size))
        if shape.has_tied_head:
            reader.forget(HEAD)
        tied = self._linear.prepare(whole) if shape.has_tied_head else None
        return whole.to(self._linear.dtype), tied

    def _read_layer(self, reader: WeightReader, prefix: str) -> Layer:
        shape, hidden = self._shape, self._shape.hidden_size
        heads = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        sizes = (shape.query_size, shape.kv_size, shape.kv_size)
        wide = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
        return Layer(
            input_norm=reader.read(f"{prefix}input_layernorm.weight", (hidden,)),
            qkv=self._product(reader, heads, sizes, hidden),
            query_norm=_optional(reader, f"{prefix}self_attn.q_norm.weight", shape.head_size),
            key_norm=_optional(reader, f"{prefix}self_attn.k_norm.weight", shape.head_size),
            out=self._product(reader, [f"{prefix}self_attn.o_proj"], (hidden,), shape.query_size),
            post_norm=reader.read(f"{prefix}post_attention_layernorm.weight", (hidden,)),
            gate_up=self._product(reader, wide, (shape.intermediate_size,) * 2, hidden),
            down=self._product(reader, [f"{prefix}mlp.down_proj"], (hidden,), shape.intermediate_size),
        )

    def _product(self, reader: WeightReader, names: Sequence[str], sizes: Sequence[int], num_in: int) -> PackedLinear:
        weight = reader.read_joined([f"{name}.weight" for name in names], [(size, num_in) for size in sizes])
        bias = None
        if reader.has(f"{names[0]}.bias"):
            bias = reader.read_joined([f"{name}.bias" for name in names], [(size,) for size in sizes])
        return self._linear.prepare(weight, bias)


def _optional(reader: WeightReader, name: str, size: int) -> torch.Tensor | None:
    return reader.read(name, (size,)) if reader.has(name) else None


def _refuse_unread(reader: WeightReader) -> None:
    """A tensor nobody used means that the model is not what it seems to be."""
    unread = sorted(name for name in reader.names if not name.endswith("rotary_emb.inv_freq"))
    if unread:
        raise CheckpointError(
            f"the checkpoint has {len(unread)} tensors that its architecture does not use, the first is {unread[0]!r}; "
            "config.json and weights belong to different models"
        )
