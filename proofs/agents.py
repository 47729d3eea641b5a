"""`make proof-agents`: tools, reasoning, and the APIs that agents speak.

    agents_templates  how published models write calls, read off their templates
    agents_streams    answers cut anywhere, in all dialects: joined they are the whole
    agents_calls      what real models call fits its schema

Models: `make model`, `make model-coder`. Published templates and tokenizers are downloaded.
"""

import sys

from proofs import agents_calls, agents_streams, agents_templates
from proofs.proof import run

ROOMS = (agents_templates, agents_streams, agents_calls)


if __name__ == "__main__":
    sys.exit(run("agents", *ROOMS))
