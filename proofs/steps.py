"""`make proof-steps`: steps that carry more: grammars, forced tokens, a quick sampler, exact speculation.

    steps_grammar      answers against their schemas; killed, alone, in a batch, preempted, cached, one of four
    steps_guides       processor time of masks and matchers
    steps_hostile      grammars that are made to cost much
    steps_sampler      the same tokens as the plain sampler
    steps_speculation  the same answers with guesses as without, what they are worth, and nobody else's words

Models: `make model`, `make model-coder`. A vocabulary of 131,072 tokens is downloaded.
"""

import sys

from proofs import steps_grammar, steps_guides, steps_hostile, steps_sampler, steps_speculation
from proofs.proof import run

ROOMS = (steps_guides, steps_grammar, steps_hostile, steps_sampler, steps_speculation)


if __name__ == "__main__":
    sys.exit(run("steps", *ROOMS))
