"""Explanations of cache misses as JSON: for the explain route, for a past request, and for usage in a response."""

from dataclasses import asdict
from typing import Any

from quire.api.access.auth import SHARED
from quire.client.prefix.explanation import Explanation
from quire.client.prefix.reuse_log import PromptPart, ReuseRecord


def explanation_body(found: Explanation, cache_group: str) -> dict[str, Any]:
    """Return the JSON object. In a shared cache group the difference has only its position, without tenants' text."""
    difference, is_own = found.difference, not cache_group.startswith(SHARED)
    shown = None if difference is None else asdict(difference) if is_own else {"position": difference.position}
    return {
        "prompt_tokens": found.num_prompt_tokens,
        "cached_tokens": found.num_cached_tokens,
        "reason": found.reason,
        "explanation": found.sentence,
        "difference": shown,
        "evicted_seconds_ago": None if found.evicted_s_ago is None else round(found.evicted_s_ago, 3),
        "differs": list(found.differs),
        "other_model": found.other_model,
    }


def part_body(part: PromptPart | None) -> dict[str, Any] | None:
    """Return a prompt part as JSON."""
    return None if part is None else asdict(part)


def reuse_body(record: ReuseRecord, *, is_own: bool) -> dict[str, Any]:
    """Return the record of one prompt; for another tenant, only reasons and numbers, without text or tokens."""
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
