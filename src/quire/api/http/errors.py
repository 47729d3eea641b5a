"""What a client is told when it does not get what it asked: one shape, a string code, and what to do.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

Errors of quire become refusals here and nowhere else. What was not raised on purpose becomes a 500 that says nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import msgspec

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
)

TELLING = re.compile(r"0x[0-9a-fA-F]{6,}|Traceback|File \"|site-packages|(?:/[\w.-]+){3,}")
"""What belongs to the machine and not into an answer: addresses, traces, paths."""

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is not the one asked for."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def kind(self) -> str:
        """The `type` clients look at."""
        if self.status >= 500:
            return "server_error"
        return TYPES.get(self.status, "invalid_request_error")

    @cached_property
    def body(self) -> bytes:
        """As it goes over the wire."""
        error = {"message": _clean(self.message), "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def header_items(self) -> Iterator[tuple[bytes, bytes]]:
        """Headers of the answer, its length and Retry-After among them."""
        yield b"content-type", b"application/json"
        yield b"content-length", str(len(self.body)).encode()
        if self.retry_after_s is not None:
            yield b"retry-after", str(max(1, ceil(self.retry_after_s))).encode()
        for name, value in self.headers:
            yield name.lower().encode("latin-1"), value.encode("latin-1")


def invalid(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """Something in the request breaks a rule."""
    return ApiError(400, code, message, param)


def unsupported(param: str, why: str) -> ApiError:
    """What is not built is refused, never ignored."""
    return ApiError(400, "unsupported_parameter", f"{param} is not supported: {why}; leave it out", param)


def internal(request_id: str) -> ApiError:
    """Not raised on purpose: the log knows more."""
    return ApiError(500, "internal_error", f"the server made a mistake; its log has more under {request_id}")


def api_error_of(error: Exception, request_id: str) -> ApiError:
    """What a client is told of an error."""
    match error:
        case ApiError():
            return error
        case InvalidParameterError():
            return invalid(str(error), error.parameter, "invalid_parameter")
        case RequestTooLargeError():
            return invalid(str(error), code="context_length_exceeded")
        case RequestError():
            return invalid(str(error))
        case CapacityError() | EngineDeadError():
            return _not_now(error)
        case QuireError():
            return internal(request_id)
    return internal(request_id)


def _not_now(error: QuireError) -> ApiError:
    """Nothing is wrong with the request: it comes at a bad time."""
    match error:
        case DisplacedError() | TenantShareError():
            return ApiError(429, "rate_limit_exceeded", str(error), retry_after_s=error.retry_after_s)
        case QueueFullError():
            return ApiError(503, "server_overloaded", str(error), retry_after_s=error.retry_after_s)
        case EngineDeadError():
            message = "the model's engine is not running; it is being seen to, try again"
            return ApiError(503, "engine_dead", message, retry_after_s=DEAD_RETRY_S)
        case StreamStuckError():
            return ApiError(503, "reader_too_slow", str(error), retry_after_s=FULL_RETRY_S)
        case DrainingError():
            return ApiError(503, "server_draining", str(error), retry_after_s=DEAD_RETRY_S)
    return ApiError(503, "server_overloaded", str(error), retry_after_s=FULL_RETRY_S)


def shortened(given: object) -> str:
    """A client's own value inside a message: not all of it."""
    shown = repr(given)
    return shown if len(shown) <= MAX_ECHOED_CHARS else f"{shown[:MAX_ECHOED_CHARS]}..."


def _clean(message: str) -> str:
    whole = TELLING.sub("...", message)
    cut = whole if len(whole) <= 4 * MAX_ECHOED_CHARS else f"{whole[: 4 * MAX_ECHOED_CHARS]}..."
    return cut.encode("utf-8", "replace").decode()
