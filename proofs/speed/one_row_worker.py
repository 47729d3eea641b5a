"""Processor seconds per byte of Q8_0, Q4_K and Q6_K, for one row on one thread, with weights larger than the caches.

`benchmarks.peers.workers` starts it with QUIRE_INSTRUCTION_SET. It writes a line of JSON when it is ready, and one for
each line on stdin: {"Q8_0": 1.1e-10, ...}.
"""

import json
import sys
from time import thread_time

import numpy as np

from quire.backends.cpu.formats.gguf_source import gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.weight_format import Arithmetic
from quire.backends.kernels.large_pages import Arena
from tests.support.models.gguf_blocks import panel_product, random_rows

NUM_OUT, NUM_IN, NUM_COPIES = 8960, 1536, 12
NAMES = ("Q8_0", "Q4_K", "Q6_K")


def main() -> None:
    dice = np.random.default_rng(3)
    row = dice.standard_normal((1, NUM_IN)).astype(np.float32)
    arena, weights, sizes = Arena(), dict[str, list[PackedWeight]](), dict[str, int]()
    for name in NAMES:
        rows = random_rows(name, NUM_OUT, NUM_IN, dice)
        weights[name] = [PackedWeight([gguf_source(name, rows, NUM_IN)], arena) for _ in range(NUM_COPIES)]
        sizes[name] = rows.nbytes * NUM_COPIES
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        seconds_per_byte = {}
        for name, copies in weights.items():
            start_s = thread_time()
            for weight in copies:
                panel_product(weight, row, Arithmetic.INTEGER)
            seconds_per_byte[name] = (thread_time() - start_s) / sizes[name]
        print(json.dumps(seconds_per_byte), flush=True)


if __name__ == "__main__":
    main()
