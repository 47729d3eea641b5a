"""What a layer of mlx-lm's models takes for its cache, and the attention it calls.

mlx-lm's modules hand the keys and values of new tokens to a cache and ask it for all there are; then they call one
function for attention, with that cache. Here the cache is a layer of the paged store: it writes what it is handed, and
the function reads blocks through tables. A flat batch is many sequences of one token each, [row, 1], so that each row
has its own position:

    queries, keys, values   [row, head, 1, size]
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from quire.backends.mlx.kv_store import KVStore
from quire.backends.mlx.tiles import Tile, Tiles
from quire.errors import CheckpointError

ATTENTION = "scaled_dot_product_attention"


@dataclass(slots=True)
class Pass:
    """One forward pass over a batch."""

    store: KVStore
    positions: mx.array
    places: tuple[mx.array, mx.array]
    """Of each row its block and its slot."""
    tiles: dict[int | None, Tiles]
    """By window."""
    are_finite: list[mx.array] = field(default_factory=list)
    """[row], of each layer that has written."""
    num_answered: int = 0
    """Layers whose attention came here."""


class PagedLayer:
    """One layer of one pass, as the model's modules see it."""

    def __init__(self, of: Pass, at: int, window: int | None) -> None:
        self._pass = of
        self._at = at
        self._window = window

    @property
    def offset(self) -> mx.array:
        """Where each row stands in its sequence."""
        return self._pass.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write; what is there is read by `attend`."""
        of = self._pass
        of.are_finite.append(of.store.write(self._at, of.places, keys[:, :, 0], values[:, :, 0]))
        return keys, values

    def make_mask(self, *_: object, **__: object) -> None:
        """Tiles say who sees whom."""

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """[row, head, 1, size], over what is in the store, this step's rows included."""
        of = self._pass
        of.num_answered += 1
        keys, values = of.store.keys[self._at], of.store.values[self._at]
        tiles = of.tiles[self._window]
        heads = queries[:, :, 0]
        parts = [_attend(heads[tile.rows], keys, values, tile, (scale, sinks)) for tile in tiles.tiles]
        return mx.concatenate(parts)[tiles.order][:, :, None]


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, tile: Tile, settings: tuple[float, mx.array | None]
) -> mx.array:
    """[sequence x row, head, size] -> the same with values' size."""
    scale, sinks = settings
    num_sequences, _, num_rows, _ = tile.mask.shape
    by_sequence = queries.reshape(num_sequences, num_rows, *queries.shape[1:]).transpose(0, 2, 1, 3)
    seen = [array[tile.tables].flatten(1, 2).transpose(0, 2, 1, 3).astype(queries.dtype) for array in (keys, values)]
    out = mx.fast.scaled_dot_product_attention(by_sequence, *seen, scale=scale, mask=tile.mask, sinks=sinks)
    return out.transpose(0, 2, 1, 3).flatten(0, 1)


def replace_attention() -> None:
    """Let every model of mlx-lm that has been imported call ours; for caches that are not ours it is mlx-lm's own."""
    from mlx_lm.models import base  # noqa: PLC0415 - seconds of import, paid when used

    for name, module in list(sys.modules.items()):
        is_model = name.startswith("mlx_lm.models.") and module is not base
        if is_model and getattr(module, ATTENTION, None) is base.scaled_dot_product_attention:
            setattr(module, ATTENTION, _with_blocks(base.scaled_dot_product_attention))


def _with_blocks(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's function with another answer for caches of ours."""
    parameters = inspect.signature(own)

    def attention(*given: Any, **named: Any) -> mx.array:
        asked = parameters.bind(*given, **named).arguments
        cache = asked["cache"]
        if not isinstance(cache, PagedLayer):
            return own(*given, **named)
        if asked["mask"] is not None:
            raise CheckpointError("the model masks its attention by itself; take another model")
        return cache.attend(asked["queries"], asked["scale"], asked.get("sinks"))

    return attention
