"""Every exception quire raises on purpose. Importable by all rooms; imports nothing.

    QuireError                     internal_error
    ├── InvariantError             invariant_broken       a bug in quire: a promise of the design does not hold
    ├── ConfigError                invalid_config         a setting breaks a rule; raised before anything starts
    ├── CheckpointError            invalid_checkpoint     a model cannot be read: missing, damaged, or not supported
    ├── RequestError               invalid_request        a request that cannot be served, however empty the server
    │   ├── DuplicateRequestError  duplicate_request_id   its id is that of a live request
    │   ├── InvalidParameterError  invalid_parameter      a sampling parameter breaks its rule
    │   ├── InvalidTextError       invalid_text           a text, message or stop string that no model could read
    │   ├── RequestTooLargeError   request_too_large      it could not finish even alone, or asks for nothing
    │   ├── TemplateError          template_failed        the model's chat template refused the messages, or is missing
    │   └── WorkBudgetError        work_budget_exceeded   it costs more processor time than it or its tenant may
    ├── EngineDeadError            engine_dead            the engine ended while requests were running
    ├── MessageError               malformed_message      what the other process sent is no message, or invalid
    ├── ReplayError                invalid_trace          a file is no trace, damaged, or of a later version
    └── CapacityError              at_capacity            something bounded is full
        ├── DisplacedError         displaced              it gave its place to a tenant that had less: come back later
        ├── DrainingError          draining               the server is shutting down: use another, or try later
        ├── OutOfBlocksError       out_of_blocks          the pool has fewer free blocks than the step needs
        ├── PinBudgetError         pin_budget_exceeded    the pin would hold more of the pool than pins may
        ├── QueueFullError         queue_full             the server's queue is full: come back later
        ├── StreamStuckError       stream_stuck           no client reads a stream: its request was ended
        └── TenantShareError       tenant_share_exceeded  the tenant's share of the queue is full: come back later

A bug raises `InvariantError`, never `assert`, because `python -O` strips assertions and a memory that lies
must stop in production too. Everything else is the world being the world, and is handled where it is caught.

Callers decide by types and codes, never by sentences. The codes above are those of the types; a raise gives a finer one
where a caller must tell two rules of a type apart: `InvariantError("...", code="block_not_held")`.
"""

RETRY_AFTER_S = 2
"""After how many seconds a rejected client should try again where nothing better is known."""


class QuireError(Exception):
    """The root: `except QuireError` catches all that quire raises on purpose."""

    code = "internal_error"
    """Which rule was broken, for programs: it stays when the message changes."""

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvariantError(QuireError):
    """A promise of the design does not hold. Not handled: the worker is replaced."""

    code = "invariant_broken"


class ConfigError(QuireError, ValueError):
    """A setting breaks a rule. The message says the rule, the value given, and what to do."""

    code = "invalid_config"

    def __init__(self, message: str, settings: tuple[str, ...] = (), *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.settings = settings
        """The settings that the rule is about, by their names where it was checked; none where it is about others."""


class CheckpointError(QuireError):
    """A model cannot be read: missing, damaged, or of a kind quire does not run. The message says what to do."""

    code = "invalid_checkpoint"


class RequestError(QuireError):
    """A request that cannot be served, however empty the server. Nothing has been queued."""

    code = "invalid_request"


class DuplicateRequestError(RequestError):
    """The id belongs to a request that is still alive."""

    code = "duplicate_request_id"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is already used by a live request; choose another")
        self.request_id = request_id


class InvalidParameterError(RequestError):
    """A sampling parameter breaks its rule. The message says the rule, the limits and the value."""

    code = "invalid_parameter"

    def __init__(self, message: str, parameter: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.message = message
        self.parameter = parameter
        """Its name; None where what is wrong has no name of its own, as a prompt that may be a conversation."""


class InvalidTextError(RequestError):
    """A text, message or stop string that no model could read: half a character, an empty stop, a picture."""

    code = "invalid_text"


class RequestTooLargeError(RequestError):
    """The request could not finish even alone on this server."""

    code = "request_too_large"


class TemplateError(RequestError):
    """The model's chat template refused the messages, did too much work on them, or is missing."""

    code = "template_failed"


class WorkBudgetError(RequestError):
    """What a request's words cost (a grammar, a template, tokens) passed the bound of the request or of its tenant."""

    code = "work_budget_exceeded"

    def __init__(self, kind: str, scope: str, spent_s: float, limit_s: float, retry_after_s: int = 0) -> None:
        way_out = f"try again in {retry_after_s} s" if retry_after_s else "send a simpler one"
        super().__init__(
            f"{kind.replace('_', ' ')}: expected at most {limit_s:g} s of processor time ({scope.replace('_', ' ')}), "
            f"got {spent_s:.3g} s; {way_out}"
        )
        self.kind = kind
        self.scope = scope
        self.spent_s = spent_s
        self.limit_s = limit_s
        self.retry_after_s = retry_after_s
        """Above 0 only where the tenant's bound was passed: then the same request may be served later."""


class EngineDeadError(QuireError):
    """The engine ended while requests were running. What was running is lost with it."""

    code = "engine_dead"


class MessageError(QuireError):
    """What came from the other process is no message, or says what cannot be. That process is replaced."""

    code = "malformed_message"


class ReplayError(QuireError):
    """A file is no trace that could be replayed. The message says where, and what was expected."""

    code = "invalid_trace"


class CapacityError(QuireError):
    """Something bounded is full."""

    code = "at_capacity"


class DisplacedError(CapacityError):
    """A request that waited gave its place to a tenant that was below its share. It never ran."""

    code = "displaced"

    def __init__(self, tenant: str, retry_after_s: int) -> None:
        super().__init__(
            f"tenant {tenant!r} had more requests waiting than its share, its newest was displaced by another tenant; "
            f"try again in {retry_after_s} s"
        )
        self.tenant = tenant
        self.retry_after_s = retry_after_s


class DrainingError(CapacityError):
    """The server takes nothing new, because it is about to end; what still runs at its bound is ended."""

    code = "draining"


class OutOfBlocksError(CapacityError):
    """The pool has fewer free blocks than were requested. Nothing has been changed."""

    code = "out_of_blocks"

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"need {num_needed} free blocks, {num_free} are free; preempt or finish a sequence first")
        self.num_needed = num_needed
        self.num_free = num_free


class PinBudgetError(CapacityError):
    """A pin would hold more than pins may: too many blocks, or one pin too many. Nothing has been pinned."""

    code = "pin_budget_exceeded"


class QueueFullError(CapacityError):
    """The server's queue is full for requests of this class."""

    code = "queue_full"

    def __init__(self, num_waiting: int, limit: int, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(f"the queue is full: {num_waiting} of at most {limit} requests are waiting; try again later")
        self.num_waiting = num_waiting
        self.limit = limit
        self.retry_after_s = retry_after_s


class StreamStuckError(CapacityError):
    """A consumer left too much unread; its request was ended."""

    code = "stream_stuck"

    def __init__(self, request_id: str, limit: int) -> None:
        super().__init__(
            f"expected at most {limit:,} unread bytes in a stream, {request_id} has more; read faster, or request less"
        )
        self.request_id = request_id
        self.limit = limit


class TenantShareError(CapacityError):
    """The tenant has as many requests waiting, or open, as its share allows."""

    code = "tenant_share_exceeded"

    def __init__(
        self,
        tenant: str,
        num_waiting: int,
        limit: int,
        retry_after_s: int = RETRY_AFTER_S,
        state: str = "waiting",
    ) -> None:
        super().__init__(
            f"tenant {tenant!r} has {num_waiting} of at most {limit} requests {state}; try again in {retry_after_s} s"
        )
        self.tenant = tenant
        self.num_waiting = num_waiting
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.state = state
