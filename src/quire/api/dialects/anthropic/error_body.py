"""Errors in the format of the Anthropic API.

{"type": "error", "error": {"type": …, "message": …}}
"""

import msgspec

from quire.api.http.errors import ApiError, ErrorFormat
from quire.api.http.sse import event

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
THREAD_NOT_FOUND, THREAD_UNSUPPORTED = THREAD_CODES = ("thread_not_found", "thread_unsupported_request")
"""Clients detect by these codes that a thread cannot be continued by an id, and resend the whole conversation."""


def error_object(error: ApiError) -> dict[str, object]:
    """Return the error as the JSON object of a response body or an event."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": error.code}} if error.code in THREAD_CODES else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


def error_body(error: ApiError) -> bytes:
    """Encode the error as a response body."""
    return msgspec.json.encode(error_object(error))


def error_event(error: ApiError) -> bytes:
    """Encode the error as the last event of a broken stream."""
    return b"event: error\n" + event(error_body(error))


ANTHROPIC_ERRORS = ErrorFormat(b"application/json", error_body)
