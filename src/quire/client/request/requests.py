"""From a caller's arguments to a request the core can queue."""

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from time import monotonic
from typing import Any
from uuid import uuid4

import msgspec

from quire.client.request.params import SamplingParams
from quire.client.request.text_model import TextModel
from quire.core.request import Continuation, PriorityClass, Request
from quire.errors import InvalidParameterError
from quire.text.text_work import current_work

SEED_BITS = 63
DEFAULT_TENANT = "default"


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a request beside its prompt and parameters."""

    tenant: str = DEFAULT_TENANT
    priority: PriorityClass = PriorityClass.NORMAL
    """Callers may write `high`, `normal` or `low`."""
    timeout_s: float | None = None
    """Seconds from now after which it ends with what it has."""
    cache_group: str | None = None
    """Requests of one group share blocks; None: the tenant's own."""
    adapter: str = ""
    """The LoRA to answer with; empty is the model itself."""
    explain: bool = False
    """Whether its completion has the reason why the next token was not found in the cache."""
    has_reservation: bool = False
    """Its tenant was promised a place at this time: it is let in whatever waits."""


DEFAULT_OPTIONS = RequestOptions()


def checked_options(options: Mapping[str, Any]) -> RequestOptions:
    """Options as a caller wrote them. Raises InvalidParameterError for the first that breaks its rule."""
    unknown = sorted(set(options) - set(RequestOptions.__struct_fields__))
    if unknown:
        raise InvalidParameterError(
            f"unknown request option {unknown[0]!r}; expected one of {', '.join(RequestOptions.__struct_fields__)}",
            unknown[0],
        )
    return RequestOptions(**{name: CHECKS[name](value) for name, value in options.items()})


def make_request(
    model: TextModel, ids: list[int], params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
) -> Request:
    """A request with an id and a seed of its own. Without a client's seed one is drawn and recorded.

    Checks every token of every list: long ones are made beside the event loop.
    """
    now_s, tenant, timeout_s = monotonic(), options.tenant, options.timeout_s
    return Request(
        request_id=uuid4().hex,
        prompt=tuple(ids),
        namespace=model.namespaces[tenant if options.cache_group is None else options.cache_group, options.adapter],
        arrival_s=now_s,
        params=model.settle(params, len(ids)),
        seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
        tenant=tenant,
        priority=options.priority,
        continuations=tuple(Continuation(index) for index in range(params.n)),
        deadline_s=None if timeout_s is None else now_s + timeout_s,
        # For log-probabilities of its prompt all of it is computed: no block is searched.
        is_explained=options.explain and params.prompt_logprobs is None,
        has_reservation=options.has_reservation,
        grammar=None if params.grammar is None else model.checked(params.grammar),
        has_stop_texts=bool(params.stop),
        work_tokens=current_work().take_service_tokens(),
    )


def _priority(value: object) -> PriorityClass:
    try:
        return PriorityClass(value)
    except ValueError:
        words = ", ".join(one.value for one in PriorityClass)
        raise InvalidParameterError(f"expected priority to be one of {words}, got {value!r}", "priority") from None


def checked_name(what: str, value: object) -> str:
    """The name of a tenant, a cache group or an adapter, or an error with what it must be."""
    if not isinstance(value, str) or not value or not _is_text(value):
        message = f"expected {what} to be a non-empty text of complete characters, got {value!r}"
        raise InvalidParameterError(message, what)
    return value


def _adapter(value: object) -> str:
    return "" if value == "" else checked_name("adapter", value)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _timeout_s(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value) or value < 0:
        raise InvalidParameterError(f"expected timeout_s to be 0 seconds or more, got {value!r}", "timeout_s")
    return float(value)


CHECKS: Mapping[str, Callable[[object], Any]] = {
    "tenant": partial(checked_name, "tenant"),
    "priority": _priority,
    "timeout_s": _timeout_s,
    "cache_group": partial(checked_name, "cache_group"),
    "adapter": _adapter,
    "explain": bool,
    "has_reservation": bool,
}
"""What each option of a caller must be."""
