"""A model's tokens as grammars see them, and what one grammar may cost. For those who check a grammar, and for those
who run it: both must be of one opinion.

Reading a vocabulary takes most of a second, longer than all else that is done for grammars: once for a process, when
the first of them comes.
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
"""Of compiling a grammar, and of what it allows at one place: a mask takes some 30 ms at the most, of ordinary grammars
less than two. An error does not quote the client's text into logs."""
SHOWN_CHARS = 300
"""Of what the library says."""
MAX_FIRST = 32
"""Tokens that may come first, each of which is followed once: some grammars fail only there."""
FOLLOWED = 96
"""Tokens that are followed one behind the other."""
LAST = 8
"""The latest of them, and the half before them: what these took is compared."""
MAX_ALLOWED = 4096
"""Of those that may come at a place, so many are looked at."""
GROWN_S = 0.001
GROWTH = 2.5
"""A grammar is refused if its latest tokens took longer than this, and so many times as long as those half as far: with
every token it takes longer, without end."""


def grammar_tokens(checkpoint: Checkpoint) -> tuple[str, tuple[int, ...]]:
    """The text of a model's `tokenizer.json`, and the tokens that end a text."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"grammars need a tokenizer.json, {checkpoint.name} has none; leave grammars out")
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


def first_mask(matcher: "LLMatcher") -> bytes:
    """What may come first; and what must is looked at, for some grammars fail only there. Raises ValueError."""
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if not matcher.is_error():
        matcher.compute_ff_tokens()
    if matcher.is_error():
        raise ValueError(matcher.get_error()[:SHOWN_CHARS])
    return mask


def follow(matcher: "LLMatcher", vocabulary: "LLTokenizer", within_s: float) -> None:
    """See what may come later, for so much processor time at the most. Raises ValueError if it fails there, or takes
    ever longer."""
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
        token = None if matcher.is_stopped() else _near(mask, token, ends)  # what may come again and again grows
    latest, earlier = sum(took[-LAST:]) / LAST, sum(took[len(took) // 2 - LAST : len(took) // 2]) / LAST
    if len(took) >= 4 * LAST and latest > max(GROWN_S, GROWTH * earlier):
        raise ValueError(
            f"computing the allowed tokens gets slower and slower: {latest * 1e3:.2g} ms after {len(took)} tokens, "
            f"{earlier * 1e3:.2g} ms after {len(took) // 2}; use no left-recursive rules"
        )


def _step(matcher: "LLMatcher", token: int) -> bytes:
    """What may follow this token."""
    matcher.consume_token(token)
    mask = b"" if matcher.is_error() or matcher.is_stopped() else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error()[:SHOWN_CHARS])
    return mask


def _allowed(mask: bytes, ends: set[int]) -> list[int]:
    """The first tokens of a mask, without those that end a text."""
    found = (8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)
    return list(islice((token for token in found if token not in ends), MAX_ALLOWED))


def _near(mask: bytes, token: int, ends: set[int]) -> int | None:
    """The same token, if it is allowed, or else one of the next."""
    if mask and mask[token // 8] >> token % 8 & 1:
        return token
    for start in (token // 8, 0):
        rest = mask[start:].lstrip(b"\0")
        if found := _allowed(b"\0" * (len(mask) - len(rest)) + rest[:1], ends):
            return found[0]
    return None


def _short(error: Exception) -> str:
    return str(error)[:SHOWN_CHARS]
