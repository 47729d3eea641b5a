"""Norms, rotary positions and gates: kernels that pass over each row once."""

from dataclasses import dataclass

import torch

from quire.backends.torch.native import extension
from quire.backends.torch.native.store_layers import Places, StoreLayers
from quire.backends.torch.native.tensors import address_of, check_dense, check_floats, layout, rows_of


class BoundNorm:
    """`residual` += what is added (None: it stays), then `out` = weight * residual / rms(residual), row by row.

    Rows from `num_rows` on are padding: nothing is read or written there.
    """

    __slots__ = ("_call", "_held", "_shape", "_tail", "out")

    def __init__(self, residual: torch.Tensor, out: torch.Tensor, eps: float, num_rows: int | None = None) -> None:
        check_floats(residual, out)
        check_dense(residual, out)
        if out.shape != residual.shape:
            raise ValueError(f"residual {layout(residual)} and out {layout(out)} do not fit")
        self.out = out
        self._held = residual
        self._call = extension.kernels().add_rms_norm
        self._shape = residual.shape
        num_rows, size = rows_of(residual, num_rows), residual.shape[1]
        self._tail = (out.data_ptr(), num_rows, size, eps, torch.get_num_threads())

    def __call__(self, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Returns `out`."""
        address = 0 if added is None else address_of(added, self._shape)
        self._call(address, self._held.data_ptr(), address_of(weight, self._shape[1:]), *self._tail)
        return self.out


def add_rms_norm(
    added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> torch.Tensor:
    """One norm, for who has one."""
    return BoundNorm(residual, out, eps)(added, weight)


@dataclass(frozen=True, slots=True)
class HeadNormWeights:
    """Weights of the norms of each query and key head, [key size]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class BoundRopeWrite:
    """Turns queries and keys of some rows by their positions, layer after layer, after their norms if they have any.

    Rows are [all heads' queries, keys, values]. The queries go to `queries` [row, head, key size], keys and values into
    the store, at each row's block and slot. Rows of block 0, the null block, are padding and write nothing there; from
    `num_rows` on all are, and nothing is done for them.
    """

    __slots__ = ("_call", "_held", "_layers", "_middle", "_places", "_shape", "_tail")

    def __init__(self, places: Places, store: StoreLayers, queries: torch.Tensor, num_rows: int | None = None) -> None:
        num_padded, num_heads, key_size = queries.shape
        check_floats(queries)
        check_dense(queries)
        if key_size != store.key_size:
            raise ValueError(f"queries {layout(queries)} do not fit keys of {store.key_size}")
        if places.cos.shape != (num_padded, key_size) or places.sin.shape != places.cos.shape:
            raise ValueError(f"angles are {layout(places.cos)}: one row of {key_size} for each of {num_padded} rows")
        if places.max_block >= store.num_blocks:
            raise ValueError(f"block {places.max_block} is not in a store of {store.num_blocks}")
        width = (num_heads + store.num_kv_heads) * key_size + store.num_kv_heads * store.value_size
        self._held = (places, queries)
        self._call = extension.kernels().rope_write
        self._layers = store.addresses
        self._shape = torch.Size((num_padded, width))
        self._places = (places.cos.data_ptr(), places.sin.data_ptr())
        self._middle = (store.kv_type, places.blocks.data_ptr(), places.slots.data_ptr(), queries.data_ptr())
        self._tail = (
            rows_of(queries, num_rows),
            num_heads,
            store.num_kv_heads,
            key_size,
            store.value_size,
            store.block_size,
            torch.get_num_threads(),
        )

    def __call__(self, at: int, qkv: torch.Tensor, norms: HeadNormWeights | None) -> None:
        """Into layer `at` of the store."""
        if qkv.shape != self._shape or qkv.stride(1) != 1 or qkv.dtype != torch.float32:
            raise ValueError(f"qkv is {layout(qkv)}: {self._shape[1]} numbers side by side for each row are wanted")
        heads = (0, 0, 0.0)
        if norms is not None:
            size = (self._tail[3],)
            heads = (address_of(norms.query, size), address_of(norms.key, size), norms.eps)
        layer, middle = self._layers[at], self._middle
        self._call(qkv.data_ptr(), qkv.stride(0), *self._places, *heads, *layer, *middle, *self._tail)


def rope_write(
    qkv: torch.Tensor,
    places: Places,
    norms: HeadNormWeights | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
) -> torch.Tensor:
    """One layer's, for who has one."""
    BoundRopeWrite(places, StoreLayers([keys], [values]), queries)(0, qkv, norms)
    return queries


class BoundSiluMul:
    """`out` = silu(gate) * up, of rows that hold gate, then up. Rows from `num_rows` on are padding and not touched."""

    __slots__ = ("_call", "_shape", "_tail", "out")

    def __init__(self, out: torch.Tensor, num_rows: int | None = None) -> None:
        check_floats(out)
        check_dense(out)
        num_padded, size = out.shape
        self.out = out
        self._call = extension.kernels().silu_mul
        self._shape = torch.Size((num_padded, 2 * size))
        self._tail = (out.data_ptr(), rows_of(out, num_rows), size, torch.get_num_threads())

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns `out`."""
        self._call(address_of(gate_up, self._shape), *self._tail)
        return self.out


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """One gate, for who has one."""
    return BoundSiluMul(out)(gate_up)
