"""What crosses between a worker and its parent: msgspec structs as msgpack. Nothing that can carry code.

    parent ──► Open · Submit · Restore · Cancel · Explain · ClearCache · Close ──► worker
    parent ◄── Progress · Ready · Failed · Taken · Refused · Explained · Stepped ◄── worker

Requests and events are the core's own types. Bytes that are no message raise `MessageError`, and nothing else.
"""

from typing import Any

import msgspec

from quire.config import ModelSettings
from quire.core.digests import Namespace
from quire.core.events import Admitted, Finished, Preempted, PromptLogprobs, RequestEvent, SequenceFinished, Token
from quire.core.prefix_tree import Divergence
from quire.core.request import Request
from quire.core.waiting_queue import QueueConfig
from quire.engine.engine import ModelIdentity
from quire.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    MessageError,
    QueueFullError,
    QuireError,
    RequestError,
    RequestTooLargeError,
    TenantShareError,
)
from quire.worker.kv_events import KVEventSettings


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    """An array that begins with its own name."""


# -- to the worker -----------------------------------------------------------------------------------------------------


class Open(_Message, frozen=True):
    """The first message: what to load."""

    model: str
    settings: ModelSettings
    queue: QueueConfig
    key: bytes
    kv_events: KVEventSettings | None = None


class Submit(_Message, frozen=True):
    """A new request: it may be refused."""

    request: Request


class Restore(_Message, frozen=True):
    """A request that a worker before this one had let in, with the tokens it had."""

    request: Request


class Cancel(_Message, frozen=True):
    """End a request, or one of its answers alone, if it lives."""

    request_id: str
    index: int | None = None
    """Which answer; None: all of them."""


class Explain(_Message, frozen=True):
    """Say how much of a prompt is cached, and why the next token is not. It is not run."""

    explain_id: int
    namespace: Namespace
    prompt: tuple[int, ...]


class ClearCache(_Message, frozen=True):
    """Forget every cached block that nobody uses."""


class Close(_Message, frozen=True):
    """The last message: end after the step in flight."""


ToWorker = Open | Submit | Restore | Cancel | Explain | ClearCache | Close

# -- to the parent -----------------------------------------------------------------------------------------------------


class LoadProgress(_Message, frozen=True):
    """How far loading is."""

    label: str
    done_bytes: int
    total_bytes: int


class Ready(_Message, frozen=True):
    """The model is loaded; from now on steps are made."""

    identity: ModelIdentity
    block_size: int
    num_blocks: int
    vocabulary_size: int
    max_sequence_tokens: int
    line: str
    notes: tuple[str, ...]


class Failed(_Message, frozen=True):
    """The last message of a worker that could not go on."""

    kind: str
    """Name of the exception."""
    message: str


class Taken(_Message, frozen=True):
    """A request was let in."""

    request_id: str


class Refused(_Message, frozen=True):
    """A request was not let in."""

    request_id: str
    kind: str
    details: tuple[str | int | None, ...]

    @classmethod
    def of(cls, request_id: str, error: QuireError) -> "Refused":
        """How this refusal is told."""
        names = _DETAILS.get(type(error))
        details = (str(error),) if names is None else tuple(getattr(error, name) for name in names)
        return cls(request_id, type(error).__name__, details)

    @property
    def error(self) -> QuireError:
        """The same error on this side."""
        kind: Any = _REFUSALS.get(self.kind)
        if kind is None:
            raise MessageError(f"a request may be refused by {', '.join(_REFUSALS)}; by {self.kind!r} it was")
        try:
            return kind(*self.details)  # type: ignore[no-any-return]
        except TypeError as error:
            raise MessageError(f"{self.kind} was told with {len(self.details)} details: {error}") from error


_DETAILS: dict[type[QuireError], tuple[str, ...]] = {
    DuplicateRequestError: ("request_id",),
    InvalidParameterError: ("message", "parameter"),
    QueueFullError: ("num_waiting", "limit", "retry_after_s"),
    TenantShareError: ("tenant", "num_waiting", "limit", "retry_after_s", "state"),
}
_REFUSALS: dict[str, type[QuireError]] = {
    kind.__name__: kind for kind in (*_DETAILS, RequestError, RequestTooLargeError)
}


class Explained(_Message, frozen=True):
    """The answer to `Explain`."""

    explain_id: int
    found: Divergence


class WorkerLoad(msgspec.Struct, array_like=True, frozen=True):
    """How busy a worker is, and what it has done in its life."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    step_tokens: tuple[int, ...] = ()
    """What each step since the last message has computed."""


class _Admitted(_Message, frozen=True):
    event: Admitted


class _Token(_Message, frozen=True):
    event: Token


class _PromptLogprobs(_Message, frozen=True):
    event: PromptLogprobs


class _Preempted(_Message, frozen=True):
    event: Preempted


class _SequenceFinished(_Message, frozen=True):
    event: SequenceFinished


class _Finished(_Message, frozen=True):
    event: Finished


_Wrapped = _Admitted | _Token | _PromptLogprobs | _Preempted | _SequenceFinished | _Finished
# Events are bare tuples, because hundreds are made in a step; on the wire each wears its name.
_WRAPS: dict[type, Any] = {
    Admitted: _Admitted,
    Token: _Token,
    PromptLogprobs: _PromptLogprobs,
    Preempted: _Preempted,
    SequenceFinished: _SequenceFinished,
    Finished: _Finished,
}


class Stepped(_Message, frozen=True):
    """All that one step brought: either all of it arrives or nothing."""

    wrapped: tuple[_Wrapped, ...]
    first_passes: dict[str, int]
    """Of each request that had its first token in this step: prompt tokens that were not computed."""
    load: WorkerLoad

    @classmethod
    def of(cls, events: list[RequestEvent], first_passes: dict[str, int], load: WorkerLoad) -> "Stepped":
        """How these events are told."""
        return cls(tuple(_WRAPS[type(event)](event) for event in events), first_passes, load)

    @property
    def events(self) -> list[RequestEvent]:
        """The events in their order."""
        return [one.event for one in self.wrapped]


ToParent = LoadProgress | Ready | Failed | Taken | Refused | Explained | Stepped

encode_message = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_parent = msgspec.msgpack.Decoder(ToParent)


def decode_to_worker(data: bytes) -> ToWorker:
    """What the parent says. Raises MessageError."""
    return _decode(_to_worker, data)  # type: ignore[no-any-return]


def decode_to_parent(data: bytes) -> ToParent:
    """What a worker says. Raises MessageError."""
    return _decode(_to_parent, data)  # type: ignore[no-any-return]


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, QuireError) as error:
        # Settings check themselves when they are made: what breaks their rules is no message either.
        raise MessageError(f"{len(data)} bytes between worker and parent are no message: {error}") from error
