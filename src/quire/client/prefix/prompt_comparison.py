"""Compare a prompt with an earlier one that its client names by the id of its answer: was the earlier prompt's prefix
reused, and if not, which change of the prompt was the cause? Pure.

    earlier   b b b b b b b b b p         b: full blocks, which the new prompt could have reused; p: partly filled
    new       b b b X b b b b b b b p
              └─┬─┘ └────┬────┘
              cached   missed: tokens of the earlier prompt's full blocks that had to be computed again

There is a cause only if tokens were missed, and it is found where the tokens first differ. What a client changes
without changing a token is a hit. Parts of the prompts only name the place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from quire.client.prefix.kept_prompts import MAX_PROMPT_TOKENS, NamedPrompt
from quire.client.prefix.prompt_alignment import WIDTH, num_common
from quire.client.prefix.reuse_log import PromptPart, PromptParts, ReuseRecord
from quire.core.memory.block_table import max_hit_blocks
from quire.text.chat.prompt_parts import PartKind, PartSpan


class ComparisonResult(Enum):
    """The result of a comparison; all but the first three are causes of a miss."""

    HIT = "hit"
    """All full blocks of the earlier prompt were reused, as far as the new prompt reaches."""
    NOT_FOUND = "not_found"
    """No prompt with this answer id is kept for the tenant."""
    UNAVAILABLE = "unavailable"
    """Tokens were missed for a reason other than a change of the client's prompt, for example an eviction."""
    MODEL = "model"
    SYSTEM = "system"
    TOOLS = "tools"
    MESSAGES = "messages"
    EFFORT = "effort"
    """The template wrote another text for another reasoning effort."""
    INPUT = "input"
    """The prompts differ, and it is not known in which part."""


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """A prompt compared with an earlier one."""

    verdict: ComparisonResult
    num_missed_tokens: int = 0
    """Tokens that would have been cached if the prompt had begun like the earlier one."""
    num_common_tokens: int = 0
    """Length of the common prefix of both prompts."""


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """The new prompt."""

    record: ReuseRecord
    tokens: bytes
    block_size: int
    parts: PromptParts | None = None
    effort: str = ""


def compare_prompts(ours: ComparedPrompt, named: NamedPrompt | None) -> PromptComparison:
    """Compare a prompt, whose cache lookup is known, with the earlier prompt; None: it was not found."""
    if named is None:
        return PromptComparison(ComparisonResult.NOT_FOUND)
    record, block_size, num_theirs = ours.record, ours.block_size, named.name.num_tokens
    max_blocks = min(num_theirs // block_size, max_hit_blocks(len(ours.tokens) // WIDTH, block_size))
    num_missed = max_blocks * block_size - record.num_cached_tokens
    num_shared = min(num_common(ours.tokens, named.prompt.tokens), num_theirs)
    if num_missed <= 0:
        return PromptComparison(ComparisonResult.HIT, 0, num_shared)
    if record.model != named.scope.model:
        verdict = ComparisonResult.MODEL
    elif num_shared >= min(max_blocks * block_size, MAX_PROMPT_TOKENS) or not _reached(ours, named, num_shared):
        verdict = ComparisonResult.UNAVAILABLE
    else:
        verdict = _change_at(ours, named, num_shared)
    return PromptComparison(verdict, num_missed, num_shared)


def _reached(ours: ComparedPrompt, named: NamedPrompt, num_shared: int) -> bool:
    """Return whether all full blocks before the first different token were cached, so that the difference is the cause.
    A recurrent state is kept at few positions, so it may be missing before a difference without an eviction."""
    record = ours.record
    if record.cache_group != named.scope.cache_group:
        return False
    num_before = num_shared // ours.block_size * ours.block_size
    return record.num_cached_tokens >= num_before or record.explanation.reason == "state_missing"


CHANGES: Mapping[PartKind, ComparisonResult] = {"system": ComparisonResult.SYSTEM, "tool": ComparisonResult.TOOLS}
PartBytes = Mapping[PromptPart, bytes]
"""The tokens of each part of a prompt."""


def _change_at(ours: ComparedPrompt, named: NamedPrompt, position: int) -> ComparisonResult:
    """Return the cause of the first different token, at this position.

    It is the part with this token if its text differs. If the template wrote the token, it did so for another effort,
    or for the sake of a part that only one prompt has, or that has another text in the other prompt.
    """
    theirs, num_theirs = named.prompt, named.name.num_tokens
    if ours.parts is None or theirs.parts is None:
        return ComparisonResult.INPUT
    our_span, their_span = ours.parts.at_or_after(position), theirs.parts.at_or_after(position)
    if their_span is not None and their_span.first >= num_theirs:
        their_span = None  # it belongs to a longer prompt that replaced the named one
    spans = sorted((span for span in (our_span, their_span) if span is not None), key=lambda span: span.first)
    parts = [span.part for span in spans if span.part is not None]
    if len(parts) < len(spans):
        return ComparisonResult.INPUT
    is_other_effort = ours.effort != named.name.effort
    is_between_parts = all(span.first > position for span in spans)
    if is_other_effort and is_between_parts and len(parts) > 1 and parts[0] == parts[1]:
        return ComparisonResult.EFFORT
    our_texts, their_texts = _texts(ours.tokens, ours.parts), _texts(theirs.tokens, theirs.parts, num_theirs)
    for kind in dict.fromkeys([part.kind for part in parts] + list(CHANGES) * is_between_parts):
        if kind in CHANGES and _of_kind(our_texts, kind) != _of_kind(their_texts, kind):
            return CHANGES[kind]
    if any(our_texts.get(part) != text for part, text in their_texts.items()) or _is_longer(our_span, position):
        return ComparisonResult.MESSAGES
    return ComparisonResult.EFFORT if is_other_effort else ComparisonResult.UNAVAILABLE


def _is_longer(our_span: PartSpan | None, position: int) -> bool:
    """Return whether the difference is inside a part of our prompt, whose text the other prompt ends before."""
    return our_span is not None and our_span.first < position


def _texts(tokens: bytes, parts: PromptParts, end: int | None = None) -> PartBytes:
    """Return the tokens of each part that begins before token `end`."""
    texts = dict[PromptPart, bytes]()
    for span in parts:
        if span.part is not None and (end is None or span.first < end):
            text = tokens[span.first * WIDTH : span.end * WIDTH]
            texts[span.part] = texts.get(span.part, b"") + text
    return texts


def _of_kind(texts: PartBytes, kind: PartKind) -> PartBytes:
    return {part: text for part, text in texts.items() if part.kind == kind}
