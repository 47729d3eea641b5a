"""`make proof-agents`: tools, reasoning, and the APIs that agents speak.

    templates  the tool-call formats that are read off the chat templates of published models
    streams    streams cut at any token, in every API dialect: their joined events equal the unstreamed answer
    calls      the tool calls of real models match their schemas
    clients    eighteen real clients from npm and PyPI: each calls a tool and ends
    reuse      the prompt tokens that later requests of four agents find in the prefix cache
    launch     `quire launch` with five agents: it changes none of the user's files
    real       a real model behind three agents
    fives      generated bodies at every route: an answer or an error in the API's format, never a 5xx but 503
    store      conversations continued by an id: the answers of the full history, and hidden from other tenants
    budgets    reasoning with a token budget: no token beyond the budget
    loops      answers that repeat themselves are cut, and no others
    histories  broken tool calls over published templates: all rendered
    injected   names of control tokens in every field of a request: none becomes a control token
    sdk        official SDKs, Python and JavaScript: streams equal whole answers, errors have the SDK's types
    waits      streams that wait for a load, a queue, a long prompt: first byte and silences; a prompt sent twice
    ttft       time to the first token of an agent's second turn, over that of its first turn
    overhead   16 HTTP streams in each dialect, against the same 16 in process

Models: `make model`, `make model-coder`. Published templates, tokenizers and SDKs are downloaded; some sections need
node and npm.
"""

import sys

from proofs.agents import (
    budgets,
    calls,
    clients,
    fives,
    launch,
    overhead,
    real,
    reuse,
    sdk,
    store,
    streams,
    ttft,
)
from proofs.agents.long_runs import endings, waits
from proofs.agents.prompts import injected, templates
from proofs.framework.proof import run

PARTS = (
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
    endings,
    injected,
    sdk,
    waits,
    ttft,
    overhead,
)


PATHS = ("src/quire/api", "src/quire/client", "src/quire/text")

if __name__ == "__main__":
    sys.exit(run("agents", *PARTS, paths=PATHS))
