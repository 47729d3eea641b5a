"""`make proof-agents`: tools, reasoning, and the APIs that agents speak.

    templates  how published models write calls, read off their templates
    streams    answers cut anywhere, in all dialects: joined they are the whole
    calls      what real models call fits its schema
    clients    eighteen real clients from npm and PyPI: each calls a tool and ends
    reuse      what later requests of four agents find in the cache
    launch     `quire launch` with five agents: nothing of the user's is touched
    real       a real model behind three of them
    fives      generated bodies at every route: an answer, or a sentence in the API's own shape
    store      conversations gone on with by an id: the same as sent whole, and nobody else's
    budgets    thoughts with a budget: no token beyond it
    injected   names of control tokens in all that a client can fill: none becomes one
    sdk        official SDKs, Python and JavaScript: streamed as told whole, errors of their own kinds
    ttft       the first token of an agent's second turn, beside its first
    overhead   16 streams through each dialect, over the same in process

Models: `make model`, `make model-coder`. Published templates, tokenizers and SDKs are downloaded; node and npm are
needed for some of them.
"""

import sys

from proofs.agents import budgets, calls, clients, fives, launch, overhead, real, reuse, sdk, store, streams, ttft
from proofs.agents.prompts import injected, templates
from proofs.framework.proof import run

ROOMS = (
    templates,
    streams,
    calls,
    clients,
    reuse,
    launch,
    real,
    fives,
    store,
    budgets,
    injected,
    sdk,
    ttft,
    overhead,
)


PATHS = ("src/quire/api", "src/quire/client", "src/quire/text")

if __name__ == "__main__":
    sys.exit(run("agents", *ROOMS, paths=PATHS))
