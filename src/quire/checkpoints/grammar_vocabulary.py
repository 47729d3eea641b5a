"""A model's vocabulary for the grammar library (llguidance), and the cost limits of a grammar. The process that checks
a grammar and the worker that enforces it both use this module, so that they apply the same limits.

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
"""Parser limits. With them, a token mask takes at most about 30 ms, for ordinary grammars less than 2 ms. Errors are
not verbose, so that they do not copy the client's text into logs."""
MAX_MESSAGE_CHARS = 300
"""Maximum length of the library's error messages."""
MAX_FIRST_TOKENS = 32
"""Number of first tokens that are each tried for one step, because some grammars fail only after certain tokens."""
MAX_TRIAL_TOKENS = 96
"""Maximum length of the trial token sequence."""
NUM_COMPARED = 8
"""Number of masks whose mean time is compared: those at the end of the trial sequence with those before its middle."""
MAX_READ_TOKENS = 4096
"""Maximum number of tokens read from one mask."""
MAX_GROWN_MASK_S = 0.001
MAX_MASK_GROWTH = 2.5
"""A grammar is rejected if its masks get ever slower: if the last masks take more than `MAX_GROWN_MASK_S` each and more
than `MAX_MASK_GROWTH` times as long as the masks before the middle."""


def grammar_tokens(checkpoint: Checkpoint) -> tuple[str, tuple[int, ...]]:
    """Return the text of a model's `tokenizer.json`, and its EOS token ids. Raises CheckpointError."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"grammars need a tokenizer.json, {checkpoint.name} has none; leave grammars out")
    try:
        text = checkpoint.tokenizer_file.read_text(encoding="utf-8")
        added_ids = {token["content"]: token["id"] for token in json.loads(text).get("added_tokens") or ()}
        return text, tuple(sorted(checkpoint.end_tokens(added_ids.get)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.tokenizer_file} cannot be read for grammars: {_short(error)}") from error


def grammar_vocabulary(tokenizer_json: str, vocabulary_size: int, end_tokens: Sequence[int]) -> "LLTokenizer":
    """Build the library's tokenizer, whose masks have one bit per logit (`vocabulary_size`). Raises CheckpointError."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocabulary_size, eos_token=list(end_tokens) or None)
    except Exception as error:  # the library may raise anything for a malformed file
        raise CheckpointError(f"this model's tokenizer cannot be used for grammars: {_short(error)}") from error


def matcher_of(vocabulary: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Compile a grammar into a matcher. For an invalid grammar, `is_error` and `get_error` of the matcher report it."""
    from llguidance import LLMatcher, LLParserLimits

    limits: Any = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def first_mask(matcher: "LLMatcher") -> bytes:
    """Return the mask of allowed first tokens. Raises ValueError if computing the mask or the forced tokens fails."""
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if not matcher.is_error():
        matcher.compute_ff_tokens()
    if matcher.is_error():
        raise ValueError(matcher.get_error()[:MAX_MESSAGE_CHARS])
    return mask


def follow(matcher: "LLMatcher", vocabulary: "LLTokenizer", within_s: float) -> None:
    """Feed allowed tokens for `within_s` of CPU time. Raises ValueError if the grammar fails or its masks slow down."""
    started_s, end_ids = thread_time(), set(vocabulary.eos_tokens)
    first_tokens = _allowed(matcher.compute_bitmask(), end_ids)
    for first_token in first_tokens[:: max(1, len(first_tokens) // MAX_FIRST_TOKENS)]:
        if thread_time() - started_s > within_s / 2:
            break
        _step(matcher.deep_copy(), first_token)
    times_s: list[float] = []
    token: int | None = first_tokens[len(first_tokens) // 2] if first_tokens else None
    while token is not None and len(times_s) < MAX_TRIAL_TOKENS and thread_time() - started_s < within_s:
        mask_started_s = thread_time()
        mask = _step(matcher, token)
        times_s.append(thread_time() - mask_started_s)
        token = None if matcher.is_stopped() else _near(mask, token, end_ids)  # repeating a token shows growth
    mid, num = len(times_s) // 2, NUM_COMPARED
    latest_s, earlier_s = sum(times_s[-num:]) / num, sum(times_s[mid - num : mid]) / num
    if len(times_s) >= 4 * NUM_COMPARED and latest_s > max(MAX_GROWN_MASK_S, MAX_MASK_GROWTH * earlier_s):
        raise ValueError(
            f"computing the allowed tokens gets slower and slower: {latest_s * 1e3:.2g} ms after {len(times_s)} "
            f"tokens, {earlier_s * 1e3:.2g} ms after {mid}; use no left-recursive rules"
        )


def _step(matcher: "LLMatcher", token: int) -> bytes:
    """Consume a token and return the mask of tokens allowed after it. Raises ValueError if the grammar fails."""
    matcher.consume_token(token)
    mask = b"" if matcher.is_error() or matcher.is_stopped() else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error()[:MAX_MESSAGE_CHARS])
    return mask


def _allowed(mask: bytes, end_ids: set[int]) -> list[int]:
    """Return the first `MAX_READ_TOKENS` tokens of a mask, without EOS tokens."""
    tokens = (8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)
    return list(islice((token for token in tokens if token not in end_ids), MAX_READ_TOKENS))


def _near(mask: bytes, token: int, end_ids: set[int]) -> int | None:
    """Return `token` if it is allowed, otherwise an allowed token with a close id; None if there is none."""
    if mask and mask[token // 8] >> token % 8 & 1:
        return token
    for start in (token // 8, 0):
        tail = mask[start:].lstrip(b"\0")
        if tokens := _allowed(b"\0" * (len(mask) - len(tail)) + tail[:1], end_ids):
            return tokens[0]
    return None


def _short(error: Exception) -> str:
    return str(error)[:MAX_MESSAGE_CHARS]
