"""From a model's name to its files on this machine, checked: hub ids, directories, GGUF files.

Nothing here imports a tensor library, and nothing in a model is ever executed.
"""

from quire.checkpoints.cache import cache_folder
from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.names import resolve
from quire.checkpoints.progress import Progress, quiet
from quire.checkpoints.tokenizer_file import load_tokenizer
from quire.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "Progress", "cache_folder", "load_tokenizer", "quiet", "resolve"]
