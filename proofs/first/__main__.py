"""`make proof-first`: a user's first ten minutes, from the name of a model to an answer.

hub      pulls from a faulty hub: downloaded files must be complete and checked
fit      which file of a repository is selected, compared with an exhaustive search
park     three models in the memory of two: requests, switches, killed workers
page     the page in a browser: sizes, colours, keys, hostile answers, stop
doctor   injected faults, and private data that the report must not contain
wheel    the wheel in an empty environment; the source archive without a compiler
"""

import sys

from proofs.first import doctor, fit, hub, page, park, wheel
from proofs.framework.proof import run

PARTS = (hub, fit, park, page, doctor, wheel)


PATHS = ("src/quire/api", "src/quire/cli", "src/quire/checkpoints", "src/quire/client")

if __name__ == "__main__":
    sys.exit(run("first", *PARTS, paths=PATHS))
