"""Injects faults: a runner that aborts, hangs, corrupts blocks or slows down. Only for tests and proofs.

    QUIRE_TESTING=1 QUIRE_FAULTS='[{"kind": "abort", "token": 7}]'

QUIRE_FAULTS without QUIRE_TESTING is an error, so that a leftover variable cannot break a production server.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import msgspec

from quire.backends.protocol import PendingStep, Runner
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult, WorkItem
from quire.engine.engine import Engine
from quire.errors import ConfigError

FAULTS, TESTING = "QUIRE_FAULTS", "QUIRE_TESTING"
HANG_S = 86_400
ABORT, HANG, NAN, SLOW = "abort", "hang", "nan", "slow"
KINDS = (ABORT, HANG, NAN, SLOW)
"""Kinds of faults: the process aborts, a step never returns, a block gets NaN values, steps take longer."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault and its conditions. It applies to rows (a sequence's part of a step) that meet all set conditions."""

    kind: str
    step: int | None = None
    """Minimum step number of the worker."""
    token: int | None = None
    """The row's input contains this token."""
    seed: int | None = None
    """The row samples for a request with this seed."""
    after: int = 0
    """The row samples after at least this many output tokens."""
    by: Annotated[float, msgspec.Meta(ge=1.0)] = 1.0
    """Factor on the duration of a slow step."""
    share: float | None = None
    """Affected share of sampled tokens, chosen by a hash of seed and position, so that batching does not matter."""

    def applies_to(self, plan: StepPlan, item: WorkItem) -> bool:
        """Whether the fault applies to this row."""
        sampling = item.sampling
        if sampling is None and (self.seed is not None or self.share is not None or self.after):
            return False
        return (
            (self.step is None or plan.step >= self.step)
            and (self.token is None or self.token in item.token_ids)
            and (self.seed is None or (sampling is not None and sampling.seed == self.seed))
            and (sampling is None or sampling.num_output_tokens >= self.after)
            and (self.share is None or (sampling is not None and selects(sampling.seed, sampling.position, self.share)))
        )


def selects(seed: int, position: int, share: float) -> bool:
    """Whether the hash of seed and position selects this token: true for this share of all tokens."""
    digest = blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def faults_from(environment: Mapping[str, str]) -> list[Fault]:
    """Read the faults from the environment. Raises ConfigError if they are invalid or not allowed."""
    text = environment.get(FAULTS)
    if not text:
        return []
    if not environment.get(TESTING):
        raise ConfigError(f"expected {TESTING}=1 with {FAULTS}, got none; unset {FAULTS}", code="needs_testing")
    try:
        faults = msgspec.json.decode(text, type=list[Fault])
    except (msgspec.MsgspecError, ValueError) as error:
        message = f"expected a JSON list of faults in {FAULTS}, got {text[:200]!r}: {error}"
        raise ConfigError(message, code="invalid_faults") from error
    for fault in faults:
        if fault.kind not in KINDS:
            raise ConfigError(f"expected one of {', '.join(KINDS)}, got {fault.kind!r}", code="unknown_fault_kind")
    return faults


def inject_faults(engine: Engine, faults: Sequence[Fault]) -> Engine:
    """Wrap the engine's runner if there are faults; return the engine."""
    if faults:
        engine.runner = FaultyRunner(engine.runner, faults)
    return engine


class FaultyRunner:
    """Wraps a runner and injects the faults."""

    def __init__(self, runner: Runner, faults: Sequence[Fault]) -> None:
        self.capacity = runner.capacity
        self.runner = runner
        self.read_blocks, self.write_blocks, self.close = runner.read_blocks, runner.write_blocks, runner.close
        self._faults = faults

    def faults_of(self, plan: StepPlan) -> list[tuple[Fault, WorkItem]]:
        """Return the faults that apply to this plan, with their rows."""
        return [(fault, item) for fault in self._faults for item in plan.items if fault.applies_to(plan, item)]

    def start(self, plan: StepPlan) -> PendingStep:
        """Inject the faults that apply, then start the step."""
        faults = self.faults_of(plan)
        for fault, item in faults:
            if fault.kind == ABORT:
                os.abort()
            elif fault.kind == HANG:
                time.sleep(HANG_S)
            elif fault.kind == NAN:
                self._corrupt_block(item)
        slowdown = max((fault.by for fault, _ in faults if fault.kind == SLOW), default=1.0)
        return _SlowStep(time.perf_counter(), self.runner.start(plan), slowdown)

    def _corrupt_block(self, item: WorkItem) -> None:
        """Set all bytes of the block that this row appends to, so that its values are NaN in every float format."""
        if item.first_position % self.capacity.block_size:
            block_id = item.block_ids[item.first_position // self.capacity.block_size]
            self.write_blocks([block_id], [b"\xff" * self.capacity.num_kv_bytes])


@dataclass(frozen=True, slots=True)
class _SlowStep:
    started_s: float
    pending: PendingStep
    slowdown: float

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        result = self.pending.wait(masks)
        time.sleep((self.slowdown - 1.0) * (time.perf_counter() - self.started_s))
        return result
