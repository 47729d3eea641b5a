"""The command line. Commands parse arguments, call the library and print. Each command imports its dependencies when it
runs, so that `--help` is quick. Data goes to stdout, messages to stderr. A QuireError is printed as one line, sometimes
with a hint, never as a traceback.
"""

from quire.cli.program import app, main

__all__ = ["app", "main"]
