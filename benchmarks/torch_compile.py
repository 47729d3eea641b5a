"""What `torch.compile` would give and cost here: a decoder's layers, compiled and ours, in one process.

`python -m benchmarks.torch_compile` prints the milliseconds of all layers at a few row counts, and the seconds until
the compiled ones have met each of these. What is compiled is the best case for a compiler: the same products, norms,
rotary positions and gate, but keys and values that lie dense instead of in blocks, and row counts that are constants.
Ours is the decoder over its paged store. The answer stands in docs/adr/0012-native-kernels.md.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

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
    """A layer's cache: [row, kv head, position, size] each."""

    keys: torch.Tensor
    values: torch.Tensor


def layer(weights: Weights, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Dense) -> torch.Tensor:
    joined = F.linear(_norm(rows, weights.norms[0]), weights.qkv).view(len(rows), -1, SHAPE.head_size)
    queries, key, value = torch.split(joined, [SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads], dim=1)
    cache.keys[:, :, -1] = rotate(key, cos, sin)
    cache.values[:, :, -1] = value
    queries = rotate(queries, cos, sin).unsqueeze(2)
    met = F.scaled_dot_product_attention(queries, cache.keys, cache.values, enable_gqa=True)
    rows = rows + F.linear(met.flatten(1), weights.out)
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
    found: dict[str, float] = {}
    with torch.inference_mode():
        for count in ROWS:
            started = time.perf_counter()
            _dense(compiled, stack, count)()
            found[f"compile_{count}_s"] = time.perf_counter() - started
            say(f"  compiled for {count} rows")
        for count in ROWS:
            calls = {"eager": _dense(layer, stack, count), "compiled": _dense(compiled, stack, count)}
            for name, taken in _in_turn({**calls, "ours": _ours(count)}).items():
                found[f"{name}_{count}_ms"] = median(taken) * 1e3
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))
    return 0


def _in_turn(calls: dict[str, Step]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(ROUNDS + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if at >= 2:
                times[name].append(time.perf_counter() - started)
    return times


def _dense(of: Callable[..., torch.Tensor], stack: list[Weights], count: int) -> Step:
    half = (CONTEXT - 1) * torch.from_numpy(read_rope(SHAPE.layers[0].rope).frequencies)
    angles = torch.cat((half, half)).expand(count, 1, -1)
    cos, sin = angles.cos(), angles.sin()
    size = (count, SHAPE.num_kv_heads, CONTEXT, SHAPE.head_size)
    caches = [Dense(torch.randn(*size), torch.randn(*size)) for _ in stack]

    def run() -> torch.Tensor:
        rows = torch.ones(count, SHAPE.hidden_size)
        for weights, cache in zip(stack, caches, strict=True):
            rows = of(weights, rows, cos, sin, cache)
        return rows

    return run


def _ours(count: int) -> Step:
    """The decoder's layers over a paged store, without the head: no row's logits are wanted."""
    model = smollm2_model()
    each = -(-CONTEXT // BLOCK)
    store = make_store(model, count * each)
    items = [WorkItem(at, (5,), CONTEXT - 1, tuple(range(1 + at * each, 1 + (at + 1) * each))) for at in range(count)]
    nothing = np.empty(0, np.int64)
    return lambda: model.compute(make_batch(items, BLOCK), store, nothing)


if __name__ == "__main__":
    sys.exit(main())
