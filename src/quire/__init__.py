"""quire: serve language models to many people and agents from one paged KV memory.

The public names live here. There are none yet beside the version: what is finished so far, memory and scheduler, lives
under `quire.core`, and `quire sim` shows it.
"""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
