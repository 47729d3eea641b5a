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

from quire.backends.torch.large_pages import Shelf
from quire.core.step import WorkItem

HEAD_SIZES = range(32, 256 + 1, 8)
BLOCK_SIZES = (16, 32, 64)
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1}
WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1}


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

    @property
    def arguments(self) -> tuple[int, float, float]:
        """As the kernel wants them."""
        return (-1 if self.window is None else self.window, self.scale, self.softcap or 0.0)


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


class StoreLayers:
    """Where a store's layers lie. They are alike, and checked once for as long as the store lives."""

    __slots__ = (
        "_tensors",
        "addresses",
        "block_size",
        "key_size",
        "kv_type",
        "num_blocks",
        "num_kv_heads",
        "value_size",
    )

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for one, other in zip(keys, values, strict=True):
            _check_store(one, other)
            if one.shape != keys[0].shape or other.shape != values[0].shape or one.dtype != keys[0].dtype:
                raise ValueError(f"the layers of a store are alike, {_layout(one)} differs from {_layout(keys[0])}")
        self._tensors = (tuple(keys), tuple(values))  # they must outlive their addresses
        self.addresses = [
            (one.data_ptr(), one.stride(0), other.data_ptr(), other.stride(0))
            for one, other in zip(keys, values, strict=True)
        ]
        self.kv_type = KV_TYPES[keys[0].dtype]
        self.num_blocks, self.num_kv_heads, self.key_size, self.block_size = keys[0].shape
        self.value_size = values[0].shape[3]


class BoundAttention:
    """Attention of one step's rows, layer after layer: what layers share is checked and looked up once.

    [row, head, key size] -> `out` [row, head, value size]; rows behind those of the items become zero. A store has keys
    [block, kv head, key size, slot] and values [block, kv head, slot, value size], this step's rows included. Slots
    beyond a row's position may hold anything.
    """

    __slots__ = ("_call", "_head", "_held", "_layers", "_num_threads", "_tail")

    def __init__(self, queries: torch.Tensor, store: StoreLayers, items: NativeItems, out: torch.Tensor) -> None:
        num_rows, num_heads, key_size = queries.shape
        _check_floats(queries, out)
        if (
            out.shape != (num_rows, num_heads, store.value_size)
            or queries.stride()[1:] != (key_size, 1)
            or out.stride()[1:] != (store.value_size, 1)
        ):
            raise ValueError(
                f"queries are {_layout(queries)} and out is {_layout(out)}; only the row stride may be larger"
            )
        is_fitting = key_size == store.key_size and num_heads == store.num_kv_heads * items.group_size
        if not is_fitting or store.block_size != items.block_size:
            raise ValueError(
                f"queries {_layout(queries)} do not fit the items, or keys of {store.num_kv_heads} heads of "
                f"{store.key_size} in blocks of {store.block_size}"
            )
        if num_rows < items.num_rows or items.max_block >= store.num_blocks:
            raise ValueError(
                f"items have {items.num_rows} rows and block {items.max_block}: {num_rows}, {store.num_blocks} given"
            )
        self._held = (queries, items, out)
        self._call = _kernels().attention
        self._layers = store.addresses
        self._head = (queries.data_ptr(), queries.stride(0), out.data_ptr(), out.stride(0))
        self._tail = (
            store.kv_type,
            num_heads,
            store.num_kv_heads,
            key_size,
            store.value_size,
            store.block_size,
            *items.addresses,
            items.num_tiles,
            items.num_rows,
            num_rows,
        )
        self._num_threads = torch.get_num_threads()

    def __call__(self, at: int, shape: AttentionShape) -> None:
        """Over layer `at` of the store."""
        self._call(*self._head, *self._layers[at], *self._tail, *shape.arguments, self._num_threads)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    items: NativeItems,
    out: torch.Tensor,
    shape: AttentionShape,
) -> torch.Tensor:
    """One layer's attention, for who has one."""
    BoundAttention(queries, StoreLayers([keys], [values]), items, out)(0, shape)
    return out


class BoundNorm:
    """`residual` += what is added (None: it stays), then `out` = weight * residual / rms(residual), row by row.

    Rows from `num_rows` on are padding: nothing is read or written there.
    """

    __slots__ = ("_call", "_held", "_shape", "_tail", "out")

    def __init__(self, residual: torch.Tensor, out: torch.Tensor, eps: float, num_rows: int | None = None) -> None:
        _check_floats(residual, out)
        _check_dense(residual, out)
        if out.shape != residual.shape:
            raise ValueError(f"residual {_layout(residual)} and out {_layout(out)} do not fit")
        self.out = out
        self._held = residual
        self._call = _kernels().add_rms_norm
        self._shape = residual.shape
        num_rows, size = _rows_of(residual, num_rows), residual.shape[1]
        self._tail = (out.data_ptr(), num_rows, size, eps, torch.get_num_threads())

    def __call__(self, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Returns `out`."""
        address = 0 if added is None else _address(added, self._shape)
        self._call(address, self._held.data_ptr(), _address(weight, self._shape[1:]), *self._tail)
        return self.out


def add_rms_norm(
    added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> torch.Tensor:
    """One norm, for who has one."""
    return BoundNorm(residual, out, eps)(added, weight)


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


class BoundRopeWrite:
    """Turns queries and keys of some rows by their positions, layer after layer, after their norms if they have any.

    Rows are [all heads' queries, keys, values]. The queries go to `queries` [row, head, key size], keys and values into
    the store, at each row's block and slot. Rows of block 0, the null block, are padding and write nothing there; from
    `num_rows` on all are, and nothing is done for them.
    """

    __slots__ = ("_call", "_held", "_layers", "_middle", "_places", "_shape", "_tail")

    def __init__(self, places: Places, store: StoreLayers, queries: torch.Tensor, num_rows: int | None = None) -> None:
        num_padded, num_heads, key_size = queries.shape
        _check_floats(queries)
        _check_dense(queries)
        if key_size != store.key_size:
            raise ValueError(f"queries {_layout(queries)} do not fit keys of {store.key_size}")
        if places.cos.shape != (num_padded, key_size) or places.sin.shape != places.cos.shape:
            raise ValueError(f"angles are {_layout(places.cos)}: one row of {key_size} for each of {num_padded} rows")
        if places.max_block >= store.num_blocks:
            raise ValueError(f"block {places.max_block} is not in a store of {store.num_blocks}")
        width = (num_heads + store.num_kv_heads) * key_size + store.num_kv_heads * store.value_size
        self._held = (places, queries)
        self._call = _kernels().rope_write
        self._layers = store.addresses
        self._shape = torch.Size((num_padded, width))
        self._places = (places.cos.data_ptr(), places.sin.data_ptr())
        self._middle = (store.kv_type, places.blocks.data_ptr(), places.slots.data_ptr(), queries.data_ptr())
        self._tail = (
            _rows_of(queries, num_rows),
            num_heads,
            store.num_kv_heads,
            key_size,
            store.value_size,
            store.block_size,
            torch.get_num_threads(),
        )

    def __call__(self, at: int, qkv: torch.Tensor, norms: HeadNorms | None) -> None:
        """Into layer `at` of the store."""
        if qkv.shape != self._shape or qkv.stride(1) != 1 or qkv.dtype != torch.float32:
            raise ValueError(f"qkv is {_layout(qkv)}: {self._shape[1]} numbers side by side for each row are wanted")
        heads = (0, 0, 0.0)
        if norms is not None:
            size = (self._tail[3],)
            heads = (_address(norms.query, size), _address(norms.key, size), norms.eps)
        layer, middle = self._layers[at], self._middle
        self._call(qkv.data_ptr(), qkv.stride(0), *self._places, *heads, *layer, *middle, *self._tail)


def rope_write(
    qkv: torch.Tensor,
    places: Places,
    norms: HeadNorms | None,
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
        _check_floats(out)
        _check_dense(out)
        num_padded, size = out.shape
        self.out = out
        self._call = _kernels().silu_mul
        self._shape = torch.Size((num_padded, 2 * size))
        self._tail = (out.data_ptr(), _rows_of(out, num_rows), size, torch.get_num_threads())

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns `out`."""
        self._call(_address(gate_up, self._shape), *self._tail)
        return self.out


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """One gate, for who has one."""
    return BoundSiluMul(out)(gate_up)


class PackedProduct:
    """Rows times a weight [out, in], plus a bias: the weight is packed once and held in one copy, for any rows.

    It is held as float32 or rounded to bfloat16; rows and results are float32. A row's result is the same in any
    company and with any number of threads.
    """

    __slots__ = ("_bias", "_call", "_head", "_num_in", "_num_out", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, shelf: Shelf) -> None:
        weight = weight.contiguous()
        _check_floats(weight)
        if dtype not in WEIGHT_TYPES:
            raise TypeError(f"weights are packed as float32 or bfloat16, not as {dtype}")
        self._num_out, self._num_in = weight.shape
        kernels, sizes, num_threads = _kernels(), (self._num_out, self._num_in), torch.get_num_threads()
        self._packed = shelf.take(kernels.packed_bytes(WEIGHT_TYPES[dtype], *sizes))
        self._bias = None if bias is None else bias.contiguous()
        kernels.pack(WEIGHT_TYPES[dtype], weight.data_ptr(), *sizes, self._packed.data_ptr(), num_threads)
        bias_at = 0 if self._bias is None else _address(self._bias, (self._num_out,))
        self._call = kernels.product
        self._head = (WEIGHT_TYPES[dtype], self._packed.data_ptr(), bias_at, self._num_in, self._num_out)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[row, out], for rows that lie anywhere as long as each is contiguous."""
        is_dense = rows.dim() == 2 and rows.shape[1] == self._num_in and rows.stride(1) == 1
        if not is_dense or rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise ValueError(
                f"rows must be float32, {self._num_in} contiguous numbers each: {_layout(rows)} on {rows.device} given"
            )
        num_rows = len(rows)
        # Whatever the caller's process has made torch's defaults: the kernel writes floats into it.
        out = torch.empty(num_rows, self._num_out, dtype=torch.float32, device="cpu")
        self._call(
            *self._head,
            torch.get_num_threads(),
            rows.data_ptr(),
            rows.stride(0),
            out.data_ptr(),
            self._num_out,
            num_rows,
        )
        return out


def has_tiles() -> bool:
    """Whether products with bfloat16 weights are made in tile registers here."""
    has: bool = _kernels().has_tiles()
    return has


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


def _rows_of(tensor: torch.Tensor, num_rows: int | None) -> int:
    """How many of a tensor's rows are meant: all, unless it is said."""
    return len(tensor) if num_rows is None else min(num_rows, len(tensor))


def _address(tensor: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Of a dense float32 tensor of exactly this shape."""
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(
            f"{_layout(tensor)} on {tensor.device} do not fit: dense float32 of {tuple(shape)} on a CPU is needed"
        )
    return tensor.data_ptr()


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
