"""Messages between a worker and its parent: msgspec structs as msgpack, a format that cannot contain code.

    parent ──► Open, then the engine's commands ──► worker
    parent ◄── LoadProgress · Ready · Failed · Stepped, with events · SnapshotMade · CallReply ◄── worker

Commands are types of the engine; requests and events are types of the core. Invalid bytes raise `MessageError` and
nothing else.
"""

from collections.abc import Callable

import msgspec

from quire.config import ModelSettings
from quire.core.events import RequestEvent
from quire.core.inspect.snapshots import EngineSnapshot
from quire.core.scheduling.shares import AdmissionHint
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.work_budget import WorkSpent
from quire.engine.calls import CallReply, WireMessage, wire_decoder
from quire.engine.commands import Command
from quire.engine.engine import ModelInfo
from quire.engine.trace_recorder import TraceSettings
from quire.worker.kv_event_settings import KVEventSettings

# -- to the worker -----------------------------------------------------------------------------------------------------


class Open(WireMessage, frozen=True):
    """The first message: the model, its settings, and the secret `key` of its block hashes."""

    model: str
    settings: ModelSettings
    queue: QueueConfig
    key: bytes
    kv_events: KVEventSettings | None = None
    runs_at_low_priority: bool = False
    """Load at low priority, because other models may be serving meanwhile."""
    trace: TraceSettings | None = None
    """Destination of the engine's trace; None: no trace."""


ToWorker = Open | Command

# -- to the parent -----------------------------------------------------------------------------------------------------


class LoadProgress(WireMessage, frozen=True):
    """Progress of loading."""

    label: str
    done_bytes: int
    total_bytes: int


class Ready(WireMessage, frozen=True):
    """The model is loaded, and the worker accepts requests."""

    info: ModelInfo


class Failed(WireMessage, frozen=True):
    """The last message of a worker that could not continue."""

    kind: str
    """Class name of the exception."""
    message: str
    code: str | None = None


class WorkerLoad(msgspec.Struct, array_like=True, frozen=True):
    """A worker's current load, and its counters since it started."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    step_tokens: tuple[int, ...] = ()
    """Number of tokens of each step since the last message."""
    admission_hints: tuple[AdmissionHint, ...] = ()
    """Admission hints for tenants whose requests the worker's queue recently refused."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    grammar_compile_s: float = 0.0
    grammar_mask_s: float = 0.0
    num_snapshots: int = 0
    """Snapshots made for the live views of clients; without a view, none are made."""
    work: WorkSpent = WorkSpent()
    """CPU time spent on grammars, for the tenants with the largest amounts."""
    num_pins_yielded: int = 0


class Stepped(WireMessage, frozen=True):
    """All events of a batch of commands or of one step, delivered together or not at all."""

    events: tuple[RequestEvent, ...]
    load: WorkerLoad | None = None
    """None if it has hardly changed since the previous report."""


class SnapshotMade(WireMessage, frozen=True):
    """A snapshot of the engine for the live views of clients."""

    snapshot: EngineSnapshot


ToParent = LoadProgress | Ready | Failed | Stepped | SnapshotMade | CallReply

encode_message = msgspec.msgpack.Encoder().encode
_DESCRIPTION = "message between worker and parent"
decode_to_worker: Callable[[bytes], ToWorker] = wire_decoder(ToWorker, _DESCRIPTION)
"""Decode a message from the parent. Raises MessageError."""
decode_to_parent: Callable[[bytes], ToParent] = wire_decoder(ToParent, _DESCRIPTION)
"""Decode a message from a worker. Raises MessageError."""
