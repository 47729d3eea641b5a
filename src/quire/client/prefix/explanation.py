"""Explain to a client why its prompt was not cached: the position, the tokens and the surrounding text.

Pure: converts the core's `Divergence` and the prompt's tokens to an `Explanation`. The cached text shown is from a
block of the same cache group, so the client may read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from quire.core.digests import Namespace
from quire.core.divergence import Divergence, MissReason
from quire.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 16
"""Number of tokens shown before a difference, and of tokens shown from the difference on."""
UNKNOWN = "unknown"
"""The reason if the engine does not report a reason, or did not search the cache."""
REPORTED_FIELDS = {"model": "model", "adapter": "adapter"}
"""Fields of `Namespace` that are reported to clients by name; all other fields are reported as `format`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a prompt and the most similar cached block."""

    position: int
    """Position of the first different token, counted from 0."""
    token_id: int
    token: str
    cached_token_id: int
    cached_token: str
    before: str
    """The text before the difference, equal in the prompt and the cached block."""
    after: str
    """The prompt's text from the first different token on."""
    cached_after: str
    """The cached text from the first different token to the end of its block."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How many tokens of a prompt are cached, and why the next token is not."""

    num_prompt_tokens: int
    num_cached_tokens: int
    reason: str
    """`computing`, `too_short`, `state_missing`, `evicted`, `diverged`, `other_namespace`, `first_seen`, `unknown`."""
    difference: Difference | None = None
    """Reason `diverged`: the position and the texts."""
    evicted_s_ago: float | None = None
    """Reason `evicted`: seconds since the eviction."""
    differs: tuple[str, ...] = ()
    """Reason `other_namespace`: which of `model`, `adapter` and `format` the cached copy differs in."""
    other_model: str | None = None
    """Reason `other_namespace`: the model for which the tokens are cached, if this server has it."""

    @property
    def position(self) -> int | None:
        """The position of the first difference; None unless the reason is `diverged`."""
        return None if self.difference is None else self.difference.position

    @property
    def sentence(self) -> str:
        if self.reason == UNKNOWN:
            return "unknown: the engine that computed the prompt did not report it, or did not search the cache"
        return _SENTENCES[MissReason(self.reason)].format(
            rest=self.num_prompt_tokens - self.num_cached_tokens,
            next=self.num_cached_tokens,
            position=self.position,
            ago=_duration(self.evicted_s_ago or 0.0),
            fields=" and ".join(self.differs),
            model=f" ({self.other_model})" if self.other_model else "",
        )


_SENTENCES = {
    MissReason.COMPUTING: "the block from token {next} on is being computed by another request right now",
    MissReason.TOO_SHORT: "nothing is missing: only whole blocks are cached and the last token is always computed, "
    "{rest} tokens here",
    MissReason.STATE_MISSING: "the blocks from token {next} on are cached, but not the recurrent state behind them, "
    "which was evicted or never kept",
    MissReason.EVICTED: "the block from token {next} on was cached and was evicted {ago} ago",
    MissReason.DIVERGED: "the prompt differs from what is cached at token {position}",
    MissReason.OTHER_NAMESPACE: "the same tokens are cached, but for another {fields}{model}",
    MissReason.FIRST_SEEN: "no prompt that continues like this from token {next} on was computed recently",
}


def explanation(tokenizer: Tokenizer, namespace: Namespace, prompt: Sequence[int], miss: Divergence) -> Explanation:
    """Convert the core's `Divergence` for a prompt to an `Explanation` for clients."""
    return Explanation(
        num_prompt_tokens=len(prompt),
        num_cached_tokens=miss.num_cached_tokens,
        reason=miss.reason.value,
        difference=_difference(tokenizer, prompt, miss),
        evicted_s_ago=miss.evicted_s_ago,
        differs=() if miss.other_namespace is None else namespace_differences(namespace, miss.other_namespace),
    )


def namespace_differences(a: Namespace, b: Namespace) -> tuple[str, ...]:
    """Return which of `model`, `adapter` and `format` differ between two namespaces of one cache group."""
    names = [field.name for field in fields(Namespace) if getattr(a, field.name) != getattr(b, field.name)]
    return tuple(dict.fromkeys(REPORTED_FIELDS.get(name, "format") for name in names))


def decoded_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decode tokens from the middle of a text. Characters cut at either end become U+FFFD."""
    return b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")


def _difference(tokenizer: Tokenizer, prompt: Sequence[int], miss: Divergence) -> Difference | None:
    position = miss.first_different_token
    if position is None:
        return None
    cached = miss.sibling_token_ids[position - miss.num_cached_tokens :]
    return Difference(
        position=position,
        token_id=prompt[position],
        token=decoded_text(tokenizer, prompt[position : position + 1]),
        cached_token_id=cached[0],
        cached_token=decoded_text(tokenizer, cached[:1]),
        before=decoded_text(tokenizer, prompt[max(0, position - CONTEXT_TOKENS) : position]),
        after=decoded_text(tokenizer, prompt[position : position + CONTEXT_TOKENS]),
        cached_after=decoded_text(tokenizer, cached[:CONTEXT_TOKENS]),
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
