"""`make proof-cpu`: the CPU backend stands alone, with weights as files have them, at the memory's speed.

    cpu_install   the wheel in an empty environment: bytes, modules of torch, time to ready, memory
    cpu_kit       the backend's contract, and transformers' tokens
    cpu_bits      the same bits in any company, on any number of threads, on every instruction set
    cpu_formats   products of every format against float64
    cpu_quality   perplexity of formats, integer arithmetic and 8-bit KV
    cpu_memory    the 8B model: nothing written, held once, soon there
    cpu_speed     beside the memory, float32, neighbours
    cpu_peers     beside llama.cpp and OpenVINO GenAI

Models: `make model`, `make model-coder`, `make bench-models`. Peers: `benchmarks/peers/install.sh llamacpp|openvino`.
"""

import sys

from proofs import cpu_bits, cpu_formats, cpu_install, cpu_kit, cpu_memory, cpu_peers, cpu_quality, cpu_speed
from proofs.proof import run

ROOMS = (cpu_install, cpu_kit, cpu_bits, cpu_formats, cpu_quality, cpu_memory, cpu_speed, cpu_peers)


if __name__ == "__main__":
    sys.exit(run("cpu", *ROOMS))
