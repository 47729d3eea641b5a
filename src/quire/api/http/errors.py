"""HTTP errors: a status, a string code, and a message that says what to do.

Exceptions are converted to `ApiError` only here; unexpected exceptions become a 500 without details. Each API encodes
errors in its own `ErrorFormat`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from quire.api.http.limits import DEAD_RETRY_S, FULL_RETRY_S, MAX_ECHOED_CHARS
from quire.errors import (
    CapacityError,
    DisplacedError,
    DrainingError,
    EngineDeadError,
    InvalidParameterError,
    QueueFullError,
    QuireError,
    RequestError,
    RequestTooLargeError,
    StreamStuckError,
    TenantShareError,
    WorkBudgetError,
)

INTERNAL_DETAILS = re.compile(r"0x[0-9a-fA-F]{6,}|Traceback|File \"|site-packages|(?:/[\w.-]+){3,}")
"""Matches memory addresses, tracebacks and paths, which must not be sent to clients."""


PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ReaderStuckError(Exception):
    """The client read nothing of its response for STUCK_S."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error as a client receives it."""

    status: int
    code: str
    message: str
    """Cleaned of internal details and shortened when the error is created."""
    param: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self.message = _clean(self.message)
        super().__init__(self.message)


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """The encoding of errors in one API."""

    content_type: bytes
    body: Callable[[ApiError], bytes]

    def answer(self, error: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return the headers, including Content-Length and Retry-After, and the body."""
        body = self.body(error)
        headers = [(b"content-type", self.content_type), (b"content-length", str(len(body)).encode())]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, ceil(error.retry_after_s))).encode()))
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers]
        return headers, body


def invalid(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, code, message, param)


def unsupported(param: str, reason: str) -> ApiError:
    """Return the error for a parameter that is not supported; such parameters are never ignored."""
    return ApiError(400, "unsupported_parameter", f"{param} is not supported: {reason}; leave it out", param)


def internal(request_id: str) -> ApiError:
    """Return the error for an unexpected exception, whose details are only in the log."""
    return ApiError(500, "internal_error", f"internal server error; the server log has details under {request_id}")


def api_error_of(error: Exception, request_id: str) -> ApiError:
    """Return the error that a client receives for an exception."""
    match error:
        case ApiError():
            return error
        case InvalidParameterError():
            return invalid(str(error), error.parameter, "invalid_parameter")
        case RequestTooLargeError():
            return invalid(str(error), code="context_length_exceeded")
        case WorkBudgetError(retry_after_s=wait_s):
            return ApiError(429 if wait_s else 400, error.code, str(error), retry_after_s=wait_s or None)
        case RequestError():
            return invalid(str(error))
        case CapacityError() | EngineDeadError():
            return _unavailable(error)
        case QuireError():
            return internal(request_id)
    return internal(request_id)


def _unavailable(error: QuireError) -> ApiError:
    """Return the error for a valid request that cannot be served now."""
    match error:
        case DisplacedError() | TenantShareError():
            return ApiError(429, "rate_limit_exceeded", str(error), retry_after_s=error.retry_after_s)
        case QueueFullError():
            return ApiError(503, "server_overloaded", str(error), retry_after_s=error.retry_after_s)
        case EngineDeadError():
            message = "the model's engine is not running; try again later"
            return ApiError(503, "engine_dead", message, retry_after_s=DEAD_RETRY_S)
        case StreamStuckError():
            return ApiError(503, "reader_too_slow", str(error), retry_after_s=FULL_RETRY_S)
        case DrainingError():
            return ApiError(503, "server_draining", str(error), retry_after_s=DEAD_RETRY_S)
    return ApiError(503, "server_overloaded", str(error), retry_after_s=FULL_RETRY_S)


def shortened(value: object) -> str:
    """Return a client's value as text for an error message, cut to MAX_ECHOED_CHARS."""
    text = repr(value)
    return text if len(text) <= MAX_ECHOED_CHARS else f"{text[:MAX_ECHOED_CHARS]}..."


def _clean(message: str) -> str:
    clean = INTERNAL_DETAILS.sub("...", message)
    short = clean if len(clean) <= 4 * MAX_ECHOED_CHARS else f"{clean[: 4 * MAX_ECHOED_CHARS]}..."
    return short.encode("utf-8", "replace").decode()


def printable_name(name: str) -> str:
    """Return a name for a header or a log line: unchanged if plain, otherwise quoted with escapes."""
    if PLAIN_NAME.fullmatch(name):
        return name
    return ascii(name if len(name) <= 64 else f"{name[:61]}...").replace(",", "\\x2c")
