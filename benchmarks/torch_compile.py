"""Compares a decoder's layers compiled by `torch.compile` with quire's, in one process.

`python -m benchmarks.torch_compile` prints the milliseconds of all layers at a few row counts, and the seconds until
the compiled ones have compiled each. The compiled code is the best case for a compiler: the same products, norms,
rotary positions and gate, but with dense keys and values instead of blocks, and constant row counts. Quire's code is
the decoder with its paged store. The result is in docs/adr/0012-native-kernels.md.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name of this module

from benchmarks.record import say
from benchmarks.steps import BLOCK, make_store, smollm2_model
from benchmarks.test_model import smollm2
from quire.backends.host.batch import make_batch
from quire.backends.host.rope import read_rope
from quire.checkpoints.families import read_shape
from quire.core.step import WorkItem
from tests.support.machine.kernels import rotate

ROWS = (1, 4, 16, 32)
CONTEXT = 288
ROUNDS = 15
SHAPE = read_shape(smollm2().config)

Step = Callable[[], object]


class Weights(NamedTuple):
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: torch.Tensor


class Dense(NamedTuple):
    """The dense cache of a layer; keys and values are [row, kv head, position, size]."""

    keys: torch.Tensor
    values: torch.Tensor


def layer(weights: Weights, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Dense) -> torch.Tensor:
    joined = F.linear(_norm(rows, weights.norms[0]), weights.qkv).view(len(rows), -1, SHAPE.head_size)
    queries, key, value = torch.split(joined, [SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads], dim=1)
    cache.keys[:, :, -1] = rotate(key, cos, sin)
    cache.values[:, :, -1] = value
    queries = rotate(queries, cos, sin).unsqueeze(2)
    attended = F.scaled_dot_product_attention(queries, cache.keys, cache.values, enable_gqa=True)
    rows = rows + F.linear(attended.flatten(1), weights.out)
    gate, up = F.linear(_norm(rows, weights.norms[1]), weights.gate_up).chunk(2, dim=-1)
    return rows + F.linear(F.silu(gate) * up, weights.down)


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps))


def main() -> int:
    hidden, wide = SHAPE.hidden_size, SHAPE.intermediate_size
    joined = SHAPE.query_size + 2 * SHAPE.kv_size
    sizes = ((joined, hidden), (hidden, SHAPE.query_size), (2 * wide, hidden), (hidden, wide), (2, hidden))
    stack = [Weights(*(torch.randn(*size) / hidden for size in sizes)) for _ in range(SHAPE.num_layers)]
    compiled = torch.compile(layer, dynamic=False)
    figures: dict[str, float] = {}
    with torch.inference_mode():
        for count in ROWS:
            start_s = time.perf_counter()
            _dense_step(compiled, stack, count)()
            figures[f"compile_{count}_s"] = time.perf_counter() - start_s
            say(f"  compiled for {count} rows")
        for count in ROWS:
            calls = {"eager": _dense_step(layer, stack, count), "compiled": _dense_step(compiled, stack, count)}
            for name, times in _interleave({**calls, "ours": _quire_step(count)}).items():
                figures[f"{name}_{count}_ms"] = median(times) * 1e3
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
    return 0


def _interleave(calls: dict[str, Step]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(ROUNDS + 2):
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            if round_number >= 2:
                times[name].append(time.perf_counter() - start_s)
    return times


def _dense_step(layer_function: Callable[..., torch.Tensor], stack: list[Weights], count: int) -> Step:
    half = (CONTEXT - 1) * torch.from_numpy(read_rope(SHAPE.layers[0].rope).frequencies)
    angles = torch.cat((half, half)).expand(count, 1, -1)
    cos, sin = angles.cos(), angles.sin()
    size = (count, SHAPE.num_kv_heads, CONTEXT, SHAPE.head_size)
    caches = [Dense(torch.randn(*size), torch.randn(*size)) for _ in stack]

    def run() -> torch.Tensor:
        rows = torch.ones(count, SHAPE.hidden_size)
        for weights, cache in zip(stack, caches, strict=True):
            rows = layer_function(weights, rows, cos, sin, cache)
        return rows

    return run


def _quire_step(count: int) -> Step:
    """Return a call of the decoder's layers with a paged store, without the head: no logits are requested."""
    model, size = smollm2_model(), -(-CONTEXT // BLOCK)
    store = make_store(model, count * size)
    tables = [tuple(range(1 + row * size, 1 + (row + 1) * size)) for row in range(count)]
    items = [WorkItem(row, (5,), CONTEXT - 1, table) for row, table in enumerate(tables)]
    no_rows = np.empty(0, np.int64)
    return lambda: model.compute(make_batch(items, BLOCK), store, no_rows)


if __name__ == "__main__":
    sys.exit(main())
