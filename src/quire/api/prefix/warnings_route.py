"""`GET /v1/cache/warnings`: which lines repeatedly keep a tenant's prompts out of the cache.

A tenant gets its own lines. An admin key gets what all tenants lost, and no line of theirs: those are on the operator's
own socket.
"""

from time import monotonic

from starlette.requests import Request
from starlette.responses import Response

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
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
