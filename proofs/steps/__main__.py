"""`make proof-steps`: steps that carry more: grammars, forced tokens, a quick sampler, exact speculation.

    grammar      answers against their schemas; killed, alone, in a batch, preempted, cached, one of four
    guides       processor time of masks and matchers
    hostile      grammars that are made to cost much
    sampler      the same tokens as the plain sampler
    speculation  the same answers with guesses as without, what they are worth, and nobody else's words

Models: `make model`, `make model-coder`. A vocabulary of 131,072 tokens is downloaded.
"""

import sys

from proofs.framework.proof import run
from proofs.steps import grammar, guides, hostile, sampler, speculation

ROOMS = (guides, grammar, hostile, sampler, speculation)


PATHS = ("src/quire/engine", "src/quire/text", "src/quire/core", "src/quire/backends/host")

if __name__ == "__main__":
    sys.exit(run("steps", *ROOMS, paths=PATHS))
