"""`make proof-steps`: engine steps with grammars, forced tokens, the sampler and exact speculation.

    grammar      answers match their schemas: with killed workers, alone, in a batch, preempted, cached, one of four
    guides       processor time of token masks and grammar matchers
    hostile      grammars that are made to cost much time
    sampler      the same tokens as a plain reference sampler
    speculation  equal answers with and without draft tokens, the speedup, and no drafts from other tenants

Models: `make model`, `make model-coder`. A vocabulary of 131,072 tokens is downloaded.
"""

import sys

from proofs.framework.proof import run
from proofs.steps import grammar, guides, hostile, sampler, speculation

PARTS = (guides, grammar, hostile, sampler, speculation)


PATHS = ("src/quire/engine", "src/quire/text", "src/quire/core", "src/quire/backends/host")

if __name__ == "__main__":
    sys.exit(run("steps", *PARTS, paths=PATHS))
