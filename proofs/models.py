"""`make proof-models`: the families of today on the CPU backend, mixtures of experts among them.

    models_parity    every family's tokens against transformers, from safetensors and from GGUF files
    models_real      real weights in 4 bits: perplexity against transformers
    models_bits      the same bits in any circumstance: experts, windows, sinks, shared keys and values
    models_text      templates and tokenizers against transformers
    models_speed     a mixture beside the memory and beside llama.cpp
    models_refused   what the guide lists, and what is taken

Models: `make model model-coder model-gemma`; the mixture is made by the proof. Peer: `benchmarks/peers/install.sh
llamacpp`.
"""

import sys

from proofs import models_bits, models_parity, models_real, models_refused, models_speed, models_text
from proofs.proof import run

ROOMS = (models_parity, models_real, models_bits, models_text, models_speed, models_refused)


if __name__ == "__main__":
    sys.exit(run("models", *ROOMS))
