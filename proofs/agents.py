"""`make proof-agents`: tools, reasoning, and the APIs that agents speak.

    agents_templates  how published models write calls, read off their templates
    agents_streams    answers cut anywhere, in all dialects: joined they are the whole
    agents_calls      what real models call fits its schema
    agents_clients    eighteen real clients from npm and PyPI: each calls a tool and ends
    agents_reuse      what later requests of four agents find in the cache
    agents_launch     `quire launch` with five agents: nothing of the user's is touched
    agents_real       a real model behind three of them

Models: `make model`, `make model-coder`. Published templates and tokenizers are downloaded.
"""

import sys

from proofs import (
    agents_calls,
    agents_clients,
    agents_launch,
    agents_real,
    agents_reuse,
    agents_streams,
    agents_templates,
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
)


if __name__ == "__main__":
    sys.exit(run("agents", *ROOMS))
