"""`/v1/cache/explain`: a chat or completion body that is not run, only looked up in the cache of whoever sends it.

The body is read, addressed and tokenised by the dialect that would have answered it, so what is explained is exactly
the prompt that would have run, in the cache group it would have run in.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import RootModel

from quire.api.auth import Caller
from quire.api.models import Model, Models, within_context
from quire.api.openai.chat import Chat
from quire.api.openai.completions import Completions
from quire.api.openai.shapes import ChatFields, CompletionFields
from quire.api.questions import Dialect
from quire.api.refusals import invalid
from quire.engine.explaining import Difference, Explanation
from quire.errors import CapacityError, EngineDeadError


class ExplainBody(RootModel[ChatFields | CompletionFields]):
    """`POST /v1/cache/explain`: a body of `/v1/chat/completions` or of `/v1/completions`, with one prompt."""


@dataclass(frozen=True, slots=True)
class Explaining:
    """Explains prompts of one caller."""

    caller: Caller
    charge: Callable[[int], None]
    """Takes a prompt's tokens from the caller's quota, or refuses."""

    async def __call__(self, body: dict[str, Any], models: Models) -> dict[str, Any]:
        """How much of a prompt would be found in the cache, and why the next token would not."""
        dialect: Dialect = Chat() if "messages" in body else Completions()
        fields = await asyncio.to_thread(dialect.parse, body)
        to = dialect.addressed(fields, models, self.caller, {})
        with within_context(to.model):
            question = await dialect.question(fields, to)
        if len(question.prompts) != 1:
            raise invalid(f"one prompt is explained at a time, {len(question.prompts)} given; ask for each", "prompt")
        (ids,) = question.prompts
        self.charge(len(ids))
        found = await explained(to.model, models, ids, to.how["cache_group"])
        return {"object": "cache.explanation", "model": to.model.name, **worded(found)}


async def explained(model: Model, models: Models, ids: list[int], cache_group: str) -> Explanation:
    """Why these tokens are not found; where nothing is, another model of this server may have them."""
    found = await model.open().explain_ids(ids, cache_group)
    if found.reason != "first_seen" or found.num_cached_tokens:
        return found
    for other in models:
        if other is not model and await _has_cached(other, ids, cache_group):
            return replace(found, reason="other_namespace", differs=("model",), other_model=other.name)
    return found


async def _has_cached(model: Model, ids: list[int], cache_group: str) -> bool:
    """Whether a model has the beginning of these very tokens for the same cache group. One that is away has nothing."""
    if model.front is None or max(ids) >= model.front.text.vocabulary_size:
        return False
    with suppress(CapacityError, EngineDeadError):
        return (await model.front.explain_ids(ids, cache_group)).num_cached_tokens > 0
    return False


def worded(found: Explanation) -> dict[str, Any]:
    """An explanation as the API words it."""
    return {
        "prompt_tokens": found.num_prompt_tokens,
        "cached_tokens": found.num_cached_tokens,
        "reason": found.reason,
        "explanation": found.sentence,
        "difference": None if found.difference is None else _difference(found.difference),
        "evicted_seconds_ago": None if found.evicted_s_ago is None else round(found.evicted_s_ago, 3),
        "differs": list(found.differs),
        "other_model": found.other_model,
    }


def _difference(one: Difference) -> dict[str, Any]:
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
