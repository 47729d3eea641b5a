"""Queries of a running engine: what is sent, what comes back, and who waits for it. The same in a thread's queue and on
the wire to a worker or a member.

    caller ─► PendingCalls.open ────► EngineCall(id, op) ────► engine
    caller ◄─ PendingCalls.resolve ◄─ CallReply(id, result) ◄─ engine

A call ends with its engine and is not repeated: the next engine has another cache, and the call may have crashed this
one.
"""

from collections.abc import Callable
from itertools import count

import msgspec

from quire.core.digests import Namespace
from quire.core.divergence import Divergence
from quire.core.events import error_from, error_parts
from quire.core.inspect.snapshots import BlockFacts
from quire.errors import MessageError, QuireError


class WireMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    """What crosses between processes: an array that begins with its own name."""


class Explained(WireMessage, frozen=True):
    """The result of `Explain`."""

    found: Divergence


class BlockInfo(WireMessage, frozen=True):
    """The result of `GetBlock`."""

    facts: BlockFacts | None
    """None: there is no such block."""


class CallError(WireMessage, frozen=True):
    """Why there is no result."""

    kind: str
    details: tuple[str | int | None, ...]


class Explain(WireMessage, frozen=True):
    """How much of a prompt is cached, and why the next token is not. Nothing is computed."""

    namespace: Namespace
    prompt: tuple[int, ...]


class GetBlock(WireMessage, frozen=True):
    """What is known of one block."""

    block_id: int


CallOp = Explain | GetBlock
CallResult = Explained | BlockInfo
OnReply = Callable[[CallResult | QuireError], None]
"""Called once, on any thread, with the result of the op or an error."""
_RESULTS: dict[type[CallOp], type[CallResult]] = {Explain: Explained, GetBlock: BlockInfo}


class EngineCall(WireMessage, frozen=True):
    """An op, and the id that its reply will have."""

    call_id: int
    op: CallOp


class CallReply(WireMessage, frozen=True):
    """The reply to a call."""

    call_id: int
    result: CallResult | CallError

    @classmethod
    def of(cls, call_id: int, outcome: CallResult | QuireError) -> "CallReply":
        """A reply with a result or an error."""
        return cls(call_id, CallError(*error_parts(outcome)) if isinstance(outcome, QuireError) else outcome)


class PendingCalls:
    """Calls without a reply, by their ids. The threads of a caller and of an engine may use it at once."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._pending: dict[int, tuple[type[CallResult], OnReply]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def open(self, op: CallOp, on_reply: OnReply) -> EngineCall:
        """A call to send. `on_reply` is called once: by `resolve` or by `fail_all`."""
        call = EngineCall(next(self._ids), op)
        self._pending[call.call_id] = _RESULTS[type(op)], on_reply
        return call

    def resolve(self, reply: CallReply) -> None:
        """Pass on a reply. Raises MessageError for one that answers no pending call."""
        pending = self._pending.get(reply.call_id)
        if pending is None or not isinstance(reply.result, (pending[0], CallError)):
            raise MessageError(f"unexpected reply to call {reply.call_id}: {type(reply.result).__name__}")
        result = reply.result
        outcome: CallResult | QuireError = (
            error_from(result.kind, result.details) if isinstance(result, CallError) else result
        )
        del self._pending[reply.call_id]
        pending[1](outcome)

    def fail_all(self, error: QuireError) -> None:
        """The engine is gone."""
        for call_id in list(self._pending):
            if (pending := self._pending.pop(call_id, None)) is not None:
                pending[1](error)
