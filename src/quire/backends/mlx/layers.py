"""The cache objects that the layers of an mlx-lm model receive, and the attention function that they call.

mlx-lm's modules pass the keys and values of new tokens to a cache, which returns all keys and values so far; then they
call one attention function with that cache. Here the cache is a `PagedLayer`: it writes the new keys and values to the
KV store, and the attention function reads blocks through block tables. A flat batch is passed as many sequences of one
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
_CURRENT_PASSES: "list[ForwardPass]" = []
"""The running pass, if any: global, because models pass no quire object to attention. Only one thread calls MLX."""


@dataclass(slots=True)
class ForwardPass:
    """One forward pass over a batch."""

    store: KVStore
    positions: mx.array
    kv_indices: tuple[mx.array, mx.array]
    """Block of each row, and its slot in the block."""
    tiles: dict[int | None, Tiles]
    """The tiles for each window size."""
    num_layers: int
    """Number of layers, each of which must call attention once; `num_calls` counts these calls."""
    are_finite: list[mx.array] = field(default_factory=list)
    """For each layer that wrote KV: [row], whether the row is finite."""
    num_calls: int = 0
    writers: "dict[int, PagedLayer]" = field(default_factory=dict)
    """Id of a keys array -> the layer that wrote it: a layer without a cache attends with another layer's keys."""


class PagedLayer:
    """The cache object that one layer receives in one pass."""

    def __init__(self, forward_pass: ForwardPass, index: int, window: int | None) -> None:
        self._pass = forward_pass
        self._index = index
        self._window = window
        self._keys: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """Position of each row in its sequence."""
        return self._pass.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the keys and values, and return them unchanged; `attend` reads the store."""
        store, kv_indices = self._pass.store, self._pass.kv_indices
        self._pass.are_finite.append(store.write(self._index, kv_indices, keys[:, :, 0], values[:, :, 0]))
        self._pass.writers[id(keys)] = self
        self._keys = keys  # keeps the array alive so that its id stays unique
        return keys, values

    def make_mask(self, *_: object, **__: object) -> None:
        """Return no mask; tiles contain the masks."""

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend over all KV in the store, including the rows of this step; returns [row, head, 1, size]."""
        self._pass.num_calls += 1
        store = self._pass.store
        keys, values = store.keys[self._index], store.values[self._index]
        tiles = self._pass.tiles[self._window]
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
    blocks = [array[tile.tables].flatten(1, 2).transpose(0, 2, 1, 3).astype(queries.dtype) for array in (keys, values)]
    out = mx.fast.scaled_dot_product_attention(by_sequence, *blocks, scale=scale, mask=tile.mask, sinks=sinks)
    return out.transpose(0, 2, 1, 3).flatten(0, 1)


@contextmanager
def use_pass(forward_pass: ForwardPass) -> Iterator[None]:
    """Route the model's attention to this pass. Raises CheckpointError unless every layer called it."""
    _CURRENT_PASSES.append(forward_pass)
    try:
        yield
    finally:
        _CURRENT_PASSES.pop()
        forward_pass.writers.clear()  # else a reference cycle keeps the step's arrays in memory
    if forward_pass.num_calls != forward_pass.num_layers or not forward_pass.are_finite:
        raise CheckpointError(
            f"expected all {forward_pass.num_layers} layers to attend through the function that mlx-lm's models share, "
            f"got {forward_pass.num_calls}; choose another model, or backend cpu if it runs this one",
            code="attention_not_replaced",
        )


def replace_attention() -> None:
    """Make every imported mlx-lm model call quire's attention, which outside a pass calls mlx-lm's own."""
    from mlx_lm.models import base  # noqa: PLC0415 - takes seconds, imported only when used

    for name, module in list(sys.modules.items()):
        is_model = name.startswith("mlx_lm.models.") and module is not base
        if is_model and getattr(module, ATTENTION, None) is base.scaled_dot_product_attention:
            setattr(module, ATTENTION, _with_paged_attention(base.scaled_dot_product_attention))


def _with_paged_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap mlx-lm's attention function so that it uses paged attention during a pass."""
    parameters = inspect.signature(original)

    def attention(*args: Any, **named_args: Any) -> mx.array:
        if not _CURRENT_PASSES:
            return original(*args, **named_args)
        call = parameters.bind(*args, **named_args).arguments
        layer = _CURRENT_PASSES[-1].writers.get(id(call["keys"]))
        if layer is None or call["mask"] is not None:
            raise CheckpointError("the model changes keys or masks after its cache returned them; choose another model")
        return layer.attend(call["queries"], call["scale"], call.get("sinks"))

    return attention
