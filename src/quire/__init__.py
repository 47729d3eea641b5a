"""quire: an inference server for language models with one paged KV memory. Requests of one cache group (by default, of
one API key) share the KV of equal prompt prefixes.

This module exports the public API, which a test keeps fixed; everything else may change between versions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.client.engines.async_engine import AsyncEngine
    from quire.client.engines.llm import LLM
    from quire.client.prefix.explanation import Difference, Explanation
    from quire.client.reply.outputs import Answer, Completion, Piece, Timings
    from quire.client.request.params import SamplingParams
    from quire.config import ModelSettings
    from quire.errors import QuireError
    from quire.text.grammars.grammar import Grammar

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

_MODULES = {
    "LLM": "quire.client.engines.llm",
    "Answer": "quire.client.reply.outputs",
    "AsyncEngine": "quire.client.engines.async_engine",
    "Completion": "quire.client.reply.outputs",
    "Difference": "quire.client.prefix.explanation",
    "Explanation": "quire.client.prefix.explanation",
    "Grammar": "quire.text.grammars.grammar",
    "ModelSettings": "quire.config",
    "Piece": "quire.client.reply.outputs",
    "QuireError": "quire.errors",
    "SamplingParams": "quire.client.request.params",
    "Timings": "quire.client.reply.outputs",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import quire` stays fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - needed only on first use

    return getattr(import_module(_MODULES[name]), name)
