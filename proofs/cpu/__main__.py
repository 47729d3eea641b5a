"""`make proof-cpu`: the CPU backend needs no torch, keeps weights in their file formats, and is bound by bandwidth.

    install   the wheel in an empty environment: bytes, modules of torch, time to ready, memory
    kit       the backend's contract, and transformers' tokens
    bits      the same bits in any batch, on any number of threads, on every instruction set
    formats   products of every format against float64
    quality   perplexity of formats, integer arithmetic and 8-bit KV
    memory    the 8B model: no weights written to disk, held in memory once, loaded quickly
    speed     decode steps against memory bandwidth and float32, and next to busy processes
    sets      every instruction set that can be forced here: bits, speed, against llama.cpp

It needs `make model`, `make model-coder`, `make bench-models`. `make peers` compares with other engines.
"""

import sys

from proofs.cpu import bits, formats, install, kit, memory, quality, sets, speed
from proofs.framework.proof import run

PARTS = (install, kit, bits, formats, quality, memory, speed, sets)
PATHS = ("src/quire/backends/cpu", "src/quire/backends/host", "src/quire/backends/kernels", "native")

if __name__ == "__main__":
    sys.exit(run("cpu", *PARTS, paths=PATHS))
