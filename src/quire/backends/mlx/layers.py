"""The cache objects that layers of mlx-lm's models receive, and the attention function they call.

mlx-lm's modules pass the keys and values of new tokens to a cache, which returns all keys and values so far; then they
call one attention function with that cache. Here the cache is a layer of the paged store: it writes the new keys and
values, and the attention function reads blocks through block tables. A flat batch is passed as many sequences of one
token each, [row, 1], so that each row has its own position:

    queries, keys, values   [row, head, 1, size]
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from quire.backends.mlx.kv_store import KVStore
from quire.backends.mlx.tiles import Tile, Tiles
from quire.errors import CheckpointError

ATTENTION = "scaled_dot_product_attention"
_GOING: "list[Pass]" = []
"""The running pass, if any; global because models pass no quire object to attention. Only one thread calls MLX."""


@dataclass(slots=True)
class Pass:
    """One forward pass over a batch."""

    store: KVStore
    positions: mx.array
    places: tuple[mx.array, mx.array]
    """Block and slot of each row."""
    tiles: dict[int | None, Tiles]
    """The tiles for each window size."""
    num_layers: int
    """Number of layers expected to call attention."""
    are_finite: list[mx.array] = field(default_factory=list)
    """For each layer that wrote KV: [row], whether the row is finite."""
    num_answered: int = 0
    writers: "dict[int, PagedLayer]" = field(default_factory=dict)
    """The writer of each keys array, by the array's id: a layer without a cache uses another layer's keys."""


class PagedLayer:
    """The cache object that one layer receives in one pass."""

    def __init__(self, of: Pass, at: int, window: int | None) -> None:
        self._pass = of
        self._at = at
        self._window = window
        self._keys: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """Position of each row in its sequence."""
        return self._pass.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the keys and values, and return them unchanged; `attend` reads the store."""
        of = self._pass
        of.are_finite.append(of.store.write(self._at, of.places, keys[:, :, 0], values[:, :, 0]))
        of.writers[id(keys)] = self
        self._keys = keys  # keeps the array alive so that its id stays unique
        return keys, values

    def make_mask(self, *_: object, **__: object) -> None:
        """Return no mask; tiles contain the masks."""

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend over all KV in the store, including the rows of this step; returns [row, head, 1, size]."""
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
    """Attend within one tile: [sequence x row, head, size] -> [sequence x row, head, value size]."""
    scale, sinks = settings
    num_sequences, _, num_rows, _ = tile.mask.shape
    by_sequence = queries.reshape(num_sequences, num_rows, *queries.shape[1:]).transpose(0, 2, 1, 3)
    seen = [array[tile.tables].flatten(1, 2).transpose(0, 2, 1, 3).astype(queries.dtype) for array in (keys, values)]
    out = mx.fast.scaled_dot_product_attention(by_sequence, *seen, scale=scale, mask=tile.mask, sinks=sinks)
    return out.transpose(0, 2, 1, 3).flatten(0, 1)


@contextmanager
def attending(of: Pass) -> Iterator[None]:
    """Route the model's attention to this pass. Raises CheckpointError unless every layer called it."""
    _GOING.append(of)
    try:
        yield
    finally:
        _GOING.pop()
        of.writers.clear()  # they refer to the pass and so keep the step's arrays until garbage collection
    if of.num_answered != of.num_layers or not of.are_finite:
        raise CheckpointError(
            f"expected all {of.num_layers} layers to attend through the function that mlx-lm's models share, "
            f"{of.num_answered} do; choose another model, or backend cpu if it runs this one",
            code="attention_not_replaced",
        )


def replace_attention() -> None:
    """Make every imported mlx-lm model call quire's attention; outside a pass it forwards to mlx-lm's own."""
    from mlx_lm.models import base  # noqa: PLC0415 - takes seconds, imported only when used

    for name, module in list(sys.modules.items()):
        is_model = name.startswith("mlx_lm.models.") and module is not base
        if is_model and getattr(module, ATTENTION, None) is base.scaled_dot_product_attention:
            setattr(module, ATTENTION, _with_blocks(base.scaled_dot_product_attention))


def _with_blocks(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap mlx-lm's attention function so that it uses paged attention during a pass."""
    parameters = inspect.signature(own)

    def attention(*args: Any, **named: Any) -> mx.array:
        if not _GOING:
            return own(*args, **named)
        call = parameters.bind(*args, **named).arguments
        layer = _GOING[-1].writers.get(id(call["keys"]))
        if layer is None or call["mask"] is not None:
            raise CheckpointError("the model changes keys or masks its attention by itself; choose another model")
        return layer.attend(call["queries"], call["scale"], call.get("sinks"))

    return attention
