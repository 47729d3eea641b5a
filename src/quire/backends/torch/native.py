"""The native CPU kernels as functions of torch tensors: checks types and shapes, passes addresses, decides nothing.

The kernels are the extension `quire._native`, which is built where there is a C++ compiler. It shares torch's OpenMP
runtime, so it is imported after torch, here and nowhere else. What every kernel promises: the bits of a row depend on
that row's own inputs alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.core.step import WorkItem

HEAD_SIZES = range(32, 256 + 1, 8)
BLOCK_SIZES = (16, 32, 64)
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Availability(NamedTuple):
    """Whether the kernels can be used here, and if not, why not."""

    is_available: bool
    reason: str
    isa: str | None = None
    """avx512, avx2 or portable."""


@cache
def available() -> Availability:
    """Looked up once per process."""
    try:
        isa = _kernels().isa()
    except ImportError as error:
        return Availability(False, f"built without a compiler: quire._native is missing ({error})")
    except RuntimeError as error:
        return Availability(False, str(error))
    runtimes = openmp_runtimes()
    if len(runtimes) > 1:
        return Availability(False, f"two OpenMP runtimes would share the cores: {', '.join(runtimes)}")
    return Availability(True, f"kernels for {isa}", isa)


def openmp_runtimes() -> list[str]:
    """The OpenMP runtimes mapped into this process; one is right. Empty where the system does not tell."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*", maps)))


@cache
def _kernels() -> ModuleType:
    return import_module("quire._native")  # after torch, and only where it was built


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer asks of attention beside its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class NativeItems:
    """A step's items, prepared once for all layers with the same number of query heads per KV head.

    Rows are gathered into tiles that go through blocks together, the dearest tile first. Rows of one item share its
    blocks; decoding rows are sorted by block table, so that those with a common prefix read it together.
    """

    __slots__ = ("_addresses", "_arrays", "block_size", "group_size", "max_block", "num_rows", "num_tiles")

    def __init__(self, items: Sequence[WorkItem], block_size: int, group_size: int) -> None:
        num_rows = np.array([len(item.token_ids) for item in items], dtype=np.int32)
        positions = np.array([item.first_position for item in items], dtype=np.int32)
        num_blocks = np.array([len(item.block_ids) for item in items], dtype=np.int32)
        _check_items(num_rows, positions, num_blocks, block_size)
        tables = np.concatenate([np.asarray(item.block_ids, dtype=np.int32) for item in items])
        self.block_size = block_size
        self.group_size = group_size
        self.num_rows = int(num_rows.sum())
        self.max_block = int(tables.max())
        if int(tables.min()) < 0:
            raise ValueError("block ids are not negative")
        members = np.empty((self.num_rows, 3), dtype=np.int32)
        tiles = np.empty((self.num_rows, 3), dtype=np.int32)
        first_rows, offsets = _starts(num_rows), _starts(num_blocks)
        self.num_tiles: int = _kernels().make_tiles(
            first_rows.ctypes.data,
            num_rows.ctypes.data,
            positions.ctypes.data,
            offsets.ctypes.data,
            len(items),
            tables.ctypes.data,
            block_size,
            group_size,
            members.ctypes.data,
            tiles.ctypes.data,
        )
        self._arrays = (tables, members, tiles)
        self._addresses = (tables.ctypes.data, members.ctypes.data, tiles.ctypes.data)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the flat tables, the members and the tiles. They live as long as this object."""
        return self._addresses

    @property
    def tiles(self) -> list[list[int]]:
        """For each tile the rows in it, in the order of work; for tests and for the curious."""
        _, members, tiles = self._arrays
        return [members[first : first + count, 0].tolist() for first, count, _ in tiles[: self.num_tiles]]


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    items: NativeItems,
    out: torch.Tensor,
    shape: AttentionShape,
) -> torch.Tensor:
    """[row, head, key size] -> `out` [row, head, value size]; rows behind those of the items become zero.

    `keys` [block, kv head, key size, slot] and `values` [block, kv head, slot, value size] are one layer's store, this
    step's rows included. Slots beyond a row's position may hold anything.
    """
    num_rows, num_heads, key_size = queries.shape
    num_blocks, num_kv_heads, _, block_size = keys.shape
    value_size = values.shape[3]
    _check_floats(queries, out)
    _check_store(keys, values)
    if (
        out.shape != (num_rows, num_heads, value_size)
        or queries.stride()[1:] != (key_size, 1)
        or out.stride()[1:] != (value_size, 1)
    ):
        raise ValueError(f"queries are {_layout(queries)} and out is {_layout(out)}; only the row stride may be larger")
    if key_size != keys.shape[2] or num_heads != num_kv_heads * items.group_size or block_size != items.block_size:
        raise ValueError(f"queries {_layout(queries)} and keys {_layout(keys)} do not fit each other or the items")
    if num_rows < items.num_rows or items.max_block >= num_blocks:
        raise ValueError(
            f"items have {items.num_rows} rows and block {items.max_block}: {num_rows}, {num_blocks} given"
        )
    tables, members, tiles = items.addresses
    _kernels().attention(
        queries.data_ptr(),
        queries.stride(0),
        out.data_ptr(),
        out.stride(0),
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        KV_TYPES[keys.dtype],
        num_heads,
        num_kv_heads,
        key_size,
        value_size,
        block_size,
        tables,
        members,
        tiles,
        items.num_tiles,
        items.num_rows,
        num_rows,
        -1 if shape.window is None else shape.window,
        shape.scale,
        shape.softcap or 0.0,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(
    added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> torch.Tensor:
    """`residual` += `added` in place (None: it stays), then `out` = weight * residual / rms(residual), row by row."""
    _check_floats(residual, weight, out)
    _check_dense(residual, weight, out)
    num_rows, size = residual.shape
    if out.shape != residual.shape or weight.shape != (size,):
        raise ValueError(f"residual {_layout(residual)}, out {_layout(out)} and weight {_layout(weight)} do not fit")
    if added is not None:
        _check_floats(added)
        _check_dense(added)
        if added.shape != residual.shape:
            raise ValueError(f"residual {_layout(residual)} and what is added {_layout(added)} do not fit")
    _kernels().add_rms_norm(
        0 if added is None else added.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        num_rows,
        size,
        eps,
        torch.get_num_threads(),
    )
    return out


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms of each query and key head, [key size]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's rows stand: their angles ([row, key size]), blocks and slots ([row]). Made once per step."""

    cos: torch.Tensor
    sin: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    max_block: int

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> "Places":
        """Angles as models/rope.py makes them; they may keep its middle dimension of one."""
        cos, sin = cos.flatten(1).contiguous(), sin.flatten(1).contiguous()
        _check_floats(cos, sin)
        _check_dense(blocks, slots)
        if blocks.dtype != torch.int64 or slots.dtype != torch.int64 or not len(cos) == len(blocks) == len(slots):
            raise ValueError("blocks and slots are int64, one per row")
        if min(int(blocks.min()), int(slots.min())) < 0 or int(slots.max()) >= max(BLOCK_SIZES):
            raise ValueError("blocks and slots must lie in the store")
        return cls(cos, sin, blocks, slots, int(blocks.max()))

    def part(self, rows: slice) -> "Places":
        """Those of some neighbouring rows."""
        return Places(self.cos[rows], self.sin[rows], self.blocks[rows], self.slots[rows], self.max_block)


def rope_write(
    qkv: torch.Tensor,
    places: Places,
    norms: HeadNorms | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
) -> torch.Tensor:
    """Turn queries and keys of `qkv` ([row, all heads' queries, keys, values]) by their positions, after their norms.

    The queries go to `queries` [row, head, key size], keys and values into the store, at each row's block and slot.
    Rows of block 0, the null block, are padding: they write nothing into the store.
    """
    num_rows, num_heads, key_size = queries.shape
    num_blocks, num_kv_heads, _, block_size = keys.shape
    value_size = values.shape[3]
    _check_floats(qkv, queries)
    _check_dense(queries)
    _check_store(keys, values)
    width = (num_heads + num_kv_heads) * key_size + num_kv_heads * value_size
    if qkv.shape != (num_rows, width) or qkv.stride(1) != 1 or key_size != keys.shape[2]:
        raise ValueError(f"qkv {_layout(qkv)} does not hold {width} numbers a row, or keys are {_layout(keys)}")
    if places.cos.shape != (num_rows, key_size) or places.sin.shape != places.cos.shape:
        raise ValueError(f"angles are {_layout(places.cos)}: one row of {key_size} for each of {num_rows} rows")
    if places.max_block >= num_blocks:
        raise ValueError(f"block {places.max_block} is not in a store of {num_blocks}")
    if norms is not None:
        _check_floats(norms.query, norms.key)
    _kernels().rope_write(
        qkv.data_ptr(),
        qkv.stride(0),
        places.cos.data_ptr(),
        places.sin.data_ptr(),
        0 if norms is None else norms.query.data_ptr(),
        0 if norms is None else norms.key.data_ptr(),
        0.0 if norms is None else norms.eps,
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        KV_TYPES[keys.dtype],
        places.blocks.data_ptr(),
        places.slots.data_ptr(),
        queries.data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        key_size,
        value_size,
        block_size,
        torch.get_num_threads(),
    )
    return queries


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` = silu(gate) * up, where `gate_up` is [row, gate then up]."""
    _check_floats(gate_up, out)
    _check_dense(gate_up, out)
    num_rows, size = out.shape
    if gate_up.shape != (num_rows, 2 * size):
        raise ValueError(f"gate and up {_layout(gate_up)} do not fit out {_layout(out)}")
    _kernels().silu_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, size, torch.get_num_threads())
    return out


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index of each row's largest number, and whether all numbers of the row are finite."""
    _check_floats(logits)
    num_rows, size = logits.shape
    if size == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits are {_layout(logits)}: rows must be contiguous and not empty")
    indices = torch.empty(num_rows, dtype=torch.int64)
    is_finite = torch.empty(num_rows, dtype=torch.bool)
    _kernels().argmax(
        logits.data_ptr(),
        logits.stride(0),
        indices.data_ptr(),
        is_finite.data_ptr(),
        num_rows,
        size,
        torch.get_num_threads(),
    )
    return indices, is_finite


def exp(numbers: torch.Tensor) -> torch.Tensor:
    """The kernels' own exp, right up to 88: for tests."""
    _check_floats(numbers)
    _check_dense(numbers)
    out = torch.empty_like(numbers)
    _kernels().exp(numbers.data_ptr(), out.data_ptr(), numbers.numel())
    return out


def read_sum(data: torch.Tensor, num_threads: int | None = None) -> float:
    """Read all of `data` as fast as this machine can: the roof of everything that is bound by memory."""
    _check_dense(data)
    num_bytes = data.numel() * data.itemsize
    total: float = _kernels().read_sum(data.data_ptr(), num_bytes, num_threads or torch.get_num_threads())
    return total


def _starts(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    starts = np.zeros(len(counts), dtype=np.int32)
    np.cumsum(counts[:-1], out=starts[1:])
    return starts


def _check_items(
    num_rows: NDArray[np.int32], positions: NDArray[np.int32], num_blocks: NDArray[np.int32], block_size: int
) -> None:
    if len(num_rows) == 0 or int(num_rows.min()) < 1 or int(positions.min()) < 0:
        raise ValueError("every item feeds at least one token, from a position that is not negative")
    if bool((num_blocks * block_size < positions + num_rows).any()):
        raise ValueError("an item has fewer blocks than its last position needs")


def _check_floats(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise TypeError(f"the kernels compute in float32 on a CPU, this is {_layout(tensor)} on {tensor.device}")


def _check_dense(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"the kernels need this contiguous and on a CPU: {_layout(tensor)} on {tensor.device}")


def _check_store(keys: torch.Tensor, values: torch.Tensor) -> None:
    _, num_kv_heads, key_size, block_size = keys.shape
    if keys.dtype not in KV_TYPES or values.dtype != keys.dtype or keys.device.type != "cpu":
        raise TypeError(f"a store holds float32 or bfloat16 on a CPU, this one {keys.dtype} and {values.dtype}")
    if values.shape[:3] != (len(keys), num_kv_heads, block_size) or block_size not in BLOCK_SIZES:
        raise ValueError(
            f"keys {_layout(keys)} and values {_layout(values)} must agree; blocks have 16, 32 or 64 slots"
        )
    if key_size not in HEAD_SIZES or values.shape[3] not in HEAD_SIZES:
        raise ValueError(f"heads have a size from 32 to 256 that 8 divides, not {key_size} or {values.shape[3]}")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("the store's keys and values are contiguous")


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
