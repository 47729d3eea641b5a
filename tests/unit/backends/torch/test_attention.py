"""Attention through block tables against attention written down plainly, and against itself in other company."""

from dataclasses import dataclass
from random import Random

import pytest
import torch

from quire.backends.host.batch import make_batch
from quire.backends.host.block_store import LayerShape
from quire.backends.torch.attention import AttentionSettings, attend
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.linear import padded
from quire.backends.torch.tiles import Tiler
from quire.core.step import WorkItem

CPU = torch.device("cpu")


@dataclass
class Layer:
    """One layer's attention, and sequences whose keys and values are made up by position."""

    num_heads: int
    shape: LayerShape
    window: int | None = None
    block_size: int = 8

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        return (self.shape,)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.shape.num_kv_heads

    def numbers(self, sequence: int, length: int, heads: int, size: int, salt: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000 * sequence + salt)
        # Cut from one long draw: the generator's last numbers depend on how many are asked for.
        return torch.randn(160, heads, size, generator=generator)[:length]

    def queries(self, sequence: int, length: int) -> torch.Tensor:
        return self.numbers(sequence, length, self.num_heads, self.shape.key_size, 1)

    def keys(self, sequence: int, length: int) -> torch.Tensor:
        return self.numbers(sequence, length, self.shape.num_kv_heads, self.shape.key_size, 2)

    def values(self, sequence: int, length: int) -> torch.Tensor:
        return self.numbers(sequence, length, self.shape.num_kv_heads, self.shape.value_size, 3)

    def plain(self, sequence: int, length: int, first: int) -> torch.Tensor:
        """Rows from `first` on, in float64 and without blocks."""
        made = (self.queries(sequence, length), self.keys(sequence, length), self.values(sequence, length))
        queries, keys, values = (one.double() for one in made)
        keys, values = (one.repeat_interleave(self.group_size, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * 0.3
        at = torch.arange(length)
        hidden = at[None, :] > at[:, None]
        if self.window is not None:
            hidden |= at[None, :] <= at[:, None] - self.window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)[first:]

    def paged(self, spans: list[tuple[int, int, int]], blocks: list[list[int]]) -> list[torch.Tensor]:
        """Rows first..length of each (sequence, first, length), the rest cached, all in one step."""
        store = KVStore(self.kv_shapes, 200, self.block_size, torch.float32, CPU)
        for tensor in (*store.keys, *store.values):
            tensor.fill_(float("nan"))
        items, queries = [], []
        for at, (sequence, first, length) in enumerate(spans):
            table, whole = torch.tensor(blocks[at]), torch.arange(length)
            keys, values = self.keys(sequence, length), self.values(sequence, length)
            store.write(0, table[whole // self.block_size], whole % self.block_size, keys, values)
            items.append(WorkItem(at, (0,) * (length - first), first, tuple(blocks[at])))
            queries.append(self.queries(sequence, length)[first:])
        batch = make_batch(items, self.block_size, padded)
        tiler = Tiler(self.block_size, self.kv_shapes, (self.window,), self.group_size, CPU)
        rows = torch.cat(queries)
        filled = torch.cat([rows, rows.new_zeros(len(batch.tokens) - len(rows), *rows.shape[1:])])
        out = attend(filled, store, 0, tiler.tiles(batch)[self.window], AttentionSettings(0.3))
        return list(torch.split(out[: len(rows)], [length - first for _, first, length in spans]))


LAYERS = [
    Layer(6, LayerShape(2, 16, 16)),
    Layer(4, LayerShape(4, 8, 8)),
    Layer(8, LayerShape(1, 12, 20)),
    Layer(9, LayerShape(3, 64, 64), block_size=32),
    Layer(6, LayerShape(2, 16, 16), window=11),
    Layer(4, LayerShape(4, 8, 8), window=40, block_size=16),
]


def spread(layer: Layer, random: Random, lengths: list[int]) -> list[list[int]]:
    """Blocks of their own for each, in no order."""
    ids = random.sample(range(1, 200), 199)
    return [[ids.pop() for _ in range(-(-length // layer.block_size))] for length in lengths]


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_see_what_plain_attention_sees(layer: Layer) -> None:
    random = Random(1)
    spans = [(1, 0, 1), (2, 0, 37), (3, 60, 61), (4, 5, 90), (5, 32, 64), (6, 63, 64), (7, 0, 130)]
    got = layer.paged(spans, spread(layer, random, [length for _, _, length in spans]))
    for rows, (sequence, first, length) in zip(got, spans, strict=True):
        assert torch.allclose(rows.double(), layer.plain(sequence, length, first), atol=1e-5), (sequence, first, length)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_row_has_the_same_bits_in_any_company_and_any_chunk(layer: Layer) -> None:
    random = Random(2)
    for length in (1, 2, 31, 64, 77):
        whole = layer.paged([(1, 0, length)], spread(layer, random, [length]))[0]
        for first in {0, 1, length // 2, length - 1} - {length}:
            lengths = [random.randint(1, 90) for _ in range(3)]
            spans = [(at + 2, random.randrange(other), other) for at, other in enumerate(lengths)]
            place = random.randrange(4)
            spans.insert(place, (1, first, length))
            got = layer.paged(spans, spread(layer, random, [span[2] for span in spans]))[place]
            assert torch.equal(got, whole[first:]), (length, first)
            prefix = layer.paged([(1, 0, first + 1)], spread(layer, random, [first + 1]))[0]
            assert torch.equal(prefix, whole[: first + 1]), (length, first)


def test_many_tiles_are_attended_to_in_several_calls_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[0]
    spans = [(at, 0, 70) for at in range(5)]
    tables = spread(layer, Random(3), [70] * 5)
    together = layer.paged(spans, tables)
    monkeypatch.setattr("quire.backends.torch.tiles.MAX_ROWS_PER_CALL", 64)
    apart = layer.paged(spans, tables)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
