"""Explanations of cache misses as JSON: for the explain route, for a past request, and for usage in a response."""

from dataclasses import asdict
from typing import Any

from quire.api.access.auth import SHARED
from quire.client.prefix.explanation import Explanation
from quire.client.prefix.reuse_log import PromptPart, ReuseRecord


def explanation_body(explanation: Explanation, cache_group: str) -> dict[str, Any]:
    """Return an explanation as JSON. For a shared cache group, the difference has no text, only its position."""
    difference, is_private = explanation.difference, not cache_group.startswith(SHARED)
    public_part = None if difference is None else {"position": difference.position}
    return {
        "prompt_tokens": explanation.num_prompt_tokens,
        "cached_tokens": explanation.num_cached_tokens,
        "reason": explanation.reason,
        "explanation": explanation.sentence,
        "difference": asdict(difference) if difference is not None and is_private else public_part,
        "evicted_seconds_ago": None if explanation.evicted_s_ago is None else round(explanation.evicted_s_ago, 3),
        "differs": list(explanation.differs),
        "other_model": explanation.other_model,
    }


def part_body(part: PromptPart | None) -> dict[str, Any] | None:
    """Return a prompt part as JSON."""
    return None if part is None else asdict(part)


def miss_body(record: ReuseRecord | None) -> dict[str, Any] | None:
    """Return why the prompt's next token was not cached at admission; None until that is known."""
    if record is None:
        return None
    explanation = record.explanation
    return {
        "cached_tokens": explanation.num_cached_tokens,
        "reason": explanation.reason,
        "position": explanation.position,
        "part": part_body(record.part),
        "lost_tokens": record.num_lost_tokens,
    }


def reuse_body(record: ReuseRecord, *, is_own: bool) -> dict[str, Any]:
    """Return the record of one prompt as JSON; unless the caller's tenant sent it, without text and tokens."""
    body = explanation_body(record.explanation, record.cache_group if is_own else SHARED)
    part = part_body(record.part)
    if not is_own and part is not None:
        part["name"] = None
    return {
        **body,
        "cached_tokens": record.num_cached_tokens,
        "part": part,
        "lost_tokens": record.num_lost_tokens,
    }
