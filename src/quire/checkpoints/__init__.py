"""Resolves a model's name (Hub id, directory or GGUF file) to validated files on this machine.

This package imports no tensor library and never executes code from a model.
"""

from quire.checkpoints.cache import cache_folder
from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.names import resolve
from quire.checkpoints.progress import Progress, quiet
from quire.checkpoints.tokenizer_file import load_tokenizer
from quire.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "Progress", "cache_folder", "load_tokenizer", "quiet", "resolve"]
