"""Tenant, priority and cache group of a request: the same in all dialects."""

import hashlib

from quire.api.access.auth import SHARED, Caller
from quire.api.http.errors import invalid
from quire.api.http.headers import Headers
from quire.api.http.limits import MAX_SALT_CHARS, REQUEST_S
from quire.client.request.requests import RequestOptions
from quire.core.request import RANK, PriorityClass

CLASS_HEADER = "x-vllm-priority"


def request_options(
    caller: Caller,
    headers: Headers,
    tier: PriorityClass = PriorityClass.NORMAL,
    number: int | None = None,
    salt: str | None = None,
) -> RequestOptions:
    """Options of a request beside its parameters. Never more urgent than the key's ceiling."""
    return RequestOptions(
        tenant=caller.tenant,
        priority=max(_requested_class(headers, number, tier), caller.ceiling, key=RANK.__getitem__),
        timeout_s=REQUEST_S,
        cache_group=cache_group(caller, salt),
    )


def _requested_class(headers: Headers, number: int | None, tier: PriorityClass) -> PriorityClass:
    """Lower numbers are more urgent; a header beats the body, a number beats a tier."""
    header = headers.get(CLASS_HEADER)
    level = int(header) if header is not None and _is_whole(header) else number or 0
    if level:
        return PriorityClass.HIGH if level < 0 else PriorityClass.LOW
    return tier


def _is_whole(header: str) -> bool:
    return header.removeprefix("-").isdecimal() and len(header) < 12


def cache_group(caller: Caller, salt: str | None) -> str:
    """Derived here: a client can narrow the group that the operator has configured, and never widen it."""
    own = f"{SHARED}{caller.cache_group}" if caller.cache_group else f"tenant:{caller.tenant}"
    if salt is None:
        return own
    if not 0 < len(salt) <= MAX_SALT_CHARS:
        raise invalid(f"expected 1 to {MAX_SALT_CHARS} characters as cache_salt, got {len(salt)}", "cache_salt")
    return f"{own}/salt:{hashlib.sha256(salt.encode()).hexdigest()}"
