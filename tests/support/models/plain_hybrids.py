"""Models whose layers keep a state, in plain float64, token by token, and the same models on the CPU backend.

Written from what the makers publish, without a look at the kernels. The one layer of attention that every model here
has adds nothing: the weights behind it are zeros.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.kv_store import KVStore
from quire.backends.cpu.load import load_model
from quire.backends.cpu.state_store import StateStore
from quire.backends.host.batch import Batch, make_batch
from quire.checkpoints import resolve
from quire.checkpoints.families.decoder_shape import TILED
from quire.config import ModelSettings
from quire.core.step import BlockCopy, SlotCopy, WorkItem
from tests.support.machine.process_memory import AMPLE_BYTES
from tests.support.models.tiny_hybrids import random_tensors, write_model
from tests.support.models.tiny_models import Array

Wide = NDArray[np.float64]
BLOCK_SIZE, MAX_BLOCKS = 16, 24
SETTINGS = ModelSettings(dtype="float32", kv_dtype="float32", block_size=BLOCK_SIZE, memory_bytes=AMPLE_BYTES)
_COMMON: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 44, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_DELTA = {
    **_COMMON, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 40, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_SPACE = {
    **_COMMON, "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
    "shared_intermediate_size": 56, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_expand": 2,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "mamba_conv_bias": True,
}  # fmt: skip
_CONVOLUTION = {
    **_COMMON, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8,
    "intermediate_size": 60,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "delta": {**_DELTA, "model_type": "qwen3_5_text"},
    "delta, each its own keys": {
        **_DELTA, "model_type": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 33,
    },
    "delta, heads tiled": {**_DELTA, "model_type": "qwen3_5_text", TILED: True},
    "delta, inputs by key heads": {
        **_DELTA, "model_type": "qwen3_next", "mlp_only_layers": [0, 1, 2], "num_experts": 2, "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
    },
    "space": _SPACE,
    "space, products with biases": {
        **_SPACE, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1, "mamba_d_conv": 3,
    },
    "space, steps within limits": {**_SPACE, "mamba_n_groups": 4, "time_step_limit": [0.3, 1.1]},
    "convolution over three": {**_CONVOLUTION, "conv_bias": True},
    "convolution over four": {**_CONVOLUTION, "conv_L_cache": 4},
}  # fmt: skip
"""Sizes that fill no vector: channels, columns and rows have tails. The fourth has channels for two tasks."""


def write_hybrid(folder: Path, config: Mapping[str, Any], seed: int = 5) -> dict[str, Array]:
    """A directory of this config; returns its weights."""
    tensors = random_tensors(config, seed)
    tensors["model.layers.1.self_attn.o_proj.weight"][:] = 0.0
    write_model(folder, config, tensors)
    return tensors


def open_decoder(folder: Path) -> Decoder:
    """The model of a directory on the CPU backend, in float32."""
    return load_model(resolve(str(folder)), SETTINGS, SETTINGS.memory_bytes or 0, lambda _done, _total: None)


class Sequences:
    """Texts that are fed to a decoder piece by piece; what it tells after each of their tokens is kept."""

    def __init__(self, decoder: Decoder, texts: Sequence[Sequence[int]]) -> None:
        self._decoder = decoder
        self._texts = texts
        self._blocks = KVStore(decoder.kv_shapes, len(texts) * MAX_BLOCKS, BLOCK_SIZE, "float32")
        self.states = StateStore(decoder.slot_size, len(texts))
        self._fed = [0] * len(texts)
        self._told: list[list[NDArray[np.float32]]] = [[] for _ in texts]

    def feed(self, counts: Mapping[int, int]) -> None:
        """One step: of these sequences so many tokens each, in this order."""
        batch = self._batch(counts)
        wanted = np.arange(len(batch.tokens))
        rows = self._decoder.compute(batch, self._blocks, wanted, states=self.states).logits.copy()
        for first, item in zip(batch.first_rows, batch.items, strict=True):
            self._told[item.sequence_id] += list(rows[first : first + len(item.token_ids)])

    def feed_for_the_last(self, counts: Mapping[int, int]) -> NDArray[np.float32]:
        """The same, and nothing is wanted of any row but each item's last: these rows' logits."""
        batch = self._batch(counts)
        last = np.array([*batch.first_rows[1:], len(batch.tokens)]) - 1
        return self._decoder.compute(batch, self._blocks, last, 0, last, self.states).logits.copy()

    def move(self, number: int, to: int) -> None:
        """Another sequence goes on where this one is."""
        self.states.copy([SlotCopy(number + 1, to + 1)])
        from_blocks, to_blocks = self._blocks_of(number), self._blocks_of(to)
        self._blocks.copy([BlockCopy(*pair) for pair in zip(from_blocks, to_blocks, strict=True)])
        self._fed[to] = self._fed[number]

    def logits(self, number: int) -> NDArray[np.float32]:
        """Of one of them, all tokens that were fed with `feed`."""
        return np.array(self._told[number])

    def _batch(self, counts: Mapping[int, int]) -> Batch:
        items = [self._item(number, count) for number, count in counts.items()]
        for item in items:
            self._fed[item.sequence_id] += len(item.token_ids)
        return make_batch(items, BLOCK_SIZE)

    def _item(self, number: int, count: int) -> WorkItem:
        first = self._fed[number]
        tokens = tuple(self._texts[number][first : first + count])
        return WorkItem(number, tokens, first, self._blocks_of(number), state_slot=number + 1)

    @staticmethod
    def _blocks_of(number: int) -> tuple[int, ...]:
        return tuple(range(number * MAX_BLOCKS + 1, (number + 1) * MAX_BLOCKS + 1))


def plain_logits(config: Mapping[str, Any], tensors: Mapping[str, Array], tokens: Sequence[int]) -> Wide:
    """What the model tells after each of the tokens."""
    return PlainHybrid(config, tensors).logits(tokens)


class PlainHybrid:
    """One model, with its weights in float64."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self._config = config
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self._kind = {"granitemoehybrid": "space", "lfm2": "convolution"}.get(config["model_type"], "delta")
        self._eps: float = config["rms_norm_eps"]

    def logits(self, tokens: Sequence[int]) -> Wide:
        """After each of the tokens."""
        config, weights = self._config, self._tensors
        added = config.get("residual_multiplier", 1.0)
        rows = weights["model.embed_tokens.weight"][list(tokens)] * config.get("embedding_multiplier", 1.0)
        is_short = self._kind == "convolution"
        before, behind = ("operator_norm", "ffn_norm") if is_short else ("input_layernorm", "post_attention_layernorm")
        for number, kind in enumerate(config["layer_types"]):
            place = f"model.layers.{number}."
            if kind not in ("full_attention", "attention"):
                rows = rows + added * self._recurrent(self._normed(rows, f"{place}{before}.weight"), place)
            rows = rows + added * self._dense(self._normed(rows, f"{place}{behind}.weight"), f"{place}mlp.")
        rows = self._normed(rows, "model.norm.weight")
        logits: Wide = rows @ weights["lm_head.weight"].T / config.get("logits_scaling", 1.0)
        return logits

    def _normed(self, rows: Wide, name: str) -> Wide:
        offset = 1.0 if self._kind == "delta" else 0.0
        return unit_rms(rows, self._eps) * (self._tensors[name] + offset)

    def _dense(self, rows: Wide, place: str) -> Wide:
        if self._kind == "space":
            gate, up = np.split(self._product(rows, f"{place}gate_up_proj"), 2, axis=1)
        else:
            gate, up = self._product(rows, f"{place}gate_proj"), self._product(rows, f"{place}up_proj")
        return self._product(silu(gate) * up, f"{place}down_proj")

    def _recurrent(self, rows: Wide, place: str) -> Wide:
        match self._kind:
            case "delta":
                return self._delta(rows, f"{place}linear_attn.")
            case "space":
                return self._space(rows, f"{place}mamba.")
        return self._convolution(rows, f"{place}conv.")

    def _delta(self, rows: Wide, place: str) -> Wide:
        config, count = self._config, len(rows)
        key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size, wide = config["linear_key_head_dim"], config["linear_value_head_dim"]
        mixed, gates, rates, steps = self._delta_inputs(rows, place)
        mixed = silu(self._mixed(mixed, f"{place}conv1d"))
        queries, keys, values = np.split(mixed, [key_heads * size, 2 * key_heads * size], axis=1)
        queries, keys = (unit_length(one.reshape(count, key_heads, size)) for one in (queries, keys))
        of_head = [head % key_heads if config.get(TILED) else head * key_heads // heads for head in range(heads)]
        queries, keys = queries[:, of_head] / np.sqrt(size), keys[:, of_head]
        values = values.reshape(count, heads, wide)
        decays = np.exp(-np.exp(self._tensors[f"{place}A_log"]) * softplus(steps + self._tensors[f"{place}dt_bias"]))
        state, out = np.zeros((heads, size, wide)), np.empty((count, heads, wide))
        for at in range(count):
            state = state * decays[at][:, None, None]
            known = np.einsum("hk,hkv->hv", keys[at], state)
            state = state + np.einsum("hk,hv->hkv", keys[at], (values[at] - known) * sigmoid(rates[at])[:, None])
            out[at] = np.einsum("hk,hkv->hv", queries[at], state)
        out = unit_rms(out, self._eps) * self._tensors[f"{place}norm.weight"] * silu(gates.reshape(out.shape))
        return self._product(out.reshape(count, -1), f"{place}out_proj")

    def _delta_inputs(self, rows: Wide, place: str) -> tuple[Wide, Wide, Wide, Wide]:
        if f"{place}in_proj_qkv.weight" in self._tensors:
            made = [self._product(rows, f"{place}in_proj_{name}") for name in ("qkv", "z", "b", "a")]
            return made[0], made[1], made[2], made[3]
        config, count, key_heads = self._config, len(rows), self._config["linear_num_key_heads"]
        size = config["linear_key_head_dim"]
        wide = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
        grouped = self._product(rows, f"{place}in_proj_qkvz").reshape(count, key_heads, -1)
        parts = np.split(grouped, np.cumsum([size, size, wide]), axis=2)
        queries, keys, values, gates = (part.reshape(count, -1) for part in parts)
        rates, steps = np.split(self._product(rows, f"{place}in_proj_ba").reshape(count, key_heads, -1), 2, axis=2)
        mixed = np.concatenate([queries, keys, values], axis=1)
        return mixed, gates, rates.reshape(count, -1), steps.reshape(count, -1)

    def _space(self, rows: Wide, place: str) -> Wide:
        config, count = self._config, len(rows)
        heads, groups, size = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_d_state"]
        inner = config["mamba_expand"] * config["hidden_size"]
        made = self._product(rows, f"{place}in_proj")
        gates, mixed, steps = np.split(made, [inner, made.shape[1] - heads], axis=1)
        mixed = silu(self._mixed(mixed, f"{place}conv1d"))
        values, keys, queries = np.split(mixed, [inner, inner + groups * size], axis=1)
        values = values.reshape(count, heads, -1)
        keys, queries = (one.reshape(count, groups, size).repeat(heads // groups, axis=1) for one in (keys, queries))
        least, most = config.get("time_step_limit", (0.0, np.inf))
        steps = np.clip(softplus(steps + self._tensors[f"{place}dt_bias"]), least, most)
        decays = np.exp(-np.exp(self._tensors[f"{place}A_log"]) * steps)
        state, out = np.zeros((heads, size, values.shape[2])), np.empty_like(values)
        for at in range(count):
            change = np.einsum("hk,hv->hkv", keys[at], values[at] * steps[at][:, None])
            state = state * decays[at][:, None, None] + change
            out[at] = np.einsum("hk,hkv->hv", queries[at], state) + values[at] * self._tensors[f"{place}D"][:, None]
        gated = (out.reshape(count, -1) * silu(gates)).reshape(count, groups, -1)
        normed = unit_rms(gated, self._eps).reshape(count, -1) * self._tensors[f"{place}norm.weight"]
        return self._product(normed, f"{place}out_proj")

    def _convolution(self, rows: Wide, place: str) -> Wide:
        before, behind, values = np.split(self._product(rows, f"{place}in_proj"), 3, axis=1)
        return self._product(behind * self._mixed(before * values, f"{place}conv"), f"{place}out_proj")

    def _mixed(self, rows: Wide, name: str) -> Wide:
        """Each channel with its values of the last few tokens; zeros stand before the first."""
        taps = self._tensors[f"{name}.weight"][:, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, rows.shape[1])), rows])
        found = sum(padded[tap : tap + len(rows)] * taps[:, tap] for tap in range(taps.shape[1]))
        return found + self._tensors.get(f"{name}.bias", np.zeros(rows.shape[1]))

    def _product(self, rows: Wide, name: str) -> Wide:
        made = rows @ self._tensors[f"{name}.weight"].T
        return made + self._tensors.get(f"{name}.bias", np.zeros(made.shape[1]))


def unit_rms(rows: Wide, eps: float) -> Wide:
    squares: Wide = (rows * rows).mean(-1, keepdims=True)
    return rows / np.sqrt(squares + eps)


def unit_length(rows: Wide) -> Wide:
    squares: Wide = (rows * rows).sum(-1, keepdims=True)
    return rows / np.sqrt(squares + 1e-6)


def sigmoid(x: Wide) -> Wide:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Wide) -> Wide:
    return x * sigmoid(x)


def softplus(x: Wide) -> Wide:
    return np.log1p(np.exp(x))
