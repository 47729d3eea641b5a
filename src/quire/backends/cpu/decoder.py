"""A decoder of any family in the family table (checkpoints/families), over flat batches. Weights are packed once, and a
step is one native call. `DecoderShape` describes the model; this module converts it to addresses and numbers.
"""

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.kv_store import KV_TYPES, KVStore
from quire.backends.cpu.layer_weights import LayerWeights
from quire.backends.cpu.layers import CALL, CHUNK_ROWS, GATES, LAYER, PARTS, ROPE, STORE, Buffers, Call, check_layout
from quire.backends.cpu.linear import Packer
from quire.backends.cpu.state_store import StateStore, no_runs
from quire.backends.cpu.tiles import StepTiles
from quire.backends.cpu.weight_reader import WeightReader
from quire.backends.host.batch import Batch
from quire.backends.host.block_store import LayerShape
from quire.backends.host.rope import read_rope
from quire.backends.host.sampler import Likeliest
from quire.backends.host.wanted import PassOutputs
from quire.backends.kernels.arrays import address_of
from quire.backends.kernels.extension import kernels
from quire.backends.kernels.threads import num_threads
from quire.checkpoints.families import DecoderShape
from quire.errors import CheckpointError, InvariantError

COUNTERS: list[NDArray[np.uint64]] = []
"""All counters passed to the kernels; never freed, because the kernels may write to them at any time."""


class Decoder:
    """A model of one of these families. The result of a row depends only on that row."""

    def __init__(
        self, shape: DecoderShape, reader: WeightReader, packer: Packer, has_balanced_keys: bool = False
    ) -> None:
        check_layout()
        self.shape, self.vocabulary_size = shape, shape.vocabulary_size
        self.kv_shapes = tuple(
            LayerShape(layer.num_kv_heads, layer.head_size, layer.head_size) for layer in shape.layers if layer.has_kv
        )
        rules = list(dict.fromkeys(layer.rope for layer in shape.layers))
        self._ropes = [read_rope(rule) for rule in rules]
        weights = self._weights = LayerWeights(shape, reader, packer, has_balanced_keys)
        outer = weights.outer()
        self._layers = np.array([weights.layer(layer, rules.index(layer.rope)) for layer in shape.layers], LAYER)
        self.slot_size = weights.slot_size
        """Number of floats in a sequence's recurrent state; 0 for a model without recurrent layers."""
        self._layer_numbers = list(range(shape.num_layers))
        """Numbers of the layers that a step computes: all, except in a shallow copy."""
        self._call = self._constant_call(outer)
        self._buffers = self._make_buffers(0, 0)
        self._store: KVStore | None = None
        """The KV store whose addresses the call contains."""
        self._seconds: NDArray[np.float64] | None = None
        self._states: StateStore | None = None
        _check_all_read(reader)

    def time_parts(self, seconds: NDArray[np.float64] | None) -> None:
        """Add the seconds of each of `layers.PARTS` to this array from now on; None stops the timing."""
        self._seconds = seconds
        self._call.fields["seconds"] = 0 if seconds is None else address_of(seconds, np.float64, (len(PARTS),))

    def count_layers(self, counter: memoryview) -> int:
        """Add 1 to this 8-byte counter after each layer, for all decoders of this process. Returns the number of
        layers, or 0 if the extension is too old to count them."""
        count = getattr(kernels(), "count_layers", None)
        if count is None:
            return 0
        COUNTERS.append(np.frombuffer(counter, np.uint64))
        count(address_of(COUNTERS[-1], np.uint64, (1,)))
        return len(self._layer_numbers)

    def shallow(self) -> "Decoder":
        """Return a copy with one layer of each kind; its steps need the same memory in much less time."""
        shallow = copy(self)
        kinds: dict[object, int] = {}
        for layer in self.shape.layers:
            mixture, sizes = layer.mixture, (layer.num_kv_heads, layer.head_size, layer.intermediate_size, layer.window)
            kinds.setdefault((mixture, sizes, layer.has_kv, layer.recurrent), layer.number)
        shallow._layer_numbers = sorted(kinds.values())
        shallow._layers = self._layers[shallow._layer_numbers]
        shallow._call = Call(self._call.fields.copy())
        shallow._call.fields["layers"] = shallow._layers.ctypes.data
        shallow._call.fields["num_layers"] = len(shallow._layer_numbers)
        shallow._buffers, shallow._store, shallow._states = self._make_buffers(0, 0), None, None
        return shallow

    def touch(self, states: StateStore) -> None:
        """Write zeros to the state that these layers use, so that this memory does not count as memory of a step."""
        for number, fields in zip(self._layer_numbers, self._layers["recurrent"], strict=True):
            if (layer := self.shape.layers[number].recurrent) is not None:
                first, end = int(fields["history_at"]), int(fields["state_at"]) + layer.state_size
                states.numbers[1:, first:end] = 0.0

    def compute(
        self,
        batch: Batch,
        store: KVStore,
        requested: NDArray[np.int64],
        num_sampled: int = 0,
        needed_rows: NDArray[np.int64] | None = None,
        states: StateStore | None = None,
    ) -> PassOutputs:
        """Write the rows' KV; return the last hidden states, the logits of the requested rows, and the most likely
        token of the first `num_sampled` of these.

        With `needed_rows`, only these rows (at least one) get last hidden states; for all other rows the last layer
        computes only keys and values. All results are in buffers that the next step overwrites.
        """
        num_rows, num_requested = len(batch.tokens), len(requested)
        buffers, call = self._buffers, self._call
        if num_rows > buffers.num_rows or num_requested > buffers.num_requested:
            sizes = max(num_rows, buffers.num_rows), max(num_requested, buffers.num_requested)
            buffers = self._buffers = self._make_buffers(*sizes)
            buffers.write_addresses(call.fields)
        tiles = StepTiles(batch.items, store.block_size, self.shape.group_size)
        if tiles.max_block > store.num_blocks or tiles.num_rows != num_rows:
            raise InvariantError(f"expected block ids up to {store.num_blocks}, got {tiles.max_block}")
        if store is not self._store:
            self._set_store(store)
        runs = no_runs() if states is None else states.runs(batch)
        if states is not self._states:
            self._states = states
            address = 0 if states is None else states.numbers.ctypes.data
            call.fields["states"], call.fields["slot_size"] = address, self.slot_size
        first, stride = batch.rows.ctypes.data, batch.rows.strides[0]
        call.write_step(
            first, first + stride, first + 2 * stride, first + 3 * stride, *tiles.addresses, requested.ctypes.data,
            0 if needed_rows is None else needed_rows.ctypes.data, runs.rows.ctypes.data, runs.slots.ctypes.data,
            tiles.num_tiles, num_rows, num_requested,
            num_rows if needed_rows is None else len(needed_rows), num_sampled, num_threads(), len(runs.slots),
        )  # fmt: skip
        try:
            kernels().compute_step(call.address)
        except IndexError as error:
            raise InvariantError(f"a step refers to data that does not exist: {error}", code="unknown_data") from error
        likeliest = Likeliest(buffers.likeliest[:num_sampled], buffers.is_sound[:num_sampled])
        logits = buffers.logits[:num_requested]
        return PassOutputs(buffers.is_finite[:num_rows], buffers.hidden[:num_rows], logits, likeliest)

    def _make_buffers(self, num_rows: int, num_requested: int) -> Buffers:
        return Buffers(self.shape, int(self._call.fields["angles_size"]), num_rows, num_requested)

    def _constant_call(self, outer: dict[str, Any]) -> Call:
        call, shape = np.zeros((), CALL), self.shape
        for name, value in outer.items():
            call[name] = value
        rope_table = self._rope_table = np.zeros(len(self._ropes), ROPE)
        for index, rope in enumerate(self._ropes):
            size = 2 * len(rope.frequencies)
            rope_table[index] = (rope.frequencies.ctypes.data, rope.scaling, size, int(call["angles_size"]))
            call["angles_size"] += size
        scales = shape.scales
        for name, number in {
            "layers": self._layers.ctypes.data, "num_layers": shape.num_layers, "num_all_layers": shape.num_layers,
            "ropes": rope_table.ctypes.data, "num_ropes": len(rope_table), "eps": shape.norm_eps,
            "scale": scales.attention, "softcap": scales.score_cap or 0.0,
            "embedding_scale": scales.embedding, "added_scale": scales.residual,
            "logit_scale": scales.logits, "logit_cap": scales.logit_cap or 0.0,
            "query_beta": scales.position.beta if scales.position else 0.0,
            "query_origin": scales.position.origin if scales.position else 1.0,
            "num_heads": shape.num_heads, "hidden_size": shape.hidden_size, "gate": GATES[shape.family.gate],
            "most_head_size": shape.head_size, "most_group": shape.group_size, "chunk_rows": CHUNK_ROWS,
        }.items():  # fmt: skip
            call[name] = number
        return Call(call)

    def _set_store(self, store: KVStore) -> None:
        """Set each layer's KV addresses: its own keys and values, or those of an earlier layer."""
        self._store = store
        kv_layers = [layer.number for layer in self.shape.layers if layer.has_kv]
        rows = []
        for number in self._layer_numbers:
            layer = self.shape.layers[number]
            if layer.recurrent is not None:
                rows.append((0, 0, 0, 0))
                continue
            index = kv_layers.index(layer.kv_layer)
            keys, values = store.keys[index], store.values[index]
            rows.append((keys.ctypes.data, values.ctypes.data, keys[0].size, values[0].size))
        self._stores = np.array(rows, STORE)
        call = self._call.fields
        call["stores"], call["kv_type"], call["block_size"] = (
            self._stores.ctypes.data, KV_TYPES[store.dtype], store.block_size,
        )  # fmt: skip


def _check_all_read(reader: WeightReader) -> None:
    """Raise CheckpointError if a tensor was not read, because then config and weights do not match."""
    unread = sorted(name for name in reader.unread_names if not name.endswith("rotary_emb.inv_freq"))
    if unread:
        raise CheckpointError(
            f"{len(unread)} unused tensors in the checkpoint, the first is {unread[0]!r}; config.json and weights "
            "belong to different models"
        )
