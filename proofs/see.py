"""`make proof-see`: why a prefix missed, and what happens inside, for those who may know it.

    see_explain     every miss has its reason, its token and its part of the conversation
    see_leaks       nobody learns of anybody else by any of it
    see_guard       lines that keep prompts out of the cache are found, and nothing else is
    see_watch       what it costs to look, and that nothing is made while nobody does
    see_dashboard   the dashboard in a browser, before a server under load
    see_top         what the operator alone may see, and what `quire top` makes of it
    see_replay      traces of servers under load, planned again

Full runs keep their pictures under docs/images.
"""

import sys

from proofs import see_dashboard, see_explain, see_guard, see_leaks, see_replay, see_top, see_watch
from proofs.proof import run

if __name__ == "__main__":
    sys.exit(run("see", see_explain, see_leaks, see_guard, see_watch, see_dashboard, see_top, see_replay))
