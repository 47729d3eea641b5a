"""quire: serve language models to many people and agents from one paged KV memory.

The public names live here, few and frozen by a test; everything else may change between versions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config import ModelSettings
    from quire.engine.answers import Answer, Completion, Piece, Timings
    from quire.engine.async_engine import AsyncEngine
    from quire.engine.explaining import Difference, Explanation
    from quire.engine.llm import LLM
    from quire.engine.parameters import SamplingParams
    from quire.errors import QuireError

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "Answer",
    "AsyncEngine",
    "Completion",
    "Difference",
    "Explanation",
    "ModelSettings",
    "Piece",
    "QuireError",
    "SamplingParams",
    "Timings",
    "__version__",
]

_HOMES = {
    "LLM": "quire.engine.llm",
    "Answer": "quire.engine.answers",
    "AsyncEngine": "quire.engine.async_engine",
    "Completion": "quire.engine.answers",
    "Difference": "quire.engine.explaining",
    "Explanation": "quire.engine.explaining",
    "ModelSettings": "quire.config",
    "Piece": "quire.engine.answers",
    "QuireError": "quire.errors",
    "SamplingParams": "quire.engine.parameters",
    "Timings": "quire.engine.answers",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import quire` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name]), name)
