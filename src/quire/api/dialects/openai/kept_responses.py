"""`GET` and `DELETE /v1/responses/{response_id}`: read or delete a stored response of the caller's tenant.

Responses of other tenants are reported as not found.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.http.errors import ApiError, shortened


async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    return await _run_in_thread(request, lambda admission, caller: _find(admission, caller, response_id))


async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response; it can no longer be continued."""

    def delete(admission: Admission, caller: Caller) -> dict[str, Any]:
        _find(admission, caller, response_id)
        if (store := admission.settings.store) is not None:
            store.forget(caller.tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return await _run_in_thread(request, delete)


async def _run_in_thread(request: Request, work: Callable[[Admission, Caller], dict[str, Any]]) -> Response:
    """Run `work` in a thread of the text pool, when it is the tenant's turn, and return its result as JSON."""
    admission: Admission = request.app.state.admission
    caller: Caller = request.scope["quire.caller"]
    data = await admission.text_pool.run(caller.tenant, lambda: msgspec.json.encode(work(admission, caller)))
    return Response(data, media_type="application/json")


def _find(admission: Admission, caller: Caller, response_id: str) -> dict[str, Any]:
    store = admission.settings.store
    if store is None:
        raise ApiError(404, "response_not_found", "this server stores no responses; start it with --store")
    conversation = store.find(caller.tenant, response_id)
    if conversation is None or not conversation.response:
        raise ApiError(404, "response_not_found", f"Response with id {shortened(response_id)} not found")
    return conversation.response
