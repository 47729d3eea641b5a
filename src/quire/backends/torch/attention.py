"""Attention of a step's rows to their blocks, for prefill and decode rows in one call.

A row's arithmetic does not depend on the other rows: scores are products of one tile of rows with one block, whose
shapes never change; the maximum over blocks is exact in any order; sums over blocks run in block-table order. Slots
after a row's own position get weights of exactly zero. A row therefore has the same bits alone, in a batch, in any
chunk, and with its prefix cached.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.tiles import Tiles


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Attention settings of a layer, apart from its window."""

    scale: float
    softcap: float | None = None


def attend(
    queries: torch.Tensor, store: KVStore, layer: int, calls: tuple[Tiles, ...], settings: AttentionSettings
) -> torch.Tensor:
    """Attend to the KV store, including this step's rows: [row, head, key size] -> [row, head, value size]."""
    num_rows, num_heads, _ = queries.shape
    out = queries.new_zeros(num_rows, num_heads, store.values[layer].shape[-1])
    for tiles in calls:
        _attend_tiles(queries, store.keys[layer], store.values[layer], tiles, settings, out)
    return out


def _attend_tiles(
    queries: torch.Tensor,
    all_keys: torch.Tensor,
    all_values: torch.Tensor,
    tiles: Tiles,
    settings: AttentionSettings,
    out: torch.Tensor,
) -> None:
    num_tiles, tile_rows = tiles.rows.shape
    num_heads, key_size = queries.shape[1:]
    num_kv_heads, value_size = all_keys.shape[1], all_values.shape[-1]
    group = num_heads // num_kv_heads
    num_pairs = len(tiles.pair_tile)

    # [tile, row of tile, kv head, head of group, size] -> for each tile and KV head, the rows multiplied with a block.
    # Sums are float32 for every dtype: in bfloat16 their error would grow with the sequence.
    gathered = queries[tiles.rows].float().view(num_tiles, tile_rows, num_kv_heads, group, key_size) * settings.scale
    by_head = gathered.permute(0, 2, 1, 3, 4).reshape(num_tiles, num_kv_heads, tile_rows * group, key_size)
    keys = all_keys[tiles.pair_block].float()
    scores = torch.bmm(by_head[tiles.pair_tile].flatten(0, 1), keys.flatten(0, 1))
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    scores = scores.view(num_pairs, num_kv_heads, tile_rows, group, -1)
    scores.masked_fill_(tiles.is_masked[:, None, :, None, :], float("-inf"))
    scores = scores.view(num_pairs, num_kv_heads, tile_rows * group, -1)

    peak = _reduce_blocks(scores.amax(-1), tiles.num_active, torch.maximum)
    weights = scores.sub_(peak[tiles.pair_tile].unsqueeze(-1)).exp_()
    total = _reduce_blocks(weights.sum(-1), tiles.num_active, torch.add)
    values = all_values[tiles.pair_block].float()
    # A weight of zero does not cancel a NaN, and unwritten slots may contain any value.
    values[tiles.partial_pairs] = values[tiles.partial_pairs].masked_fill(tiles.is_unwritten[:, None, :, None], 0.0)
    parts = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(num_pairs, num_kv_heads, -1, value_size)
    outputs = _reduce_blocks(parts, tiles.num_active, torch.add) / total.unsqueeze(-1)

    by_row = outputs.view(num_tiles, num_kv_heads, tile_rows, group, value_size).permute(0, 2, 1, 3, 4)
    by_row = by_row.reshape(num_tiles * tile_rows, num_heads, value_size)
    out[tiles.real_rows] = by_row[tiles.real_indices].to(out.dtype)


def _reduce_blocks(
    parts: torch.Tensor, num_active: tuple[int, ...], combine: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Combine each tile's pairs element-wise, in the order of its block table."""
    first, *rest = torch.split(parts, list(num_active))
    combined = first.clone()
    for part in rest:
        leading = combined[: len(part)]
        combine(leading, part, out=leading)
    return combined
