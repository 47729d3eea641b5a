"""`make proof-first`: the first ten minutes, from a model's name to an answer.

first_hub      pulls from a hub that misbehaves: what is kept is whole and checked
first_fit      which file of a repository is taken, beside a search through all
"""

import sys

from proofs import first_fit, first_hub
from proofs.proof import run

ROOMS = (first_hub, first_fit)


if __name__ == "__main__":
    sys.exit(run("first", *ROOMS))
