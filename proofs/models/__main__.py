"""`make proof-models`: model families on the CPU backend, including mixtures of experts.

    parity    every family's tokens against transformers, from safetensors and from GGUF files
    real      published weights in 4 bits: perplexity against transformers
    bits      the same bits in any circumstance: experts, windows, sinks, shared keys and values
    text      templates and tokenizers against transformers
    speed     a mixture of experts against memory bandwidth
    refused   the guide lists exactly the families that quire accepts

It needs the models of `make model model-coder model-gemma`, and generates the mixture itself. `make peers` compares
with llama.cpp.
"""

import sys

from proofs.framework.proof import run
from proofs.models import bits, parity, real, refused, speed, text

PARTS = (parity, real, bits, text, speed, refused)


PATHS = ("src/quire/backends", "src/quire/checkpoints", "src/quire/text", "native")

if __name__ == "__main__":
    sys.exit(run("models", *PARTS, paths=PATHS))
