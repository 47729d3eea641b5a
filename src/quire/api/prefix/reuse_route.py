"""`GET /v1/requests/{request_id}/cache`: what a request found in the cache, told to its own tenant.

Another tenant's reads as one that never was. The operator is told reasons and numbers of all, and nobody's text.
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
    """What a request's prompts found in the cache when it began to run, and why no more."""
    admission: Admission = request.app.state.admission
    told = _found(admission, request.scope["quire.caller"], request_id)
    return Response(msgspec.json.encode(told), media_type="application/json")


def _found(admission: Admission, caller: Caller, request_id: str) -> dict[str, Any]:
    now_s = monotonic()
    admission.reuse_log.forget_old(now_s)
    records = admission.reuse_log.find(request_id)
    is_own = bool(records) and records[0].tenant == caller.tenant
    if not records or not (is_own or caller.is_admin):
        message = f"nothing is known of a request {shortened(request_id)}; the last hour's are, once they have begun"
        raise ApiError(404, "request_not_found", message)
    return {
        "object": "cache.reuse",
        "request_id": records[0].request_id,
        "model": records[0].model,
        "seconds_ago": round(now_s - records[0].at_s, 3),
        "prompts": [reuse_body(record, is_own=is_own) for record in records],
    }
