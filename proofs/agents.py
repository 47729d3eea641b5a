"""`make proof-agents`: tools, reasoning, and the APIs that agents speak.

    agents_templates  how published models write calls, read off their templates
    agents_streams    answers cut anywhere, in all dialects: joined they are the whole
    agents_calls      what real models call fits its schema
    agents_clients    eighteen real clients from npm and PyPI: each calls a tool and ends
    agents_reuse      what later requests of four agents find in the cache
    agents_launch     `quire launch` with five agents: nothing of the user's is touched
    agents_real       a real model behind three of them
    agents_fives      generated bodies at every route: an answer, or a sentence in the API's own shape
    agents_store      conversations gone on with by an id: the same as sent whole, and nobody else's
    agents_budgets    thoughts with a budget: no token beyond it
    agents_injected   names of control tokens in all that a client can fill: none becomes one
    agents_sdk        official SDKs, Python and JavaScript: streamed as told whole, errors of their own kinds
    agents_ttft       the first token of an agent's second turn, beside its first
    agents_overhead   16 streams through each dialect, over the same in process

Models: `make model`, `make model-coder`. Published templates, tokenizers and SDKs are downloaded; node and npm are
needed for some of them.
"""

import sys

from proofs import (
    agents_budgets,
    agents_calls,
    agents_clients,
    agents_fives,
    agents_injected,
    agents_launch,
    agents_overhead,
    agents_real,
    agents_reuse,
    agents_sdk,
    agents_store,
    agents_streams,
    agents_templates,
    agents_ttft,
)
from proofs.proof import run

ROOMS = (
    agents_templates,
    agents_streams,
    agents_calls,
    agents_clients,
    agents_reuse,
    agents_launch,
    agents_real,
    agents_fives,
    agents_store,
    agents_budgets,
    agents_injected,
    agents_sdk,
    agents_ttft,
    agents_overhead,
)


if __name__ == "__main__":
    sys.exit(run("agents", *ROOMS))
