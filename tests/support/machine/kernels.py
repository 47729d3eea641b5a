"""The single kernels as functions of torch tensors: what tests hold beside plain float64.

A step calls them from C++ (native/step/forward.cpp); here each is called alone, by the address of its tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.backends.cpu.tiles import StepTiles
from quire.backends.kernels.extension import kernels
from quire.backends.kernels.threads import num_threads
from quire.core.step import WorkItem

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
SCALE_ROWS = {torch.float32: 0, torch.bfloat16: 0, torch.int8: 4}
"""Codes of a block are followed by a float32 scale for each slot."""


@dataclass(frozen=True)
class AttentionShape:
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class HeadNormWeights:
    query: torch.Tensor
    key: torch.Tensor
    eps: float


def attention(
    queries: torch.Tensor,
    store: tuple[torch.Tensor, torch.Tensor],
    items: Sequence[WorkItem],
    out: torch.Tensor,
    shape: AttentionShape,
) -> torch.Tensor:
    """[row, head, key size] -> `out` [row, head, value size]; rows behind those of the items become zero."""
    (keys, values), (num_rows, num_heads, key_size) = store, queries.shape
    _, num_kv_heads, _, block_size = keys.shape
    tiles = StepTiles(items, block_size, num_heads // num_kv_heads)
    kernels().attention(
        queries.data_ptr(), queries.stride(0), out.data_ptr(), out.stride(0),
        keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0), KV_TYPES[keys.dtype],
        num_heads, num_kv_heads, key_size, values.shape[3] - SCALE_ROWS[keys.dtype], block_size,
        *tiles.addresses,
        tiles.num_tiles, tiles.num_rows, num_rows,
        -1 if shape.window is None else shape.window, shape.scale, shape.softcap or 0.0, num_threads(),
        0 if shape.sinks is None else shape.sinks.data_ptr(),
    )  # fmt: skip
    return out


def add_rms_norm(
    added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> torch.Tensor:
    """`residual` += added, then `out` = weight * residual / rms(residual), row by row."""
    address = 0 if added is None else added.data_ptr()
    num_rows, size = residual.shape
    kernels().add_rms_norm(
        address, residual.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, size, eps, num_threads()
    )
    return out


@dataclass(frozen=True)
class Places:
    """Where rows stand: their angles ([row, key size]), blocks and slots ([row])."""

    cos: torch.Tensor
    sin: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor


def rope_write(
    qkv: torch.Tensor,
    places: Places,
    norms: HeadNormWeights | None,
    store: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
) -> torch.Tensor:
    """Turned queries to `queries`, turned keys and values into the store."""
    (keys, values), (num_rows, num_heads, key_size) = store, queries.shape
    _, num_kv_heads, _, block_size = keys.shape
    heads = (0, 0, 0.0) if norms is None else (norms.query.data_ptr(), norms.key.data_ptr(), norms.eps)
    cos, sin = places.cos.contiguous(), places.sin.contiguous()
    kernels().rope_write(
        qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), *heads,
        keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0), KV_TYPES[keys.dtype],
        places.blocks.data_ptr(), places.slots.data_ptr(), queries.data_ptr(),
        num_rows, num_heads, num_kv_heads, key_size, values.shape[3] - SCALE_ROWS[keys.dtype], block_size,
        num_threads(),
    )  # fmt: skip
    return queries


def gate_mul(gate_up: torch.Tensor, out: torch.Tensor, kind: int = 0) -> torch.Tensor:
    """`out` = silu(gate) * up, of rows that hold gate, then up."""
    kernels().gate_mul(gate_up.data_ptr(), out.data_ptr(), len(out), out.shape[1], kind, num_threads())
    return out


def exp(numbers: torch.Tensor) -> torch.Tensor:
    """The kernels' own exp in float32, right up to 88."""
    out = torch.empty_like(numbers)
    kernels().exp(numbers.data_ptr(), out.data_ptr(), numbers.numel())
    return out


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head's halves into each other by the position's angles."""
    one, other = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-other, one), dim=-1) * sin
