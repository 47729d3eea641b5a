"""Errors in the format of the OpenAI API; the server also uses it for paths that no other API owns.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from typing import Any

import msgspec

from quire.api.http.errors import ApiError, ErrorFormat
from quire.api.http.sse import event

DONE = event(b"[DONE]")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
"""The JSON schema of `error_body`, for `/openapi.json`."""


def error_body(error: ApiError) -> bytes:
    """Encode the error as a response body."""
    kind = "server_error" if error.status >= 500 else TYPES.get(error.status, "invalid_request_error")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_event(error: ApiError) -> bytes:
    """Encode the error as an event, followed by the stream's last event."""
    return event(error_body(error)) + DONE


OPENAI_ERRORS = ErrorFormat(b"application/json", error_body)
