"""Fault rates of a simulation, and a runner that injects faults."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from quire.backends.oracle import OracleRunner
from quire.core.step import ROW_FAILED, RowError, RowResult, SlotCopy, StepPlan, StepResult, WorkItem
from quire.errors import QuireError


class RunnerCrashError(QuireError):
    """The simulated device crashed and lost all its data."""

    code = "runner_crashed"


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities of faults per request, step, row or tenant; all zero: no faults."""

    cancel_per_request: float = 0.0
    cancel_sequence_per_request: float = 0.0
    """One of the request's `n` sequences is cancelled."""
    duplicate_per_request: float = 0.0
    crash_per_step: float = 0.0
    error_per_row: float = 0.0
    preempt_per_step: float = 0.0
    pool_pressure_per_step: float = 0.0
    """The simulation pins, evicts or clears blocks; the scheduler is not notified."""
    time_jump_per_step: float = 0.0
    patient_tenants: float = 0.0
    """Share of tenants whose clients all wait until the retry time of the tenant's last rejection."""

    @staticmethod
    def choose(random: Random) -> "FaultRates":
        """Return random rates: each kind of fault is frequent, rare or absent."""
        return FaultRates(
            cancel_per_request=random.choice((0.0, 0.1, 0.4)),
            duplicate_per_request=random.choice((0.0, 0.05)),
            crash_per_step=random.choice((0.0, 0.002, 0.01)),
            error_per_row=random.choice((0.0, 0.001, 0.01)),
            preempt_per_step=random.choice((0.0, 0.05, 0.33)),
            pool_pressure_per_step=random.choice((0.0, 0.05, 0.2)),
            time_jump_per_step=random.choice((0.0, 0.0, 0.002)),
            cancel_sequence_per_request=random.choice((0.0, 0.2, 0.5)),
            patient_tenants=random.choice((0.0, 0.5, 1.0)),
        )


class FaultyOracle:
    """An oracle runner that crashes, and whose rows fail and leave garbage in their blocks and states."""

    def __init__(self, runner: OracleRunner, rates: FaultRates, random: Random) -> None:
        self._runner = runner
        self._rates = rates
        self._random = random
        self._garbage = 1 << 63

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan, with faults. Raises RunnerCrashError for a crash."""
        if self._random.random() < self._rates.crash_per_step:
            raise RunnerCrashError(f"the runner crashed at step {plan.step}")
        result = self._runner.start(plan).wait()
        if not self._rates.error_per_row:
            return result
        rows = dict(result.rows)
        for item in plan.items:
            if self._random.random() < self._rates.error_per_row:
                self._corrupt_blocks(item)
                self._corrupt_states(item, plan.cache_copies)
                rows[item.sequence_id] = RowResult(error=RowError(ROW_FAILED, "the row is not finite"))
        return StepResult(result.step, rows)

    def _corrupt_states(self, item: WorkItem, cache_copies: Iterable[SlotCopy]) -> None:
        if self._runner.capacity.num_slots:
            self._garbage += 1
            for slot in (item.state_slot, *(copy.dst for copy in cache_copies if copy.src == item.state_slot)):
                self._runner.states[slot] = self._garbage

    def _corrupt_blocks(self, item: WorkItem) -> None:
        """Overwrite the KV slots that a failed row wrote, so that any later use of them changes the output."""
        size = self._runner.capacity.block_size
        for position in range(item.first_position, item.first_position + len(item.token_ids)):
            block, offset = item.block_ids[position // size], position % size
            content = bytearray(self._runner.read_blocks([block])[0])
            self._garbage += 1
            content[8 * offset : 8 * offset + 8] = self._garbage.to_bytes(8, "little")
            self._runner.write_blocks([block], [bytes(content)])
