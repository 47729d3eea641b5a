"""Injected faults: a runner that aborts, hangs, slows down, or returns wrong results. For tests and proofs alone.

    QUIRE_TESTING=1 QUIRE_FAULTS='[{"kind": "abort", "token": 7}]'

Without the first variable the second is refused: no server breaks by a variable left behind.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from quire.backends.protocol import PendingStep, Runner
from quire.core.events import Queued
from quire.core.step import NO_MASKS, Masks, RowResult, StepPlan, StepResult, WorkItem
from quire.engine.engine import Engine
from quire.errors import ConfigError, InvariantError
from quire.worker import messages

FAULTS, TESTING = "QUIRE_FAULTS", "QUIRE_TESTING"
FOR_EVER_S = 86_400
SLOW = "slow"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong, and when: every condition that is set must hold of a row."""

    kind: str
    step: int | None = None
    """From this step of the worker on."""
    token: int | None = None
    """While this token is fed."""
    seed: int | None = None
    """A row of the request with this seed chooses a token."""
    after: int = 0
    """It has produced so many tokens before."""
    by: float = 1.0
    """A slow step takes so many times as long."""
    share: float | None = None
    """This share of all chosen tokens, by a hash of seed and position: the same rows in any batch."""

    def hits(self, plan: StepPlan, item: WorkItem) -> bool:
        """Whether the fault applies to this row."""
        sampling = item.sampling
        if sampling is None and (self.seed is not None or self.share is not None or self.after):
            return False
        return (
            (self.step is None or plan.step >= self.step)
            and (self.token is None or self.token in item.token_ids)
            and (self.seed is None or (sampling is not None and sampling.seed == self.seed))
            and (sampling is None or sampling.num_output_tokens >= self.after)
            and (self.share is None or (sampling is not None and falls(sampling.seed, sampling.position, self.share)))
        )


def falls(seed: int, position: int, share: float) -> bool:
    """Whether a hash of the two lies within this share of all."""
    digest = blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def faults_from(environment: Mapping[str, str]) -> list[Fault]:
    """The requested faults. Raises ConfigError where they are not allowed or not valid."""
    text = environment.get(FAULTS)
    if not text:
        return []
    if not environment.get(TESTING):
        raise ConfigError(f"{FAULTS} breaks the server on purpose and needs {TESTING}=1; unset it")
    try:
        faults = msgspec.json.decode(text, type=list[Fault])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{FAULTS} must be a list of faults, {text[:200]!r} given: {error}") from error
    for fault in faults:
        if fault.kind not in KINDS:
            raise ConfigError(f"a fault must be one of {', '.join(sorted(KINDS))}; {fault.kind!r} given")
        if fault.by < 1.0:
            raise ConfigError(f"a slow step takes at least as long as it does, {fault.by} times as long given")
    return faults


def with_faults(engine: Engine, faults: Sequence[Fault], send: Callable[[bytes], None]) -> Engine:
    """The engine, with a faulty runner if there are faults."""
    if faults:
        engine.runner = FaultyRunner(engine.runner, faults, send)
    return engine


class FaultyRunner:
    """Computes as the runner inside it does, except for the faults."""

    def __init__(self, runner: Runner, faults: Sequence[Fault], send: Callable[[bytes], None]) -> None:
        self.capacity = runner.capacity
        self.runner = runner
        self.send = send
        self._faults = faults

    def start(self, plan: StepPlan) -> PendingStep:
        """Break, or compute and perhaps change the result."""
        hits = [(fault, item) for fault in self._faults for item in plan.items if fault.hits(plan, item)]
        for fault, item in hits:
            _BEFORE.get(fault.kind, _noop)(self, item)
        started_s = time.perf_counter()
        result = self.runner.start(plan).wait()
        slowdown = max((fault.by for fault, _ in hits if fault.kind == SLOW), default=1.0)
        time.sleep((slowdown - 1.0) * (time.perf_counter() - started_s))
        for fault, item in hits:
            result = _AFTER.get(fault.kind, _unchanged)(self, result, item)
        return _Done(result)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Without faults."""
        return self.runner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Without faults."""
        self.runner.write_blocks(block_ids, data)

    def close(self) -> None:
        """Without faults."""
        self.runner.close()


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self, _masks: Masks = NO_MASKS) -> StepResult:
        return self._result


# -- before the step: the process ends, hangs, or sends malformed data -------------------------------------------------


def _noop(_runner: FaultyRunner, _item: WorkItem) -> None:
    pass


def _abort(_runner: FaultyRunner, _item: WorkItem) -> None:
    os.abort()


def _segfault(_runner: FaultyRunner, _item: WorkItem) -> None:
    ctypes.string_at(0)


def _exit(_runner: FaultyRunner, _item: WorkItem) -> None:
    os._exit(3)


def _leave(_runner: FaultyRunner, _item: WorkItem) -> None:
    raise SystemExit(0)


def _kill(_runner: FaultyRunner, _item: WorkItem) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_runner: FaultyRunner, _item: WorkItem) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(_runner: FaultyRunner, _item: WorkItem) -> None:
    time.sleep(FOR_EVER_S)


def _hold(_runner: FaultyRunner, _item: WorkItem) -> None:
    """Hang like native code that never releases the interpreter."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def _spin(_runner: FaultyRunner, _item: WorkItem) -> None:
    while True:
        pass


def _raise(_runner: FaultyRunner, _item: WorkItem) -> None:
    raise RuntimeError("the device is gone")


def _out_of_memory(_runner: FaultyRunner, _item: WorkItem) -> None:
    raise MemoryError


def _invariant(_runner: FaultyRunner, _item: WorkItem) -> None:
    raise InvariantError("an invariant is broken")


def _recurse(runner: FaultyRunner, item: WorkItem) -> None:
    _recurse(runner, item)


def _garbage(runner: FaultyRunner, _item: WorkItem) -> None:
    runner.send(b"\xc1 no message begins like this")


def _stranger(runner: FaultyRunner, _item: WorkItem) -> None:
    """A message, but about a request that the parent never sent."""
    runner.send(messages.encode_message(messages.Stepped((Queued("stranger"),), messages.WorkerLoad())))


def _fpe(_runner: FaultyRunner, _item: WorkItem) -> None:
    os.kill(os.getpid(), signal.SIGFPE)


def _nan(runner: FaultyRunner, item: WorkItem) -> None:
    """Spoil the block this row is about to write into: what it has there already becomes NaN in any float format."""
    block_id = item.block_ids[item.first_position // runner.capacity.block_size]
    if item.first_position % runner.capacity.block_size:
        runner.write_blocks([block_id], [b"\xff" * runner.capacity.num_kv_bytes])


# -- after the step: the result is not what was computed ---------------------------------------------------------------


def _unchanged(_runner: FaultyRunner, result: StepResult, _item: WorkItem) -> StepResult:
    return result


def _with_row(result: StepResult, sequence_id: int, row: RowResult) -> StepResult:
    return result._replace(rows={**result.rows, sequence_id: row})


def _row(_runner: FaultyRunner, result: StepResult, item: WorkItem) -> StepResult:
    return _with_row(result, item.sequence_id, RowResult(error="this row could not be computed"))


def _missing_row(_runner: FaultyRunner, result: StepResult, item: WorkItem) -> StepResult:
    return result._replace(rows={name: row for name, row in result.rows.items() if name != item.sequence_id})


def _foreign_row(_runner: FaultyRunner, result: StepResult, _item: WorkItem) -> StepResult:
    return _with_row(result, -1, RowResult())


def _wrong_token(runner: FaultyRunner, result: StepResult, item: WorkItem) -> StepResult:
    return _with_row(result, item.sequence_id, RowResult((runner.capacity.vocabulary_size,)))


def _two_tokens(_runner: FaultyRunner, result: StepResult, item: WorkItem) -> StepResult:
    return _with_row(result, item.sequence_id, RowResult((0, 0)))


def _wrong_step(_runner: FaultyRunner, result: StepResult, _item: WorkItem) -> StepResult:
    return result._replace(step=result.step + 1)


_BEFORE: dict[str, Callable[[FaultyRunner, WorkItem], None]] = {
    "abort": _abort,
    "exit": _exit,
    "fpe": _fpe,
    "garbage": _garbage,
    "hang": _hang,
    "hold": _hold,
    "invariant": _invariant,
    "kill": _kill,
    "leave": _leave,
    "nan": _nan,
    "out_of_memory": _out_of_memory,
    "raise": _raise,
    "recurse": _recurse,
    "segfault": _segfault,
    "spin": _spin,
    "stop": _stop,
    "stranger": _stranger,
}
_AFTER: dict[str, Callable[[FaultyRunner, StepResult, WorkItem], Any]] = {
    "foreign_row": _foreign_row,
    "missing_row": _missing_row,
    "row": _row,
    "two_tokens": _two_tokens,
    "wrong_step": _wrong_step,
    "wrong_token": _wrong_token,
}
KINDS = frozenset({*_BEFORE, *_AFTER, SLOW})
"""Everything that can go wrong on purpose."""
