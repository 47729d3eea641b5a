"""`make proof-models`: the families of today on the CPU backend, mixtures of experts among them.

    parity    every family's tokens against transformers, from safetensors and from GGUF files
    real      real weights in 4 bits: perplexity against transformers
    bits      the same bits in any circumstance: experts, windows, sinks, shared keys and values
    text      templates and tokenizers against transformers
    speed     a mixture beside the memory's speed
    refused   what the guide lists, and what is taken

Models: `make model model-coder model-gemma`; the mixture is made by the proof. Beside llama.cpp: `make
peers`.
"""

import sys

from proofs.framework.proof import run
from proofs.models import bits, parity, real, refused, speed, text

ROOMS = (parity, real, bits, text, speed, refused)


PATHS = ("src/quire/backends", "src/quire/checkpoints", "src/quire/text", "native")

if __name__ == "__main__":
    sys.exit(run("models", *ROOMS, paths=PATHS))
