"""A request in the form that all dialects share: model, tenant, priority class and cache group; later its prompts."""

import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from quire.api.access.auth import SHARED, Caller
from quire.api.access.conversation_store import KeptConversation
from quire.api.dialects.body_shapes import GenerationFields
from quire.api.dialects.breakpoints import Breakpoint, prompt_pins
from quire.api.http.errors import invalid
from quire.api.http.limits import MAX_SALT_CHARS, REQUEST_S
from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import ModelEntry, Models
from quire.client.prefix.reuse_log import PromptParts
from quire.client.request.conversation import ChatPrompt, RemovedLine
from quire.client.request.params import SamplingParams
from quire.client.request.requests import RequestOptions
from quire.core.request import RANK, PriorityClass, PromptPin

TIERS = {"priority": PriorityClass.HIGH, "flex": PriorityClass.LOW}
CLASS_HEADER = "x-vllm-priority"
DEFAULT_PARAMS = SamplingParams()


class ResolvedRequest(RequestOptions, frozen=True, kw_only=True):
    """A request before its submission. Model and options are from the body; the dialect's `render` adds the prompts."""

    model: ModelEntry
    is_streamed: bool = False
    prompts: Sequence[list[int]] = ()
    params: SamplingParams = DEFAULT_PARAMS
    parts: Sequence[PromptParts] = ()
    """Positions of the client's messages and tools in each prompt; empty for raw prompts."""
    removed: Sequence[RemovedLine] = ()
    """Lines that were removed from system texts, for a response header."""
    conversation: KeptConversation | None = None
    """Stored with the answer before the last bytes are sent, so that clients can continue a complete response."""
    compared_id: str | None = None
    """The id of an earlier response, with whose prompt this one is compared."""
    effort: str = ""
    """The requested reasoning effort, to name the cause of a difference between the prompts."""
    breakpoints: Sequence[Breakpoint] = ()
    """Where the client wants the prompt kept, and how long."""

    def with_chat(
        self, chat: ChatPrompt, params: SamplingParams, removed: Sequence[RemovedLine], stored: KeptConversation | None
    ) -> "ResolvedRequest":
        """Return a copy with the rendered conversation as its only prompt."""
        prompts, parts, params = [chat.ids], [chat.parts], chat.apply_to(params)
        return replace(self, prompts=prompts, params=params, parts=parts, removed=removed, conversation=stored)

    @property
    def pins(self) -> tuple[PromptPin, ...]:
        """The prefixes of the rendered prompt to keep."""
        if not self.breakpoints or len(self.prompts) != 1 or len(self.parts) != 1:
            return ()
        return prompt_pins(self.breakpoints, self.parts[0], len(self.prompts[0]))


def resolve_request(fields: GenerationFields, models: Models, caller: Caller, record: RequestRecord) -> ResolvedRequest:
    """Return a request with the body's model, and its tenant and priority, capped at the key's ceiling. Cheap, because
    a full queue may refuse the request right after."""
    model = models.named(fields.model)
    tier, number, salt = fields.service
    return ResolvedRequest(
        model=model,
        is_streamed=bool(fields.stream),
        tenant=caller.tenant,
        priority=max(_requested_class(record, number, tier), caller.ceiling, key=RANK.__getitem__),
        timeout_s=REQUEST_S,
        cache_group=_cache_group(caller, salt),
        explain=True,
        report_progress=bool(fields.stream and fields.return_progress),
        has_reservation=record.has_reservation,
        breakpoints=fields.breakpoints,
        compared_id=fields.compared_id,
        effort=fields.effort,
    )


def _requested_class(record: RequestRecord, number: int | None, tier: str | None) -> PriorityClass:
    """Return the requested class. Lower numbers are more urgent. A header overrides the body, a number the tier."""
    header = record.headers.get(CLASS_HEADER)
    level = int(header) if header is not None and _is_integer(header) else number or 0
    if level:
        return PriorityClass.HIGH if level < 0 else PriorityClass.LOW
    return TIERS.get(tier or "", PriorityClass.NORMAL)


def _is_integer(header: str) -> bool:
    return header.removeprefix("-").isdecimal() and len(header) < 12


def _cache_group(caller: Caller, salt: str | None) -> str:
    """Return the cache group. A client's salt can narrow the group that the operator configured, never widen it."""
    group = f"{SHARED}{caller.cache_group}" if caller.cache_group else f"tenant:{caller.tenant}"
    if salt is None:
        return group
    if not 0 < len(salt) <= MAX_SALT_CHARS:
        raise invalid(f"expected 1 to {MAX_SALT_CHARS} characters as cache_salt, got {len(salt)}", "cache_salt")
    return f"{group}/salt:{hashlib.sha256(salt.encode()).hexdigest()}"
