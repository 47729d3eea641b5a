"""From a caller's arguments to a request the core can queue."""

import secrets
from math import isfinite
from time import monotonic
from typing import TypedDict, Unpack
from uuid import uuid4

from quire.client.request.params import SamplingParams
from quire.client.request.text_model import TextModel
from quire.core.request import Continuation, PriorityClass, Request
from quire.errors import InvalidParameterError
from quire.text.text_work import current_work

SEED_BITS = 63
DEFAULT_TENANT = "default"


class RequestOptions(TypedDict, total=False):
    """Options of a request beside its prompt and parameters."""

    tenant: str
    priority: PriorityClass | str
    """`high`, `normal` or `low`."""
    timeout_s: float | None
    """Seconds from now after which it ends with what it has."""
    cache_group: str
    """Requests of one group share blocks; the tenant unless set."""
    adapter: str
    """The LoRA to answer with; empty is the model itself."""
    explain: bool
    """Whether its completion has the reason why the next token was not found in the cache."""
    has_reservation: bool
    """Its tenant was promised a place at this time: it is let in whatever waits."""


def make_request(
    model: TextModel, ids: list[int], params: SamplingParams, **options: Unpack[RequestOptions]
) -> Request:
    """A request with an id and a seed of its own. Without a client's seed one is drawn and recorded.

    Checks every token of every list: long ones are made beside the event loop.
    """
    unknown = sorted(set(options) - RequestOptions.__annotations__.keys())
    if unknown:
        raise InvalidParameterError(
            f"unknown request option {unknown[0]!r}; expected one of {', '.join(RequestOptions.__annotations__)}",
            unknown[0],
        )
    now_s = monotonic()
    tenant, timeout_s = (
        checked_name("tenant", options.get("tenant", DEFAULT_TENANT)),
        _timeout_s(options.get("timeout_s")),
    )
    return Request(
        request_id=uuid4().hex,
        prompt=tuple(ids),
        namespace=model.namespaces[
            checked_name("cache_group", options.get("cache_group", tenant)), _adapter(options.get("adapter", ""))
        ],
        arrival_s=now_s,
        params=model.settle(params, len(ids)),
        seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
        tenant=tenant,
        priority=_priority(options.get("priority", PriorityClass.NORMAL)),
        continuations=tuple(Continuation(index) for index in range(params.n)),
        deadline_s=None if timeout_s is None else now_s + timeout_s,
        # For log-probabilities of its prompt all of it is computed: no block is searched.
        is_explained=bool(options.get("explain", False)) and params.prompt_logprobs is None,
        has_reservation=options.get("has_reservation", False),
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
