"""The result of a simulation, as numbers and as text."""

from collections import Counter
from dataclasses import dataclass, field, fields

from quire.core.memory.kv_config import MemoryStats
from quire.core.scheduling.scheduler_config import SchedulerStats
from quire.sim.server.config import SimConfig
from quire.sim.server.deliveries import Deliveries


@dataclass(slots=True)
class Totals(SchedulerStats):
    """Counters of the whole run, summed over all workers."""

    query_tokens: int = 0
    hit_tokens: int = 0
    num_evictions: int = 0
    num_slot_evictions: int = 0
    """Evicted cached states."""
    num_refused: int = 0
    """Requests too large to be served."""
    num_turned_away: int = 0
    """Rejections with a retry time; each is counted."""
    num_displaced: int = 0
    """Waiting requests displaced by tenants with a smaller share."""
    num_returned: int = 0
    """Requests that returned at their retry time, with no other request of their tenants since."""
    num_duplicates: int = 0
    num_cancels: int = 0
    num_drops: int = 0
    """Continuations that were cancelled individually."""
    num_crashes: int = 0
    num_pins_refused: int = 0
    num_idle_steps: int = 0
    """Plans without work while requests were waiting or running."""
    is_wedged: bool = False

    def absorb(self, scheduler: SchedulerStats, memory: MemoryStats) -> None:
        """Add one worker's counters."""
        for one in fields(SchedulerStats):
            setattr(self, one.name, getattr(self, one.name) + getattr(scheduler, one.name))
        self.query_tokens += memory.query_tokens
        self.hit_tokens += memory.hit_tokens
        self.num_evictions += memory.num_evictions
        self.num_slot_evictions += memory.num_slot_evictions


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds from arrival to start, of the requests of one class or tenant."""

    who: str
    num_requests: int
    median_s: float
    p95_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run."""

    config: SimConfig
    totals: Totals
    ledger: Deliveries = field(repr=False)
    log_digest: str
    simulated_s: float

    @property
    def violations(self) -> list[str]:
        wedged = ["wedged: requests wait and none runs"] if self.totals.is_wedged else []
        return wedged + self.ledger.complaints

    @property
    def replay(self) -> str:
        config = self.config
        return f"quire sim --scenario {config.scenario} --seed {config.seed} --requests {config.num_requests}"

    def reasons(self) -> Counter[str]:
        """Finish reasons of continuations."""
        return Counter(reason.value for entry in self.ledger.entries.values() for reason in entry.reasons.values())

    def waits(self) -> list[Waits]:
        """Waits by class, most urgent first; then by tenant, if there are several."""
        by_class: dict[str, list[float]] = {"high": [], "normal": [], "low": []}
        by_tenant: dict[str, list[float]] = {}
        for entry in self.ledger.entries.values():
            if entry.first_wait_s is not None:
                by_class[entry.request.priority.value].append(entry.first_wait_s)
                by_tenant.setdefault(entry.request.tenant, []).append(entry.first_wait_s)
        tenants = sorted(by_tenant.items()) if len(by_tenant) > 1 else []
        return [
            Waits(who, len(waits), _quantile(waits, 0.5), _quantile(waits, 0.95), max(waits))
            for who, waits in (*by_class.items(), *tenants)
            if waits
        ]


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
