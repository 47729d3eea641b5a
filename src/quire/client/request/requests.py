"""Build a request for the core's queue from a caller's arguments."""

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
from quire.text.text_work import take_service_tokens

SEED_BITS = 63
DEFAULT_TENANT = "default"


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a request other than its prompt and its sampling parameters."""

    tenant: str = DEFAULT_TENANT
    priority: PriorityClass = PriorityClass.NORMAL
    """The class; callers pass `high`, `normal` or `low`."""
    timeout_s: float | None = None
    """Seconds from now; at the deadline the request ends with the output produced so far. None: no deadline."""
    cache_group: str | None = None
    """Requests with the same cache group share cached blocks. None: the tenant's own group."""
    adapter: str = ""
    """Name of the LoRA adapter to use; empty: the base model."""
    explain: bool = False
    """Whether the completion reports why the prompt's prefix-cache hit ended where it did."""
    report_progress: bool = False
    """Whether `Reply.progress` is updated while the prompt is computed."""
    has_reservation: bool = False
    """Whether the request is a retry at the time of an earlier Retry-After; it is admitted even if queues are full."""


DEFAULT_OPTIONS = RequestOptions()


def checked_options(options: Mapping[str, Any]) -> RequestOptions:
    """Validate a caller's options. Raises InvalidParameterError for the first unknown or invalid option."""
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
    """Build a request with a new id. If the client set no seed, a random one is drawn and recorded.

    Every token id in `params` is checked, so requests with long lists must be built in a thread, not on the event loop.
    """
    now_s, tenant, timeout_s = monotonic(), options.tenant, options.timeout_s
    max_tokens = max(1, model.max_sequence_tokens - len(ids))
    return Request(
        request_id=uuid4().hex,
        prompt=tuple(ids),
        namespace=model.namespace(tenant if options.cache_group is None else options.cache_group, options.adapter),
        arrival_s=now_s,
        params=params.resolve(model.defaults, model.eos_token_ids, model.vocabulary_size, max_tokens),
        seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
        tenant=tenant,
        priority=options.priority,
        continuations=tuple(Continuation(index) for index in range(params.n)),
        deadline_s=None if timeout_s is None else now_s + timeout_s,
        # With prompt log-probabilities the cache is not searched, so there is no cache miss to explain.
        is_explained=options.explain and params.prompt_logprobs is None,
        reports_progress=options.report_progress,
        has_reservation=options.has_reservation,
        grammar=None if params.grammar is None else model.validate_grammar(params.grammar),
        has_stop_texts=bool(params.stop),
        work_tokens=take_service_tokens(),  # the cost of this thread's work on the request so far
    )


def _priority(value: object) -> PriorityClass:
    try:
        return PriorityClass(value)
    except ValueError:
        names = ", ".join(priority.value for priority in PriorityClass)
        raise InvalidParameterError(f"expected priority to be one of {names}, got {value!r}", "priority") from None


def checked_name(name: str, value: object) -> str:
    """Return a valid name of a tenant, cache group or adapter; raises InvalidParameterError otherwise."""
    if not isinstance(value, str) or not value or not _is_encodable(value):
        message = f"expected {name} to be a non-empty string without lone surrogates, got {value!r}"
        raise InvalidParameterError(message, name)
    return value


def _adapter(value: object) -> str:
    return "" if value == "" else checked_name("adapter", value)


def _is_encodable(value: str) -> bool:
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
    "report_progress": bool,
    "has_reservation": bool,
}
"""The validator of each option, which returns the converted value."""
