"""Everything that can go wrong in a worker, on purpose: beside the faults that every server has for its proofs, ends of
the process, hangs of other kinds, messages that are none, and results that were not computed.

An oracle's worker reads them from ORACLE_FAULTS, a JSON list of `quire.worker.child.faults.Fault` of any kind below.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from quire.backends.protocol import PendingStep
from quire.core.events import Queued
from quire.core.step import NO_MASKS, ROW_FAILED, Masks, RowError, RowResult, StepPlan, StepResult, WorkItem
from quire.engine.engine import Engine
from quire.errors import InvariantError
from quire.worker import messages
from quire.worker.child import faults
from quire.worker.child.faults import HANG_S, Fault, FaultyRunner
from tests.support.changed import changed

ORACLE_FAULTS = "ORACLE_FAULTS"


class BrokenRunner(FaultyRunner):
    """Computes as the runner inside it does, except for the faults."""

    def start(self, plan: StepPlan) -> PendingStep:
        hits = self.faults_of(plan)
        for fault, _ in hits:
            BEFORE.get(fault.kind, lambda: None)()
        changes = [(AFTER[fault.kind], item) for fault, item in hits if fault.kind in AFTER]
        return _ChangedStep(super().start(plan), changes, self.capacity.vocabulary_size)


def broken(engine: Engine) -> Engine:
    """The engine, with the faults that its worker's environment asks for."""
    if text := os.environ.get(ORACLE_FAULTS):
        engine.runner = BrokenRunner(engine.runner, msgspec.json.decode(text, type=list[Fault]))
    return engine


# -- before the step: the process ends, hangs, or sends malformed data -------------------------------------------------


def _segfault() -> None:
    ctypes.string_at(0)


def _leave() -> NoReturn:
    raise SystemExit(0)


def _hold() -> None:
    """Hang like native code that never releases the interpreter."""
    ctypes.PyDLL(None).sleep(HANG_S)


def _spin() -> NoReturn:
    while True:
        pass


def _raise(error: BaseException) -> Callable[[], NoReturn]:
    def raises() -> NoReturn:
        raise error

    return raises


def _recurse() -> None:
    _recurse()


def _send(data: bytes) -> Callable[[], None]:
    """The next message to the parent is this."""
    return lambda: setattr(messages, "encode_message", lambda _message: data)


STRANGER = messages.encode_message(messages.Stepped((Queued("stranger"),), messages.WorkerLoad()))
"""A message, but about a request that the parent never sent."""
BEFORE: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(3),
    "fpe": lambda: os.kill(os.getpid(), signal.SIGFPE),
    "garbage": _send(b"\xc1 no message begins like this"),
    "hold": _hold,
    "invariant": _raise(InvariantError("an invariant is broken")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": _leave,
    "out_of_memory": _raise(MemoryError()),
    "raise": _raise(RuntimeError("the device is gone")),
    "recurse": _recurse,
    "segfault": _segfault,
    "spin": _spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stranger": _send(STRANGER),
}


# -- after the step: the result is not what was computed ---------------------------------------------------------------

Change = Callable[[StepResult, int, int], StepResult]
"""Of a result, a row's sequence and the size of the vocabulary."""


@dataclass(frozen=True, slots=True)
class _ChangedStep:
    pending: PendingStep
    changes: Iterable[tuple[Change, WorkItem]]
    vocabulary_size: int

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        result = self.pending.wait(masks)
        for change, item in self.changes:
            result = change(result, item.sequence_id, self.vocabulary_size)
        return result


def _with_row(result: StepResult, sequence_id: int, row: RowResult) -> StepResult:
    return changed(result, rows={**result.rows, sequence_id: row})


def _without_row(result: StepResult, sequence_id: int) -> StepResult:
    return changed(result, rows={name: row for name, row in result.rows.items() if name != sequence_id})


NOT_COMPUTED = RowError(ROW_FAILED, "this row could not be computed")
AFTER: dict[str, Change] = {
    "foreign_row": lambda result, _name, _size: _with_row(result, -1, RowResult()),
    "missing_row": lambda result, name, _size: _without_row(result, name),
    "row": lambda result, name, _size: _with_row(result, name, RowResult(error=NOT_COMPUTED)),
    "two_tokens": lambda result, name, _size: _with_row(result, name, RowResult((0, 0))),
    "wrong_step": lambda result, _name, _size: changed(result, step=result.step + 1),
    "wrong_token": lambda result, name, size: _with_row(result, name, RowResult((size,))),
}
KINDS = frozenset({*BEFORE, *AFTER, *faults.KINDS})
