"""quire: serve language models to many people and agents from one paged KV memory.

The public names live here. There are none yet beside the version: the memory under `quire.core` is the
first room of the house that is finished.
"""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
