"""What a person types. Commands parse, call and print; each imports what it needs when it runs, so `--help` is quick.

Data goes to stdout, messages to stderr. A QuireError is one line, with a hint where one helps, never a traceback.
"""

from quire.cli.program import app, main

__all__ = ["app", "main"]
