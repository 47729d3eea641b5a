"""What a layer of mlx-lm's models takes for its cache, and the attention it calls.

mlx-lm's modules hand the keys and values of new tokens to a cache and ask it for all there are; then they call one
function for attention, with that cache. Here the cache is a layer of the paged store: it writes what it is handed, and
the function reads blocks through tables. A flat batch is many sequences of one token each, [row, 1], so that each row
has its own position:

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
"""The pass that goes on, if one does: models hand their attention no word of ours. One thread calls MLX."""


@dataclass(slots=True)
class Pass:
    """One forward pass over a batch."""

    store: KVStore
    positions: mx.array
    places: tuple[mx.array, mx.array]
    """Of each row its block and its slot."""
    tiles: dict[int | None, Tiles]
    """By window."""
    num_layers: int
    """That must attend."""
    are_finite: list[mx.array] = field(default_factory=list)
    """[row], of each layer that has written."""
    num_answered: int = 0
    writers: "dict[int, PagedLayer]" = field(default_factory=dict)
    """Who wrote keys, by the identity of the array: a layer without a cache attends with those of another."""


class PagedLayer:
    """One layer of one pass, as the model's modules see it."""

    def __init__(self, of: Pass, at: int, window: int | None) -> None:
        self._pass = of
        self._at = at
        self._window = window
        self._keys: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """Where each row stands in its sequence."""
        return self._pass.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write; what is there is read by `attend`."""
        of = self._pass
        of.are_finite.append(of.store.write(self._at, of.places, keys[:, :, 0], values[:, :, 0]))
        of.writers[id(keys)] = self
        self._keys = keys  # so that the identity stays its own
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


@contextmanager
def attending(of: Pass) -> Iterator[None]:
    """While a model runs: its attention is this pass's, and every layer of it must have attended."""
    _GOING.append(of)
    try:
        yield
    finally:
        _GOING.pop()
        of.writers.clear()  # they hold the pass, and with it the step's arrays, until garbage is collected
    if of.num_answered != of.num_layers or not of.are_finite:
        raise CheckpointError(
            f"expected all {of.num_layers} layers to attend through the function that mlx-lm's models share, "
            f"{of.num_answered} do; choose another model, or backend cpu if it runs this one",
            code="attention_not_replaced",
        )


def replace_attention() -> None:
    """Let every model of mlx-lm that has been imported call ours; outside our passes it is mlx-lm's own."""
    from mlx_lm.models import base  # noqa: PLC0415 - seconds of import, paid when used

    for name, module in list(sys.modules.items()):
        is_model = name.startswith("mlx_lm.models.") and module is not base
        if is_model and getattr(module, ATTENTION, None) is base.scaled_dot_product_attention:
            setattr(module, ATTENTION, _with_blocks(base.scaled_dot_product_attention))


def _with_blocks(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's function with another answer while a pass of ours goes on."""
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
