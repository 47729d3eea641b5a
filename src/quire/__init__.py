"""quire: serve language models to many people and agents from one paged KV memory. A prefix is computed once for all
who share a cache group.

The public names live here, few and frozen by a test; everything else may change between versions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.client.async_engine import AsyncEngine
    from quire.client.explanation import Difference, Explanation
    from quire.client.llm import LLM
    from quire.client.outputs import Answer, Completion, Piece, Timings
    from quire.client.params import SamplingParams
    from quire.config import ModelSettings
    from quire.errors import QuireError
    from quire.text.grammar import Grammar

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "Answer",
    "AsyncEngine",
    "Completion",
    "Difference",
    "Explanation",
    "Grammar",
    "ModelSettings",
    "Piece",
    "QuireError",
    "SamplingParams",
    "Timings",
    "__version__",
]

_HOMES = {
    "LLM": "quire.client.llm",
    "Answer": "quire.client.outputs",
    "AsyncEngine": "quire.client.async_engine",
    "Completion": "quire.client.outputs",
    "Difference": "quire.client.explanation",
    "Explanation": "quire.client.explanation",
    "Grammar": "quire.text.grammar",
    "ModelSettings": "quire.config",
    "Piece": "quire.client.outputs",
    "QuireError": "quire.errors",
    "SamplingParams": "quire.client.params",
    "Timings": "quire.client.outputs",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import quire` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name]), name)
