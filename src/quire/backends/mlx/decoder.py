"""Runs an mlx-lm model over flat batches and block tables.

quire changes an mlx-lm model in two places. First, its layers use quire's cache and attention (`layers`). Second, only
the rows whose logits are requested reach the head, because the logits of a whole prompt chunk would take more memory
than everything else.

Loading checks that this works for the model: a short text must give the same logits with mlx-lm's own caches and with
quire's. A model with an unsupported kind of attention is rejected there, with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from quire.backends.host.batch import Batch, make_batch
from quire.backends.host.block_store import LayerShape
from quire.backends.host.wanted import PassOutputs
from quire.backends.mlx.kv_store import KV_TYPES, KVStore
from quire.backends.mlx.layers import ForwardPass, PagedLayer, replace_attention, use_pass
from quire.backends.mlx.tiles import make_tiles
from quire.config.model_settings import KVDtype
from quire.core.step import WorkItem
from quire.errors import CheckpointError

PROBE_TOKENS = 24
PROBE_TOLERANCE = 1e-3
PROBE_ROUNDINGS = 16
"""Tolerance for the logits, in rounding errors (epsilon) of the model's dtype."""
PROBE_BLOCK = 8


@dataclass(frozen=True, slots=True)
class LazyOutputs:
    """Lazy outputs of a forward pass."""

    are_finite: mx.array
    hidden: mx.array
    logits: mx.array

    def wait(self, *, with_hidden: bool) -> PassOutputs:
        """Return the outputs as numpy arrays; hidden states only if they are requested."""
        hidden = np.array(self.hidden.astype(mx.float32)) if with_hidden else np.zeros((0, 0), np.float32)
        return PassOutputs(np.array(self.are_finite), hidden, np.array(self.logits.astype(mx.float32)))


class Decoder:
    """An mlx-lm model, and the KV shapes of its layers."""

    def __init__(self, model: Any, windows: tuple[int | None, ...] | None = None) -> None:
        """`windows`: the sliding windows of all layers; if None, the windows of mlx-lm's caches are used."""
        replace_attention()
        self._model = model
        self._owner = _owner_of_layers(model)
        self._inner: Callable[..., mx.array] = self._owner.model
        tokens = np.arange(PROBE_TOKENS) * 7 % PROBE_TOKENS  # small ids, which every vocabulary has
        caches = _make_caches(model)
        expected = self._original_logits(mx.array(tokens)[None], caches)
        self.vocabulary_size = int(expected.shape[-1])
        # Layers after the last cache share the KV of another layer.
        self.windows = tuple(_window_of(cache) for cache in caches) if windows is None else windows[: len(caches)]
        self.kv_shapes = tuple(_shape_of(cache) for cache in caches)
        self.dtype: KVDtype = _dtype_name(caches[0].keys.dtype)
        """Dtype in which the model computes keys and values."""
        self._check_logits(tokens, expected)

    def compute(self, batch: Batch, store: KVStore, requested: NDArray[np.int64]) -> LazyOutputs:
        """Build a lazy pass that writes the rows' KV and computes hidden states and the requested rows' logits."""
        tokens, positions, *kv_indices = (mx.array(array.astype(np.int32)) for array in batch.rows)
        tiles = {window: make_tiles(batch, store.block_size, window) for window in set(self.windows)}
        forward_pass = ForwardPass(store, positions, (kv_indices[0], kv_indices[1]), tiles, len(self._model.layers))
        layers = [PagedLayer(forward_pass, index, window) for index, window in enumerate(self.windows)]
        rows = mx.array((requested if len(requested) else np.zeros(1, np.int64)).astype(np.int32))
        wrapped = _HeadRows(self._inner, rows)
        self._owner.model = wrapped
        try:
            with use_pass(forward_pass):
                logits = self._model(tokens[:, None], cache=layers)[:, 0][: len(requested)]
        finally:
            self._owner.model = self._inner
        if wrapped.hidden is None:
            raise CheckpointError("the model does not call its layers as one module; choose another model")
        are_finite = mx.isfinite(wrapped.hidden).all(axis=1)
        for array in forward_pass.are_finite:
            are_finite = are_finite & array
        return LazyOutputs(are_finite, wrapped.hidden, logits)

    def _original_logits(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=caches)[0].astype(mx.float32)
        mx.eval(logits, [cache.state for cache in caches])
        return logits

    def _check_logits(self, tokens: NDArray[np.int64], expected: mx.array) -> None:
        """Compare paged attention with the model's own attention. Raises CheckpointError if the logits differ."""
        num_blocks = -(-PROBE_TOKENS // PROBE_BLOCK)
        store = KVStore(self.kv_shapes, num_blocks, PROBE_BLOCK, self.dtype)
        item = WorkItem(0, tuple(tokens.tolist()), 0, tuple(range(1, num_blocks + 1)))
        outputs = self.compute(make_batch([item], PROBE_BLOCK), store, np.arange(PROBE_TOKENS))
        got = outputs.logits.astype(mx.float32)
        max_error, max_logit = float(mx.abs(got - expected).max()), float(mx.abs(expected).max())
        tolerance = max(PROBE_TOLERANCE, PROBE_ROUNDINGS * float(mx.finfo(KV_TYPES[self.dtype]).eps))
        if not max_error <= tolerance * max(1.0, max_logit):
            raise CheckpointError(
                "expected equal logits from the model's own attention and paged attention, got a "
                f"difference of {max_error:.2g}: quire does not support its attention; choose another model",
                code="attention_differs",
            )


class _HeadRows:
    """Wraps the layers of a model so that only the requested rows reach the head."""

    def __init__(self, inner: Callable[..., mx.array], rows: mx.array) -> None:
        self._inner = inner
        self._rows = rows
        self.hidden: mx.array | None = None
        """[row, size]: hidden states of all rows."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        hidden = self._inner(*args, **kwargs)
        self.hidden = hidden[:, 0]
        return hidden[self._rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _owner_of_layers(model: Any) -> Any:
    """Return the module that has the layers as its `model` and also the head."""
    owner = model
    while hasattr(owner, "language_model"):
        owner = owner.language_model
    if not callable(getattr(owner, "model", None)):
        raise CheckpointError(
            f"mlx-lm's {type(model).__module__.rpartition('.')[2]} does not separate its layers from its head; choose "
            "another model, or backend cpu if it runs this one"
        )
    return owner


def _make_caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache  # noqa: PLC0415

    caches = make_prompt_cache(model)
    unsupported = sorted({type(cache).__name__ for cache in caches if type(cache) not in (KVCache, RotatingKVCache)})
    if unsupported:
        raise CheckpointError(
            f"expected attention layers with KV caches, got {', '.join(unsupported)}; models with recurrent layers run "
            "on the CPU backend: set backend to cpu",
            code="unknown_cache_type",
        )
    return caches


def _window_of(cache: Any) -> int | None:
    return getattr(cache, "max_size", None)


def _shape_of(cache: Any) -> LayerShape:
    if cache.keys is None:
        raise CheckpointError("a layer of the model writes no keys and values to its cache; choose another model")
    return LayerShape(int(cache.keys.shape[1]), int(cache.keys.shape[3]), int(cache.values.shape[3]))


def _dtype_name(dtype: mx.Dtype) -> KVDtype:
    names = [name for name, kv_type in KV_TYPES.items() if kv_type == dtype]
    if not names:
        raise CheckpointError(f"expected keys and values in {', '.join(KV_TYPES)}, got {dtype}; choose another model")
    return names[0]
