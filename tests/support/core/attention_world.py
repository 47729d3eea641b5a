"""A KV store with sequences in it, for tests of the native attention: rows through the kernel, and in plain float64."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from quire.core.step import WorkItem
from tests.support.machine import kernels

NAN = float("nan")


@dataclass
class World:
    """A store whose unwritten slots are NaN, and sequences with their own numbers in private or shared blocks."""

    num_heads: int = 6
    num_kv_heads: int = 2
    key_size: int = 64
    value_size: int = 64
    block_size: int = 32
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    num_blocks: int = 200
    seed: int = 0
    items: list[WorkItem] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        shape, rows = (self.num_blocks, self.num_kv_heads), kernels.SCALE_ROWS[self.dtype]
        unwritten = NAN if self.dtype != torch.int8 else -1  # of codes, every scale is NaN
        self.keys = torch.full((*shape, self.key_size + rows, self.block_size), unwritten, dtype=self.dtype)
        self.values = torch.full((*shape, self.block_size, self.value_size + rows), unwritten, dtype=self.dtype)
        self.free = list(range(1, self.num_blocks))
        self.random.shuffle(self.free)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def shape(self) -> kernels.AttentionShape:
        return kernels.AttentionShape(self.key_size**-0.5, self.window, self.softcap)

    def write(self, blocks: Sequence[int], first: int, length: int) -> None:
        at = torch.arange(first, length)
        places, slots = torch.tensor(blocks)[at // self.block_size], at % self.block_size
        keys = torch.randn(len(at), self.num_kv_heads, self.key_size, generator=self.generator)
        values = torch.randn(len(at), self.num_kv_heads, self.value_size, generator=self.generator)
        if self.dtype == torch.int8:
            for store, numbers, at_slot in ((self.coded_keys, keys, True), (self.coded_values, values, False)):
                scales = numbers.abs().amax(-1) / 127
                codes = (numbers / scales[..., None]).round().to(torch.int8)
                store[0][(places, slice(None), slice(None), slots) if at_slot else (places, slice(None), slots)] = codes
                store[1][places, :, slots] = scales
            return
        self.keys[places, :, :, slots] = keys.to(self.dtype)
        self.values[places, :, slots] = values.to(self.dtype)

    @property
    def coded_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [block, kv head, key size, slot] and scales [block, kv head, slot], in the store's own memory."""
        return _coded(self.keys, self.key_size, self.block_size)

    @property
    def coded_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [block, kv head, slot, value size] and scales [block, kv head, slot]."""
        return _coded(self.values, self.block_size, self.value_size)

    def plain_keys(self, blocks: Sequence[int]) -> torch.Tensor:
        """[block, kv head, key size, slot] in float64."""
        if self.dtype != torch.int8:
            return self.keys[blocks].double()
        codes, scales = self.coded_keys
        return codes[blocks].double() * scales[blocks][:, :, None].double()

    def plain_values(self, blocks: Sequence[int]) -> torch.Tensor:
        """[block, kv head, slot, value size] in float64."""
        if self.dtype != torch.int8:
            return self.values[blocks].double()
        codes, scales = self.coded_values
        return codes[blocks].double() * scales[blocks][..., None].double()

    def add(self, past: int, rows: int, shared: Sequence[int] = ()) -> WorkItem:
        """An item that feeds `rows` tokens after `past` others, its first blocks perhaps someone else's."""
        length = past + rows
        needed = -(-length // self.block_size) - len(shared)
        blocks = (*shared, *(self.free.pop() for _ in range(needed)))
        self.write(blocks, len(shared) * self.block_size, length)
        item = WorkItem(len(self.items), (0,) * rows, past, blocks)
        self.items.append(item)
        self.queries.append(2 * torch.randn(rows, self.num_heads, self.key_size, generator=self.generator))
        return item

    def run(self, items: Sequence[WorkItem], queries: Sequence[torch.Tensor], padding: int = 0) -> torch.Tensor:
        """One call; rows of the items in order."""
        joined = torch.cat([*queries, torch.full((padding, self.num_heads, self.key_size), NAN)])
        out = torch.full((len(joined), self.num_heads, self.value_size), NAN)
        return kernels.attention(joined, (self.keys, self.values), items, out, self.shape)

    def run_all(self) -> torch.Tensor:
        return self.run(self.items, self.queries)

    def reference(self) -> torch.Tensor:
        """All rows in float64, item by item."""
        return torch.cat([self._plain(*pair) for pair in zip(self.items, self.queries, strict=True)])

    def _plain(self, item: WorkItem, queries: torch.Tensor) -> torch.Tensor:
        rows, blocks = len(queries), list(item.block_ids)
        length = item.first_position + rows
        keys = self.plain_keys(blocks).permute(1, 2, 0, 3).flatten(2)[:, None, :, :length]
        values = self.plain_values(blocks).permute(1, 0, 2, 3).flatten(1, 2)[:, None, :length]
        grouped = queries.double().view(rows, self.num_kv_heads, self.group, self.key_size).permute(1, 2, 0, 3)
        scores = grouped * self.key_size**-0.5 @ keys
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        positions = torch.arange(item.first_position, length)[:, None]
        at = torch.arange(length)
        is_hidden = at > positions
        if self.window is not None:
            is_hidden |= at <= positions - self.window
        weights = scores.masked_fill(is_hidden, -float("inf")).softmax(-1)
        out: torch.Tensor = weights @ values
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def _coded(store: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = store.flatten(2)
    codes, scales = flat[:, :, : rows * columns], flat[:, :, rows * columns :]
    return codes.reshape(*codes.shape[:2], rows, columns), scales.view(torch.float32)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=2e-5, atol=2e-5)
