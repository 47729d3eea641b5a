"""`make proof-first`: the first ten minutes, from a model's name to an answer.

hub      pulls from a hub that misbehaves: what is kept is whole and checked
fit      which file of a repository is taken, beside a search through all
park     three models in the room of two: asked, switched, killed
page     the page in a browser: sizes, colours, keys, hostile answers, stop
doctor   faults that are planted, and what must not be told
wheel    the wheel in an empty environment; the source archive without a compiler
"""

import sys

from proofs.first import doctor, fit, hub, page, park, wheel
from proofs.framework.proof import run

ROOMS = (hub, fit, park, page, doctor, wheel)


PATHS = ("src/quire/api", "src/quire/cli", "src/quire/checkpoints", "src/quire/client")

if __name__ == "__main__":
    sys.exit(run("first", *ROOMS, paths=PATHS))
