"""Queries to a running engine, their replies, and the table of pending calls. The same messages are used in a thread's
queue and on the wire to a worker or a fleet member.

    caller ─► PendingCalls.open ────► EngineCall(id, op) ────► engine
    caller ◄─ PendingCalls.resolve ◄─ CallReply(id, result) ◄─ engine

A call fails if its engine ends, and is not repeated: the next engine has a different cache, and the call may have
caused the crash.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec

from quire.core.digests import Namespace
from quire.core.divergence import Divergence
from quire.core.events import error_from, error_parts
from quire.core.inspect.snapshots import BlockFacts
from quire.errors import MessageError, QuireError

T = TypeVar("T")


class WireMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    """A message between processes: an array whose first element is the type's name."""


def wire_decoder(message_type: Any, name: str) -> Callable[[bytes], Any]:
    """Return a decoder for messages of one type, called `name` in errors. It raises MessageError and no other error."""
    return partial(decode_message, msgspec.msgpack.Decoder(message_type).decode, name)


def decode_message(decode: Callable[[bytes], T], name: str, data: bytes) -> T:
    """Decode data from another process, called `name` in errors. Raises MessageError and no other error."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, QuireError) as error:
        # Settings validate themselves when constructed, so invalid settings also make a message invalid.
        raise MessageError(f"malformed {name} ({len(data)} bytes): {error}") from error


class Explained(WireMessage, frozen=True):
    """The result of `Explain`."""

    divergence: Divergence


class BlockInfo(WireMessage, frozen=True):
    """The result of `GetBlock`."""

    facts: BlockFacts | None
    """None: the pool has no such block."""


class CallError(WireMessage, frozen=True):
    """The error of a failed call."""

    kind: str
    details: tuple[str | int | None, ...]


class Explain(WireMessage, frozen=True):
    """Query how much of a prompt is cached, and why its next token is not. Computes nothing."""

    namespace: Namespace
    prompt: tuple[int, ...]


class GetBlock(WireMessage, frozen=True):
    """Query the state of one block."""

    block_id: int


CallOp = Explain | GetBlock
CallResult = Explained | BlockInfo
OnReply = Callable[[CallResult | QuireError], None]
"""Called once, on any thread, with the result of the op or an error."""
_RESULTS: dict[type[CallOp], type[CallResult]] = {Explain: Explained, GetBlock: BlockInfo}


class EngineCall(WireMessage, frozen=True):
    """A query with the id of its reply."""

    call_id: int
    op: CallOp


class CallReply(WireMessage, frozen=True):
    """The result of a call, or its error."""

    call_id: int
    result: CallResult | CallError

    @classmethod
    def of(cls, call_id: int, outcome: CallResult | QuireError) -> "CallReply":
        """Build a reply from a result or an error."""
        return cls(call_id, CallError(*error_parts(outcome)) if isinstance(outcome, QuireError) else outcome)


class PendingCalls:
    """Pending calls by id. Safe for concurrent use by the caller's and the engine's threads."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._pending: dict[int, tuple[type[CallResult], OnReply]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def open(self, op: CallOp, on_reply: OnReply) -> EngineCall:
        """Register a call and return it for sending. `on_reply` is called once, by `resolve` or by `fail_all`."""
        call = EngineCall(next(self._ids), op)
        self._pending[call.call_id] = _RESULTS[type(op)], on_reply
        return call

    def resolve(self, reply: CallReply) -> None:
        """Deliver a reply to its caller. Raises MessageError if no pending call has this id and result type."""
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
        """Fail all pending calls, because the engine has ended."""
        for call_id in list(self._pending):
            if (pending := self._pending.pop(call_id, None)) is not None:
                pending[1](error)
