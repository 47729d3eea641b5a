"""`python -m proofs.framework.load_once FILE`: resolves and loads a model, and ends. A proof times the process."""

import sys

from quire.backends.load import load_backend
from quire.checkpoints import resolve
from quire.config import ModelSettings

if __name__ == "__main__":
    load_backend(resolve(sys.argv[1]), ModelSettings(memory_bytes=4 << 30))
