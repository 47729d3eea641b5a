"""All exceptions that quire raises deliberately. Every package may import this module; it imports nothing.

    QuireError                     internal_error
    ├── InvariantError             invariant_broken       a bug in quire: internal state is inconsistent
    ├── ConfigError                invalid_config         a setting is invalid; raised before anything starts
    ├── CheckpointError            invalid_checkpoint     a model is missing, damaged or not supported
    ├── RequestError               invalid_request        the request cannot be served, not even by an idle server
    │   ├── DuplicateRequestError  duplicate_request_id   another live request has the same id
    │   ├── InvalidParameterError  invalid_parameter      a request parameter is invalid
    │   ├── InvalidTextError       invalid_text           a text, message or stop string is invalid
    │   ├── RequestTooLargeError   request_too_large      the request has no tokens, or more than the server's limits
    │   ├── TemplateError          template_failed        the model's chat template is missing or rejected the messages
    │   └── WorkBudgetError        work_budget_exceeded   the request or its tenant used too much processor time
    ├── EngineDeadError            engine_dead            the engine has stopped; running requests are lost
    ├── MessageError               malformed_message      another process or server sent a malformed message
    ├── ReplayError                invalid_trace          the file is not a trace, is damaged or of a newer version
    └── CapacityError              at_capacity            a bounded resource is full
        ├── DisplacedError         displaced              another tenant took its place in the queue; try later
        ├── DrainingError          draining               the server is shutting down; use another, or try later
        ├── OutOfBlocksError       out_of_blocks          the KV pool has fewer free blocks than the step needs
        ├── QueueFullError         queue_full             the server's queue is full; try later
        ├── StreamStuckError       stream_stuck           the client stopped reading its stream; the request was ended
        └── TenantShareError       tenant_share_exceeded  the tenant's share of the queue is full; try later

Code that detects a bug raises `InvariantError`. It does not use `assert`: `python -O` strips assertions, and a worker
with corrupt KV memory must stop in production too. All other exceptions are expected in operation and are handled.

Callers decide by type and code, never by the message. The table shows the code of each type; a `raise` can set a more
specific code where a caller must distinguish two cases of one type: `InvariantError("...", code="block_not_held")`.
"""

RETRY_AFTER_S = 2
"""Default delay after which a rejected client should retry, if there is no better estimate."""


class QuireError(Exception):
    """The base class: `except QuireError` catches every exception that quire raises deliberately."""

    code = "internal_error"
    """A stable identifier of the error for programs: it does not change when the message does."""

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvariantError(QuireError):
    """Internal state is inconsistent: a bug. It is not handled; the worker process is replaced."""

    code = "invariant_broken"


class ConfigError(QuireError, ValueError):
    """A setting is invalid. The message states the expected value, the actual one, and what to do."""

    code = "invalid_config"

    def __init__(self, message: str, settings: tuple[str, ...] = (), *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.settings = settings
        """Names of the invalid settings, as in the module that checked them; empty if no named setting is invalid."""


class CheckpointError(QuireError):
    """A model cannot be loaded: it is missing, damaged or not supported. The message states what to do."""

    code = "invalid_checkpoint"


class RequestError(QuireError):
    """The request cannot be served, not even by an idle server. It was not queued."""

    code = "invalid_request"


class DuplicateRequestError(RequestError):
    """The request id belongs to a request that has not finished."""

    code = "duplicate_request_id"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is already used by a live request; choose another")
        self.request_id = request_id


class InvalidParameterError(RequestError):
    """A request parameter is invalid. The message states the limits and the value."""

    code = "invalid_parameter"

    def __init__(self, message: str, parameter: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.message = message
        self.parameter = parameter
        """The parameter's name; None if the error is not about a single field, such as a prompt or a conversation."""


class InvalidTextError(RequestError):
    """A text, message or stop string is invalid: half a surrogate pair, an empty stop string, an image."""

    code = "invalid_text"


class RequestTooLargeError(RequestError):
    """The request has no tokens, or could not finish even if it ran alone on this server."""

    code = "request_too_large"


class TemplateError(RequestError):
    """The model's chat template is missing, rejected the messages, or took too many steps to render them."""

    code = "template_failed"


class WorkBudgetError(RequestError):
    """Work on a request's text (grammar, template, tokenization) exceeded the time limit of the request or tenant."""

    code = "work_budget_exceeded"

    def __init__(self, kind: str, scope: str, spent_s: float, limit_s: float, retry_after_s: int = 0) -> None:
        hint = f"try again in {retry_after_s} s" if retry_after_s else "send a simpler request"
        super().__init__(
            f"{kind.replace('_', ' ')}: expected at most {limit_s:g} s of processor time ({scope.replace('_', ' ')}), "
            f"got {spent_s:.3g} s; {hint}"
        )
        self.kind = kind
        self.scope = scope
        self.spent_s = spent_s
        self.limit_s = limit_s
        self.retry_after_s = retry_after_s
        """Above 0 only if the tenant's limit was exceeded: then the same request may succeed later."""


class EngineDeadError(QuireError):
    """The engine has stopped. Its running requests are lost."""

    code = "engine_dead"


class MessageError(QuireError):
    """Another process or server sent a malformed or impossible message. A worker that sends one is replaced."""

    code = "malformed_message"


class ReplayError(QuireError):
    """A file is not a trace that can be replayed. The message states the line and what was expected there."""

    code = "invalid_trace"


class CapacityError(QuireError):
    """A bounded resource is full."""

    code = "at_capacity"


class DisplacedError(CapacityError):
    """The request was still waiting when its place went to a tenant below its fair share. It never ran."""

    code = "displaced"

    def __init__(self, tenant: str, retry_after_s: int) -> None:
        super().__init__(
            f"tenant {tenant!r} had more requests waiting than its share; another tenant displaced its newest; "
            f"try again in {retry_after_s} s"
        )
        self.tenant = tenant
        self.retry_after_s = retry_after_s


class DrainingError(CapacityError):
    """The server is shutting down and accepts no new requests; at the drain timeout, running requests are ended."""

    code = "draining"


class OutOfBlocksError(CapacityError):
    """The KV pool has fewer free blocks than requested. Nothing was changed."""

    code = "out_of_blocks"

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"need {num_needed} free blocks, {num_free} are free; preempt or finish a sequence first")
        self.num_needed = num_needed
        self.num_free = num_free


class QueueFullError(CapacityError):
    """The server's queue is full for requests of this priority class."""

    code = "queue_full"

    def __init__(self, num_waiting: int, limit: int, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(f"the queue is full: {num_waiting} of at most {limit} requests are waiting; try again later")
        self.num_waiting = num_waiting
        self.limit = limit
        self.retry_after_s = retry_after_s


class StreamStuckError(CapacityError):
    """A client left too many bytes of its stream unread, so its request was ended."""

    code = "stream_stuck"

    def __init__(self, request_id: str, limit: int) -> None:
        super().__init__(
            f"expected at most {limit:,} unread bytes in a stream, {request_id} has more; read faster, or request less"
        )
        self.request_id = request_id
        self.limit = limit


class TenantShareError(CapacityError):
    """The tenant already has as many waiting (or open: not yet completed) requests as its share allows."""

    code = "tenant_share_exceeded"

    def __init__(
        self,
        tenant: str,
        num_requests: int,
        limit: int,
        retry_after_s: int = RETRY_AFTER_S,
        state: str = "waiting",
    ) -> None:
        super().__init__(
            f"tenant {tenant!r} has {num_requests} of at most {limit} requests {state}; try again in {retry_after_s} s"
        )
        self.tenant = tenant
        self.num_requests = num_requests
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.state = state
