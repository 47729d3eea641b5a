"""Models whose layers keep a state, in plain float64, token by token, and the same models on the CPU backend.

Written from the models' published reference code, independently of our kernels. The single attention layer of each
model contributes nothing: its output projection is zero.
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

Float64s = NDArray[np.float64]
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
_SSM = {
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
    "delta, one key head per value head": {
        **_DELTA, "model_type": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 33,
    },
    "delta, heads tiled": {**_DELTA, "model_type": "qwen3_5_text", TILED: True},
    "delta, inputs grouped by key head": {
        **_DELTA, "model_type": "qwen3_next", "mlp_only_layers": [0, 1, 2], "num_experts": 2, "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
    },
    "ssm": _SSM,
    "ssm, projections with biases": {
        **_SSM, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1, "mamba_d_conv": 3,
    },
    "ssm, time steps within limits": {**_SSM, "mamba_n_groups": 4, "time_step_limit": [0.3, 1.1]},
    "convolution of kernel size 3": {**_CONVOLUTION, "conv_bias": True},
    "convolution of kernel size 4": {**_CONVOLUTION, "conv_L_cache": 4},
}  # fmt: skip
"""Sizes that no SIMD width divides, so that kernels have remainders. The fourth has channels for two tasks."""


def write_hybrid(folder: Path, config: Mapping[str, Any], seed: int = 5) -> dict[str, Array]:
    """Write a model directory with this config; return its weights."""
    tensors = random_tensors(config, seed)
    tensors["model.layers.1.self_attn.o_proj.weight"][:] = 0.0
    write_model(folder, config, tensors)
    return tensors


def open_decoder(folder: Path) -> Decoder:
    """Load the model of a directory on the CPU backend, in float32."""
    return load_model(resolve(str(folder)), SETTINGS, SETTINGS.memory_bytes or 0, lambda _done, _total: None)


class FedSequences:
    """Feeds prompts to a decoder in chunks, and records the logits after each of their tokens."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]]) -> None:
        self._decoder = decoder
        self._prompts = prompts
        self._blocks = KVStore(decoder.kv_shapes, len(prompts) * MAX_BLOCKS, BLOCK_SIZE, "float32")
        self.states = StateStore(decoder.slot_size, len(prompts))
        self._num_fed = [0] * len(prompts)
        self._logits: list[list[NDArray[np.float32]]] = [[] for _ in prompts]

    def feed(self, counts: Mapping[int, int]) -> None:
        """Run one step that feeds this number of tokens of each sequence, in this order."""
        batch = self._batch(counts)
        logit_rows = np.arange(len(batch.tokens))
        rows = self._decoder.compute(batch, self._blocks, logit_rows, states=self.states).logits.copy()
        for first, item in zip(batch.first_rows, batch.items, strict=True):
            self._logits[item.sequence_id] += list(rows[first : first + len(item.token_ids)])

    def feed_last_logits(self, counts: Mapping[int, int]) -> NDArray[np.float32]:
        """Like `feed`, but only compute and return the logits of each item's last row."""
        batch = self._batch(counts)
        last = np.array([*batch.first_rows[1:], len(batch.tokens)]) - 1
        return self._decoder.compute(batch, self._blocks, last, 0, last, self.states).logits.copy()

    def copy_sequence(self, number: int, to: int) -> None:
        """Copy this sequence's state and KV blocks to sequence `to`."""
        self.states.copy([SlotCopy(number + 1, to + 1)])
        from_blocks, to_blocks = self._blocks_of(number), self._blocks_of(to)
        self._blocks.copy([BlockCopy(*pair) for pair in zip(from_blocks, to_blocks, strict=True)])
        self._num_fed[to] = self._num_fed[number]

    def logits(self, number: int) -> NDArray[np.float32]:
        """Return the logits of one sequence after each token that `feed` has fed."""
        return np.array(self._logits[number])

    def _batch(self, counts: Mapping[int, int]) -> Batch:
        items = [self._item(number, count) for number, count in counts.items()]
        for item in items:
            self._num_fed[item.sequence_id] += len(item.token_ids)
        return make_batch(items, BLOCK_SIZE)

    def _item(self, number: int, count: int) -> WorkItem:
        first = self._num_fed[number]
        tokens = tuple(self._prompts[number][first : first + count])
        return WorkItem(number, tokens, first, self._blocks_of(number), state_slot=number + 1)

    @staticmethod
    def _blocks_of(number: int) -> tuple[int, ...]:
        return tuple(range(number * MAX_BLOCKS + 1, (number + 1) * MAX_BLOCKS + 1))


def plain_logits(config: Mapping[str, Any], tensors: Mapping[str, Array], tokens: Sequence[int]) -> Float64s:
    """Return the reference logits after each token."""
    return PlainHybrid(config, tensors).logits(tokens)


class PlainHybrid:
    """One model, with its weights in float64."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self._config = config
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self._kind = {"granitemoehybrid": "ssm", "lfm2": "convolution"}.get(config["model_type"], "delta")
        self._eps: float = config["rms_norm_eps"]

    def logits(self, tokens: Sequence[int]) -> Float64s:
        """Return the logits after each token."""
        config, weights = self._config, self._tensors
        scale = config.get("residual_multiplier", 1.0)
        rows = weights["model.embed_tokens.weight"][list(tokens)] * config.get("embedding_multiplier", 1.0)
        default_norms = "input_layernorm", "post_attention_layernorm"
        input_norm, mlp_norm = ("operator_norm", "ffn_norm") if self._kind == "convolution" else default_norms
        for number, kind in enumerate(config["layer_types"]):
            prefix = f"model.layers.{number}."
            if kind not in ("full_attention", "attention"):
                rows = rows + scale * self._recurrent(self._normed(rows, f"{prefix}{input_norm}.weight"), prefix)
            rows = rows + scale * self._dense(self._normed(rows, f"{prefix}{mlp_norm}.weight"), f"{prefix}mlp.")
        rows = self._normed(rows, "model.norm.weight")
        logits: Float64s = rows @ weights["lm_head.weight"].T / config.get("logits_scaling", 1.0)
        return logits

    def _normed(self, rows: Float64s, name: str) -> Float64s:
        offset = 1.0 if self._kind == "delta" else 0.0
        return unit_rms(rows, self._eps) * (self._tensors[name] + offset)

    def _dense(self, rows: Float64s, prefix: str) -> Float64s:
        if self._kind == "ssm":
            gate, up = np.split(self._linear(rows, f"{prefix}gate_up_proj"), 2, axis=1)
        else:
            gate, up = self._linear(rows, f"{prefix}gate_proj"), self._linear(rows, f"{prefix}up_proj")
        return self._linear(silu(gate) * up, f"{prefix}down_proj")

    def _recurrent(self, rows: Float64s, prefix: str) -> Float64s:
        match self._kind:
            case "delta":
                return self._delta(rows, f"{prefix}linear_attn.")
            case "ssm":
                return self._ssm(rows, f"{prefix}mamba.")
        return self._convolution(rows, f"{prefix}conv.")

    def _delta(self, rows: Float64s, prefix: str) -> Float64s:
        config, count = self._config, len(rows)
        key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
        mixed, gates, betas, dts = self._delta_inputs(rows, prefix)
        mixed = silu(self._causal_conv(mixed, f"{prefix}conv1d"))
        queries, keys, values = np.split(mixed, [key_heads * size, 2 * key_heads * size], axis=1)
        queries, keys = (unit_length(part.reshape(count, key_heads, size)) for part in (queries, keys))
        key_head_of = [head % key_heads if config.get(TILED) else head * key_heads // heads for head in range(heads)]
        queries, keys = queries[:, key_head_of] / np.sqrt(size), keys[:, key_head_of]
        values = values.reshape(count, heads, value_size)
        decays = np.exp(-np.exp(self._tensors[f"{prefix}A_log"]) * softplus(dts + self._tensors[f"{prefix}dt_bias"]))
        state, out = np.zeros((heads, size, value_size)), np.empty((count, heads, value_size))
        for t in range(count):
            state = state * decays[t][:, None, None]
            predicted = np.einsum("hk,hkv->hv", keys[t], state)
            state = state + np.einsum("hk,hv->hkv", keys[t], (values[t] - predicted) * sigmoid(betas[t])[:, None])
            out[t] = np.einsum("hk,hkv->hv", queries[t], state)
        out = unit_rms(out, self._eps) * self._tensors[f"{prefix}norm.weight"] * silu(gates.reshape(out.shape))
        return self._linear(out.reshape(count, -1), f"{prefix}out_proj")

    def _delta_inputs(self, rows: Float64s, prefix: str) -> tuple[Float64s, Float64s, Float64s, Float64s]:
        if f"{prefix}in_proj_qkv.weight" in self._tensors:
            qkv, z, b, a = (self._linear(rows, f"{prefix}in_proj_{name}") for name in ("qkv", "z", "b", "a"))
            return qkv, z, b, a
        config, count, key_heads = self._config, len(rows), self._config["linear_num_key_heads"]
        size = config["linear_key_head_dim"]
        value_size = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
        grouped = self._linear(rows, f"{prefix}in_proj_qkvz").reshape(count, key_heads, -1)
        parts = np.split(grouped, np.cumsum([size, size, value_size]), axis=2)
        queries, keys, values, gates = (part.reshape(count, -1) for part in parts)
        betas, dts = np.split(self._linear(rows, f"{prefix}in_proj_ba").reshape(count, key_heads, -1), 2, axis=2)
        mixed = np.concatenate([queries, keys, values], axis=1)
        return mixed, gates, betas.reshape(count, -1), dts.reshape(count, -1)

    def _ssm(self, rows: Float64s, prefix: str) -> Float64s:
        config, count = self._config, len(rows)
        heads, groups, size = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_d_state"]
        inner = config["mamba_expand"] * config["hidden_size"]
        projected = self._linear(rows, f"{prefix}in_proj")
        gates, mixed, dts = np.split(projected, [inner, projected.shape[1] - heads], axis=1)
        mixed = silu(self._causal_conv(mixed, f"{prefix}conv1d"))
        values, keys, queries = np.split(mixed, [inner, inner + groups * size], axis=1)
        values = values.reshape(count, heads, -1)
        keys, queries = (part.reshape(count, groups, size).repeat(heads // groups, axis=1) for part in (keys, queries))
        min_dt, max_dt = config.get("time_step_limit", (0.0, np.inf))
        dts = np.clip(softplus(dts + self._tensors[f"{prefix}dt_bias"]), min_dt, max_dt)
        decays = np.exp(-np.exp(self._tensors[f"{prefix}A_log"]) * dts)
        state, out = np.zeros((heads, size, values.shape[2])), np.empty_like(values)
        for t in range(count):
            change = np.einsum("hk,hv->hkv", keys[t], values[t] * dts[t][:, None])
            state = state * decays[t][:, None, None] + change
            out[t] = np.einsum("hk,hkv->hv", queries[t], state) + values[t] * self._tensors[f"{prefix}D"][:, None]
        gated = (out.reshape(count, -1) * silu(gates)).reshape(count, groups, -1)
        normed = unit_rms(gated, self._eps).reshape(count, -1) * self._tensors[f"{prefix}norm.weight"]
        return self._linear(normed, f"{prefix}out_proj")

    def _convolution(self, rows: Float64s, prefix: str) -> Float64s:
        input_gate, output_gate, values = np.split(self._linear(rows, f"{prefix}in_proj"), 3, axis=1)
        return self._linear(output_gate * self._causal_conv(input_gate * values, f"{prefix}conv"), f"{prefix}out_proj")

    def _causal_conv(self, rows: Float64s, name: str) -> Float64s:
        """Return the causal depthwise convolution over the tokens, padded with zeros."""
        taps = self._tensors[f"{name}.weight"][:, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, rows.shape[1])), rows])
        sums = sum(padded[tap : tap + len(rows)] * taps[:, tap] for tap in range(taps.shape[1]))
        return sums + self._tensors.get(f"{name}.bias", np.zeros(rows.shape[1]))

    def _linear(self, rows: Float64s, name: str) -> Float64s:
        out = rows @ self._tensors[f"{name}.weight"].T
        return out + self._tensors.get(f"{name}.bias", np.zeros(out.shape[1]))


def unit_rms(rows: Float64s, eps: float) -> Float64s:
    squares: Float64s = (rows * rows).mean(-1, keepdims=True)
    return rows / np.sqrt(squares + eps)


def unit_length(rows: Float64s) -> Float64s:
    squares: Float64s = (rows * rows).sum(-1, keepdims=True)
    return rows / np.sqrt(squares + 1e-6)


def sigmoid(x: Float64s) -> Float64s:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Float64s) -> Float64s:
    return x * sigmoid(x)


def softplus(x: Float64s) -> Float64s:
    return np.log1p(np.exp(x))
