"""What crosses between a worker and its parent: msgspec structs as msgpack. Nothing that can carry code.

    parent ──► Open, then the engine's commands ──► worker
    parent ◄── LoadProgress · Ready · Failed · Stepped, with events · SnapshotMade · CallReply ◄── worker

Commands are the engine's own types, requests and events the core's. Bytes that are no message raise `MessageError`, and
nothing else.
"""

from typing import Any

import msgspec

from quire.config import ModelSettings
from quire.core.events import RequestEvent
from quire.core.inspect.snapshots import EngineSnapshot
from quire.core.scheduling.shares import AdmissionHint
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.work_budget import WorkSpent
from quire.engine.calls import CallReply, WireMessage
from quire.engine.commands import Command
from quire.engine.engine import ModelInfo
from quire.engine.trace_recorder import TraceSettings
from quire.errors import MessageError, QuireError
from quire.worker.kv_event_settings import KVEventSettings

# -- to the worker -----------------------------------------------------------------------------------------------------


class Open(WireMessage, frozen=True):
    """The first message: what to load."""

    model: str
    settings: ModelSettings
    queue: QueueConfig
    key: bytes
    kv_events: KVEventSettings | None = None
    runs_at_low_priority: bool = False
    """Load it at low priority: other models may be serving meanwhile."""
    trace: TraceSettings | None = None
    """Where its engine's inputs and outputs are recorded."""


ToWorker = Open | Command

# -- to the parent -----------------------------------------------------------------------------------------------------


class LoadProgress(WireMessage, frozen=True):
    """How far loading is."""

    label: str
    done_bytes: int
    total_bytes: int


class Ready(WireMessage, frozen=True):
    """The model is loaded; steps begin."""

    info: ModelInfo


class Failed(WireMessage, frozen=True):
    """The last message of a worker that could not continue."""

    kind: str
    """Name of the exception."""
    message: str
    code: str | None = None


class WorkerLoad(msgspec.Struct, array_like=True, frozen=True):
    """How busy a worker is, and what it has done in its life."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    step_tokens: tuple[int, ...] = ()
    """Tokens of each step since the last message."""
    verdicts: tuple[AdmissionHint, ...] = ()
    """The refusals that tenants would get whose requests its queue refused lately."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    grammar_compile_s: float = 0.0
    grammar_mask_s: float = 0.0
    num_snapshots: int = 0
    """For observers; none are made without one."""
    work: WorkSpent = WorkSpent()
    """On grammars, of the tenants that cost most."""


class Stepped(WireMessage, frozen=True):
    """All events of commands or of one step: either all of them arrive or none."""

    events: tuple[RequestEvent, ...]
    load: WorkerLoad | None = None
    """None: about the same as the one before."""


class SnapshotMade(WireMessage, frozen=True):
    """For observers."""

    snapshot: EngineSnapshot


ToParent = LoadProgress | Ready | Failed | Stepped | SnapshotMade | CallReply

encode_message = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_parent = msgspec.msgpack.Decoder(ToParent)


def decode_to_worker(data: bytes) -> ToWorker:
    """A message of the parent. Raises MessageError."""
    return _decode(_to_worker, data)  # type: ignore[no-any-return]


def decode_to_parent(data: bytes) -> ToParent:
    """A message of a worker. Raises MessageError."""
    return _decode(_to_parent, data)  # type: ignore[no-any-return]


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, QuireError) as error:
        # Settings validate themselves when they are made: invalid ones are no message either.
        raise MessageError(f"malformed message between worker and parent ({len(data)} bytes): {error}") from error
