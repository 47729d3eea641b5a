"""`make proof-first`: the first ten minutes, from a model's name to an answer.

first_hub      pulls from a hub that misbehaves: what is kept is whole and checked
first_fit      which file of a repository is taken, beside a search through all
first_park     three models in the room of two: asked, switched, killed
first_page     the page in a browser: sizes, colours, keys, hostile answers, stop
first_doctor   faults that are planted, and what must not be told
first_wheel    the wheel in an empty environment; the source archive without a compiler
"""

import sys

from proofs import first_doctor, first_fit, first_hub, first_page, first_park, first_wheel
from proofs.proof import run

ROOMS = (first_hub, first_fit, first_park, first_page, first_doctor, first_wheel)


if __name__ == "__main__":
    sys.exit(run("first", *ROOMS))
