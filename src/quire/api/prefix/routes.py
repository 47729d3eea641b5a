"""`GET /v1/cache/warnings`: which lines repeatedly keep a tenant's prompts out of the cache.

A tenant gets its own lines. An admin key gets what all tenants lost, and no line of theirs: those are on the operator's
own socket.
"""

from time import monotonic
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.http.errors import ApiError, shortened
from quire.api.prefix.explanation_json import reuse_body
from quire.api.prefix.warnings import warnings_response


async def cache_warnings(request: Request) -> Response:
    """Which lines repeatedly keep prompts out of the cache, and what that cost in the last hour."""
    admission: Admission = request.app.state.admission
    caller: Caller = request.scope["quire.caller"]
    guard, now_s = admission.prefix_guard, monotonic()
    found = guard.warnings(now_s, tenant=caller.tenant)
    if caller.is_admin:
        found += [one for one in guard.warnings(now_s) if one.tenant != caller.tenant]
    return warnings_response(found)


async def retrieve_reuse(request: Request, request_id: str) -> Response:
    """How much of a request's prompts was in the cache when it began to run, and why no more."""
    admission: Admission = request.app.state.admission
    body = _found(admission, request.scope["quire.caller"], request_id)
    return Response(msgspec.json.encode(body), media_type="application/json")


def _found(admission: Admission, caller: Caller, request_id: str) -> dict[str, Any]:
    now_s = monotonic()
    admission.reuse_log.forget_old(now_s)
    records = admission.reuse_log.find(request_id)
    is_own = bool(records) and records[0].tenant == caller.tenant
    if not records or not (is_own or caller.is_admin):
        message = (
            f"no record of request {shortened(request_id)}; requests of the last hour have one once they have begun"
        )
        raise ApiError(404, "request_not_found", message)
    return {
        "object": "cache.reuse",
        "request_id": records[0].request_id,
        "model": records[0].model,
        "seconds_ago": round(now_s - records[0].at_s, 3),
        "prompts": [reuse_body(record, is_own=is_own) for record in records],
    }
