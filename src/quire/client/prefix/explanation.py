"""Why a prompt is not found in the cache, for the client that wrote it: positions, tokens and the text around them.

Pure: what the core found (`Divergence`) and the prompt's own tokens in, an `Explanation` out. The text of the cached
side is that of a block of the same cache group, so the client that sent the prompt may see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from quire.core.digests import Namespace
from quire.core.divergence import Divergence, MissReason
from quire.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 16
"""How many tokens before a difference are shown, and how many from it on."""
UNKNOWN = "unknown"
"""The reason where the engine that computed the prompt does not report it, or searched for no block."""
PARTS = {"model": "model", "adapter": "adapter"}
"""Fields of a namespace that have a name of their own for clients; all others are its format."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt parts from what is cached."""

    position: int
    """Of the first token that differs, counted from 0."""
    token_id: int
    token: str
    cached_token_id: int
    cached_token: str
    before: str
    """The text that both have just before it."""
    after: str
    """The prompt's text from the different token on."""
    cached_after: str
    """The cached text from the different token on, to the end of its block."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much of a prompt is cached, and why the next token is not."""

    num_prompt_tokens: int
    num_cached_tokens: int
    reason: str
    """`computing`, `too_short`, `state_missing`, `evicted`, `diverged`, `other_namespace`, `first_seen`; `unknown`."""
    difference: Difference | None = None
    """diverged: where, and what stands there."""
    evicted_s_ago: float | None = None
    """evicted: how long ago."""
    differs: tuple[str, ...] = ()
    """other_namespace: what is different where the same tokens are cached: `model`, `adapter`, `format`."""
    other_model: str | None = None
    """other_namespace: the model they are cached for, if it is another one of this server."""

    @property
    def position(self) -> int | None:
        """Where it diverged; None for all other reasons."""
        return None if self.difference is None else self.difference.position

    @property
    def sentence(self) -> str:
        if self.reason == UNKNOWN:
            return "unknown: the engine that computed the prompt did not report it, or did not search the cache"
        return _SENTENCES[MissReason(self.reason)].format(
            rest=self.num_prompt_tokens - self.num_cached_tokens,
            next=self.num_cached_tokens,
            at=self.position,
            ago=_duration(self.evicted_s_ago or 0.0),
            what=" and ".join(self.differs),
            where=f" ({self.other_model})" if self.other_model else "",
        )


_SENTENCES = {
    MissReason.COMPUTING: "the block from token {next} on is being computed by another request right now",
    MissReason.TOO_SHORT: "nothing is missing: only whole blocks are cached and the last token is always computed, "
    "{rest} tokens here",
    MissReason.STATE_MISSING: "the blocks from token {next} on are cached, but not the recurrent state behind them, "
    "which was evicted or never kept",
    MissReason.EVICTED: "the block from token {next} on was cached and was evicted {ago} ago",
    MissReason.DIVERGED: "the prompt differs from what is cached at token {at}",
    MissReason.OTHER_NAMESPACE: "the same tokens are cached, but for another {what}{where}",
    MissReason.FIRST_SEEN: "no prompt that continues like this from token {next} on was computed recently",
}


def explanation(tokenizer: Tokenizer, namespace: Namespace, prompt: Sequence[int], found: Divergence) -> Explanation:
    """What the core found, as clients read it."""
    return Explanation(
        num_prompt_tokens=len(prompt),
        num_cached_tokens=found.num_cached_tokens,
        reason=found.reason.value,
        difference=_difference(tokenizer, prompt, found),
        evicted_s_ago=found.evicted_s_ago,
        differs=() if found.other_namespace is None else differences(namespace, found.other_namespace),
    )


def differences(ours: Namespace, other: Namespace) -> tuple[str, ...]:
    """Which of model, adapter and format two namespaces of one cache group differ in."""
    changed = [PARTS.get(one.name, "format") for one in fields(Namespace) if _differs(one.name, ours, other)]
    return tuple(dict.fromkeys(changed))


def _differs(name: str, ours: Namespace, other: Namespace) -> bool:
    return bool(getattr(ours, name) != getattr(other, name))


def decoded_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """As it stands in the middle of a text. Where it is cut, half characters read as U+FFFD."""
    return b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")


def _difference(tokenizer: Tokenizer, prompt: Sequence[int], found: Divergence) -> Difference | None:
    at = found.first_different_token
    if at is None:
        return None
    cached = found.sibling_token_ids[at - found.num_cached_tokens :]
    return Difference(
        position=at,
        token_id=prompt[at],
        token=decoded_text(tokenizer, prompt[at : at + 1]),
        cached_token_id=cached[0],
        cached_token=decoded_text(tokenizer, cached[:1]),
        before=decoded_text(tokenizer, prompt[max(0, at - CONTEXT_TOKENS) : at]),
        after=decoded_text(tokenizer, prompt[at : at + CONTEXT_TOKENS]),
        cached_after=decoded_text(tokenizer, cached[:CONTEXT_TOKENS]),
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
