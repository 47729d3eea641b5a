"""A model's tokens as grammars see them, and what one grammar may cost. For those who check a grammar, and for those
who run it: both must be of one opinion.

Reading a vocabulary takes most of a second, longer than all else that is done for grammars: once for a process, when
the first of them comes.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.checkpoints.checkpoint import Checkpoint
from quire.errors import CheckpointError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = {"initial_lexer_fuel": 300_000, "step_lexer_fuel": 100_000, "step_max_items": 20_000, "verbose_errors": False}
"""Of compiling a grammar, and of what it allows at one place. An error does not quote the client's text into logs."""
SHOWN_CHARS = 300
"""Of what the library says."""


def grammar_tokens(checkpoint: Checkpoint) -> tuple[str, tuple[int, ...]]:
    """The text of a model's `tokenizer.json`, and the tokens that end a text."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"{checkpoint.name} has no tokenizer.json, which grammars need; leave grammars out")
    try:
        text = checkpoint.tokenizer_file.read_text(encoding="utf-8")
        added = {one["content"]: one["id"] for one in json.loads(text).get("added_tokens") or ()}
        return text, tuple(sorted(checkpoint.end_tokens(added.get)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.tokenizer_file} cannot be read for grammars: {_short(error)}") from error


def grammar_vocabulary(tokenizer_json: str, vocabulary_size: int, end_tokens: Sequence[int]) -> "LLTokenizer":
    """The tokens as the library has them; masks made with them are as wide as the model's logits."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocabulary_size, eos_token=list(end_tokens) or None)
    except Exception as error:  # whatever the library makes of a strange file
        raise CheckpointError(f"this model's tokenizer cannot be used for grammars: {_short(error)}") from error


def matcher_of(vocabulary: "LLTokenizer", grammar: str) -> "LLMatcher":
    """What follows a text through a grammar. One that cannot be compiled says so: `is_error`, `get_error`."""
    from llguidance import LLMatcher, LLParserLimits

    limits: Any = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def first_mask(matcher: "LLMatcher") -> str | None:
    """See what may come first and what must, for some grammars fail only there. None, or what is wrong."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        matcher.compute_ff_tokens()
    return matcher.get_error()[:SHOWN_CHARS] if matcher.is_error() else None


def _short(error: Exception) -> str:
    return str(error)[:SHOWN_CHARS]
