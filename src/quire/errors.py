"""Every exception quire raises on purpose. Importable by all rooms; imports nothing.

    QuireError
    ├── InvariantError            a bug in quire: a promise of the design does not hold
    ├── ConfigError               a setting breaks a rule; said before anything starts
    ├── CheckpointError           a model cannot be read: missing, damaged, or of a kind quire does not run
    ├── RequestError              a request that cannot be served, however empty the server
    │   ├── DuplicateRequestError its id is that of a live request
    │   ├── InvalidParameterError a sampling parameter breaks its rule
    │   ├── InvalidTextError      a text, message or stop string that no model could read
    │   ├── RequestTooLargeError  it could not finish even alone, or asks for nothing
    │   └── TemplateError         the model's chat template refused the messages, or is missing
    ├── EngineDeadError           the engine ended while requests were running
    ├── MessageError              what came from the other process is no message, or says what cannot be
    └── CapacityError             something bounded is full
        ├── DrainingError         the server is going down and takes no new requests
        ├── OutOfBlocksError      the pool has fewer free blocks than the step needs
        ├── PinBudgetError        the pin would hold more of the pool than pins may
        ├── QueueFullError        the server's queue is full: come back later
        ├── StreamStuckError      nobody reads a stream: its request was ended
        └── TenantShareError      the tenant's share of the queue is full: come back later

A bug raises `InvariantError`, never `assert`, because `python -O` strips assertions and a memory that lies
must stop in production too. Everything else is the world being the world, and is handled where it is caught.
"""


class QuireError(Exception):
    """The root: `except QuireError` catches all that quire raises on purpose."""


class InvariantError(QuireError):
    """A promise of the design does not hold. Not handled: the worker is replaced."""


class ConfigError(QuireError, ValueError):
    """A setting breaks a rule. The message says the rule, the value given, and what to do."""


class CheckpointError(QuireError):
    """A model cannot be read: missing, damaged, or of a kind quire does not run. The message says what to do."""


class RequestError(QuireError):
    """A request that cannot be served, however empty the server. Nothing has been queued."""


class DuplicateRequestError(RequestError):
    """The id belongs to a request that is still alive."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request ids must differ while they live, {request_id!r} is taken; choose another")
        self.request_id = request_id


class InvalidParameterError(RequestError):
    """A sampling parameter breaks its rule. The message says the rule, the limits and the value."""


class InvalidTextError(RequestError):
    """A text, message or stop string that no model could read: half a character, an empty stop, a picture."""


class RequestTooLargeError(RequestError):
    """The request could not finish even alone on this server."""


class TemplateError(RequestError):
    """The model's chat template refused the messages, did too much work on them, or is missing."""


class EngineDeadError(QuireError):
    """The engine ended while requests were running. What was running is lost with it."""


class MessageError(QuireError):
    """What came from the other process is no message, or says what cannot be. That process is replaced."""


class CapacityError(QuireError):
    """Something bounded is full."""


class DrainingError(CapacityError):
    """The server is going down: what runs may finish, nothing new is taken."""

    def __init__(self) -> None:
        super().__init__("the server is going down and takes no new requests; ask another one, or later")


class OutOfBlocksError(CapacityError):
    """The pool has fewer free blocks than were asked for. Nothing has been changed."""

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} blocks are needed and {num_free} are free; preempt or finish a sequence first")
        self.num_needed = num_needed
        self.num_free = num_free


class PinBudgetError(CapacityError):
    """A pin would hold more than pins may: too many blocks, or one pin too many. Nothing has been pinned."""


class QueueFullError(CapacityError):
    """The server's queue is full for requests of this class."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        super().__init__(f"the queue holds {limit} requests, {num_waiting} are waiting; try again later")
        self.num_waiting = num_waiting
        self.limit = limit


class StreamStuckError(CapacityError):
    """A consumer left too many pieces unread; its request was ended."""

    def __init__(self, request_id: str, limit: int) -> None:
        super().__init__(f"a stream holds {limit} unread pieces, {request_id} has more; read faster, or ask for less")
        self.request_id = request_id
        self.limit = limit


class TenantShareError(CapacityError):
    """The tenant has as many requests waiting as its share of the queue allows."""

    def __init__(self, tenant: str, num_waiting: int, limit: int) -> None:
        super().__init__(
            f"tenant {tenant!r} may have {limit} requests waiting, {num_waiting} are; wait for some to start"
        )
        self.tenant = tenant
        self.num_waiting = num_waiting
        self.limit = limit
