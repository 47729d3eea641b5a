"""Routes: which prompt lines repeatedly cause cache misses, and how much of a request's prompts was cached.

A tenant gets warnings about its own prompts, with their lines. An admin key also gets those of other tenants, but
without lines, which only the admin socket shows.
"""

from time import monotonic

from starlette.requests import Request
from starlette.responses import Response

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.http.errors import ApiError, shortened
from quire.api.http.sse import json_response
from quire.api.prefix.explanation_json import reuse_body
from quire.api.prefix.warnings import warnings_response


async def cache_warnings(request: Request) -> Response:
    """Lines that repeatedly cause prefix cache misses, and their cost in the last hour."""
    admission: Admission = request.app.state.admission
    caller: Caller = request.scope["quire.caller"]
    guard, now_s = admission.prefix_guard, monotonic()
    warnings = guard.warnings(now_s, tenant=caller.tenant)
    if caller.is_admin:
        warnings += [warning for warning in guard.warnings(now_s) if warning.tenant != caller.tenant]
    return warnings_response(warnings)


async def retrieve_reuse(request: Request, request_id: str) -> Response:
    """How many tokens of a request's prompts were cached when it began to run, and why no more."""
    admission: Admission = request.app.state.admission
    caller: Caller = request.scope["quire.caller"]
    now_s = monotonic()
    admission.reuse_log.forget_old(now_s)
    records = admission.reuse_log.find(request_id)
    is_own = bool(records) and records[0].tenant == caller.tenant
    if not records or not (is_own or caller.is_admin):
        message = (
            f"no record of request {shortened(request_id)}; requests of the last hour have one once they have begun"
        )
        raise ApiError(404, "request_not_found", message)
    return json_response(
        {
            "object": "cache.reuse",
            "request_id": records[0].request_id,
            "model": records[0].model,
            "seconds_ago": round(now_s - records[0].at_s, 3),
            "prompts": [reuse_body(record, is_own=is_own) for record in records],
        }
    )
