"""An explanation as the API sends it: requested alone, of a request that ran, or in the usage of a response."""

from typing import Any

from quire.api.access.auth import SHARED
from quire.client.prefix.explanation import Difference, Explanation
from quire.client.prefix.reuse_log import PromptPart, ReuseRecord


def explanation_body(found: Explanation, cache_group: str) -> dict[str, Any]:
    """An explanation as the API sends it. What several keys share may be another's text: then its position alone."""
    is_own = not cache_group.startswith(SHARED)
    return {
        "prompt_tokens": found.num_prompt_tokens,
        "cached_tokens": found.num_cached_tokens,
        "reason": found.reason,
        "explanation": found.sentence,
        "difference": None if found.difference is None else _difference(found.difference, is_own=is_own),
        "evicted_seconds_ago": None if found.evicted_s_ago is None else round(found.evicted_s_ago, 3),
        "differs": list(found.differs),
        "other_model": found.other_model,
    }


def part_body(part: PromptPart | None) -> dict[str, Any] | None:
    """Where a difference falls."""
    return None if part is None else {"kind": part.kind, "index": part.index, "name": part.name}


def reuse_body(record: ReuseRecord, *, is_own: bool) -> dict[str, Any]:
    """The record of one prompt. Of another tenant's, reasons and numbers alone: no text, and no token."""
    body = explanation_body(record.explanation, record.cache_group)
    found, part = record.explanation.difference, part_body(record.part)
    if not is_own and found is not None:
        body["difference"] = _difference(found, is_own=False)
    if not is_own and part is not None:
        part["name"] = None
    return {
        **body,
        "cached_tokens": record.num_cached_tokens,
        "part": part,
        "lost_tokens": record.num_lost_tokens,
    }


def _difference(one: Difference, *, is_own: bool) -> dict[str, Any]:
    if not is_own:
        return {"position": one.position}
    return {
        "position": one.position,
        "token_id": one.token_id,
        "token": one.token,
        "cached_token_id": one.cached_token_id,
        "cached_token": one.cached_token,
        "before": one.before,
        "after": one.after,
        "cached_after": one.cached_after,
    }
