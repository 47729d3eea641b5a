"""From what a caller says to a request the core can queue."""

import secrets
from time import monotonic
from typing import TypedDict, Unpack
from uuid import uuid4

from quire.core.request import Continuation, PriorityClass, Request
from quire.engine.opening import OpenedModel
from quire.engine.parameters import SamplingParams

SEED_BITS = 63


class How(TypedDict, total=False):
    """What may be said of a request beside what it asks."""

    tenant: str
    priority: PriorityClass
    timeout_s: float | None
    """Seconds from now after which it ends with what it has."""
    cache_group: str
    """Who may share its blocks; the tenant unless stated."""


def make_request(model: OpenedModel, ids: list[int], params: SamplingParams, **how: Unpack[How]) -> Request:
    """A request with an id and a seed of its own. Without a client's seed one is drawn and recorded."""
    now_s = monotonic()
    tenant, timeout_s = how.get("tenant", "default"), how.get("timeout_s")
    return Request(
        request_id=uuid4().hex,
        prompt=tuple(ids),
        namespace=model.engine.namespace(how.get("cache_group", tenant)),
        arrival_s=now_s,
        params=model.text.settle(params, len(ids)),
        seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
        tenant=tenant,
        priority=how.get("priority", PriorityClass.NORMAL),
        continuations=tuple(Continuation(index) for index in range(params.n)),
        deadline_s=None if timeout_s is None else now_s + timeout_s,
    )
