"""`GET /v1/requests/{request_id}/cache`: what a request found in the cache, for its own tenant.

Another tenant's is reported as not found. The operator gets reasons and numbers of all, and no text of any tenant.
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
