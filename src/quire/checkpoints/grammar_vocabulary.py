"""A model's vocabulary for the grammar library, and the cost limits of a grammar. The process that checks a grammar and
the worker that runs it both use this module, so that they apply the same limits.

Loading a vocabulary takes most of a second, longer than any other work for grammars. Each process loads it once, for
its first grammar.
"""

import json
from collections.abc import Sequence
from itertools import islice
from time import thread_time
from typing import TYPE_CHECKING, Any

from quire.checkpoints.checkpoint import Checkpoint
from quire.errors import CheckpointError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 2_500,
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}
"""Parser limits. A token mask takes at most about 30 ms, for ordinary grammars less than 2 ms. Errors are not verbose,
so that they do not copy the client's text into logs."""
SHOWN_CHARS = 300
"""Maximum length of the library's error messages."""
MAX_FIRST = 32
"""Number of allowed first tokens to try one step each, because some grammars fail only there."""
FOLLOWED = 96
"""Maximum length of the trial token sequence."""
LAST = 8
"""Number of tokens whose mean mask time is compared: at the end of the sequence and at its middle."""
MAX_ALLOWED = 4096
"""Maximum number of tokens read from one mask."""
GROWN_S = 0.001
GROWTH = 2.5
"""A grammar is rejected if its masks get ever slower: if the last ones take longer than `GROWN_S` and than `GROWTH`
times those at half the length."""


def grammar_tokens(checkpoint: Checkpoint) -> tuple[str, tuple[int, ...]]:
    """Return the text of a model's `tokenizer.json`, and its EOS token ids. Raises CheckpointError."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"grammars need a tokenizer.json, {checkpoint.name} has none; leave grammars out")
    try:
        text = checkpoint.tokenizer_file.read_text(encoding="utf-8")
        added = {one["content"]: one["id"] for one in json.loads(text).get("added_tokens") or ()}
        return text, tuple(sorted(checkpoint.end_tokens(added.get)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.tokenizer_file} cannot be read for grammars: {_short(error)}") from error


def grammar_vocabulary(tokenizer_json: str, vocabulary_size: int, end_tokens: Sequence[int]) -> "LLTokenizer":
    """Build the library's tokenizer; its masks have `vocabulary_size` bits, like the logits. Raises CheckpointError."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocabulary_size, eos_token=list(end_tokens) or None)
    except Exception as error:  # the library may raise anything for a malformed file
        raise CheckpointError(f"this model's tokenizer cannot be used for grammars: {_short(error)}") from error


def matcher_of(vocabulary: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Compile a grammar into a matcher. A grammar that fails sets the matcher's `is_error` and `get_error`."""
    from llguidance import LLMatcher, LLParserLimits

    limits: Any = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def first_mask(matcher: "LLMatcher") -> bytes:
    """Return the mask of allowed first tokens. Raises ValueError if the mask, or finding forced tokens, fails."""
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if not matcher.is_error():
        matcher.compute_ff_tokens()
    if matcher.is_error():
        raise ValueError(matcher.get_error()[:SHOWN_CHARS])
    return mask


def follow(matcher: "LLMatcher", vocabulary: "LLTokenizer", within_s: float) -> None:
    """Try token sequences of a grammar, for at most `within_s` of CPU time. Raises ValueError if the grammar fails on
    them, or if its masks get ever slower."""
    started_s, ends = thread_time(), set(vocabulary.eos_tokens)
    firsts = _allowed(matcher.compute_bitmask(), ends)
    for first in firsts[:: max(1, len(firsts) // MAX_FIRST)]:
        if thread_time() - started_s > within_s / 2:
            break
        _step(matcher.deep_copy(), first)
    took: list[float] = []
    token: int | None = firsts[len(firsts) // 2] if firsts else None
    while token is not None and len(took) < FOLLOWED and thread_time() - started_s < within_s:
        before_s = thread_time()
        mask = _step(matcher, token)
        took.append(thread_time() - before_s)
        token = None if matcher.is_stopped() else _near(mask, token, ends)  # repeated tokens show growth
    latest, earlier = sum(took[-LAST:]) / LAST, sum(took[len(took) // 2 - LAST : len(took) // 2]) / LAST
    if len(took) >= 4 * LAST and latest > max(GROWN_S, GROWTH * earlier):
        raise ValueError(
            f"computing the allowed tokens gets slower and slower: {latest * 1e3:.2g} ms after {len(took)} tokens, "
            f"{earlier * 1e3:.2g} ms after {len(took) // 2}; use no left-recursive rules"
        )


def _step(matcher: "LLMatcher", token: int) -> bytes:
    """Consume a token and return the mask of tokens allowed after it. Raises ValueError if the grammar fails."""
    matcher.consume_token(token)
    mask = b"" if matcher.is_error() or matcher.is_stopped() else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error()[:SHOWN_CHARS])
    return mask


def _allowed(mask: bytes, ends: set[int]) -> list[int]:
    """Return the first `MAX_ALLOWED` tokens of a mask, without EOS tokens."""
    found = (8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)
    return list(islice((token for token in found if token not in ends), MAX_ALLOWED))


def _near(mask: bytes, token: int, ends: set[int]) -> int | None:
    """Return `token` if it is allowed, otherwise an allowed token with a close id; None if there is none."""
    if mask and mask[token // 8] >> token % 8 & 1:
        return token
    for start in (token // 8, 0):
        rest = mask[start:].lstrip(b"\0")
        if found := _allowed(b"\0" * (len(mask) - len(rest)) + rest[:1], ends):
            return found[0]
    return None


def _short(error: Exception) -> str:
    return str(error)[:SHOWN_CHARS]
