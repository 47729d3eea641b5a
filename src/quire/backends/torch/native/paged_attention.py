"""Attention of a step's rows over the blocks of the KV store."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.backends.torch.native import extension
from quire.backends.torch.native.store_layers import StoreLayers
from quire.backends.torch.native.tensors import check_floats, layout
from quire.core.step import WorkItem


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
        self.num_tiles: int = extension.kernels().make_tiles(
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


class BoundAttention:
    """Attention of one step's rows, layer after layer: what layers share is checked and looked up once.

    [row, head, key size] -> `out` [row, head, value size]; rows behind those of the items become zero. A store has keys
    [block, kv head, key size, slot] and values [block, kv head, slot, value size], this step's rows included. Slots
    beyond a row's position may hold anything.
    """

    __slots__ = ("_call", "_head", "_held", "_layers", "_num_threads", "_tail")

    def __init__(self, queries: torch.Tensor, store: StoreLayers, items: NativeItems, out: torch.Tensor) -> None:
        num_rows, num_heads, key_size = queries.shape
        check_floats(queries, out)
        if (
            out.shape != (num_rows, num_heads, store.value_size)
            or queries.stride()[1:] != (key_size, 1)
            or out.stride()[1:] != (store.value_size, 1)
        ):
            raise ValueError(
                f"queries are {layout(queries)} and out is {layout(out)}; only the row stride may be larger"
            )
        is_fitting = key_size == store.key_size and num_heads == store.num_kv_heads * items.group_size
        if not is_fitting or store.block_size != items.block_size:
            raise ValueError(
                f"queries {layout(queries)} do not fit the items, or keys of {store.num_kv_heads} heads of "
                f"{store.key_size} in blocks of {store.block_size}"
            )
        if num_rows < items.num_rows or items.max_block >= store.num_blocks:
            raise ValueError(
                f"items have {items.num_rows} rows and block {items.max_block}: {num_rows}, {store.num_blocks} given"
            )
        self._held = (queries, items, out)
        self._call = extension.kernels().attention
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
