"""The result of a simulation of one server."""

from collections import Counter
from dataclasses import dataclass, field, fields

from quire.core.memory.kv_config import MemoryStats
from quire.core.scheduling.scheduler_config import SchedulerStats
from quire.sim.fleet.report import Spread
from quire.sim.server.config import SimConfig
from quire.sim.server.deliveries import Deliveries


@dataclass(slots=True)
class Totals(SchedulerStats):
    """Counters of the whole run, summed over all workers (a worker ends when the runner crashes)."""

    query_tokens: int = 0
    hit_tokens: int = 0
    num_evictions: int = 0
    num_slot_evictions: int = 0
    """Cached recurrent states that were evicted."""
    num_refused: int = 0
    """Requests that are too large for the server."""
    num_turned_away: int = 0
    """Rejections with a retry time; each rejection of one request counts."""
    num_displaced: int = 0
    """Waiting requests that were displaced by tenants with less service."""
    num_returned: int = 0
    """Requests accepted at their retry time, without another request of the tenant since the rejection."""
    num_duplicates: int = 0
    num_cancels: int = 0
    num_drops: int = 0
    """Cancellations of single continuations."""
    num_crashes: int = 0
    num_idle_steps: int = 0
    """Plans without work although requests were waiting or running."""
    is_wedged: bool = False

    def absorb(self, scheduler: SchedulerStats, memory: MemoryStats) -> None:
        """Add the counters of one worker."""
        for counter in fields(SchedulerStats):
            setattr(self, counter.name, getattr(self, counter.name) + getattr(scheduler, counter.name))
        self.query_tokens += memory.query_tokens
        self.hit_tokens += memory.hit_tokens
        self.num_evictions += memory.num_evictions
        self.num_slot_evictions += memory.num_slot_evictions


@dataclass(frozen=True, slots=True)
class Waits:
    """Waiting times in seconds, from arrival to the first admission, of one class or tenant."""

    who: str
    num_requests: int
    median_s: float
    p95_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a whole run."""

    config: SimConfig
    totals: Totals
    ledger: Deliveries = field(repr=False)
    log_digest: str
    simulated_s: float

    @property
    def violations(self) -> list[str]:
        wedged = ["wedged: requests wait and none runs"] if self.totals.is_wedged else []
        return wedged + self.ledger.violations

    @property
    def replay(self) -> str:
        config = self.config
        return f"quire sim --scenario {config.scenario} --seed {config.seed} --requests {config.num_requests}"

    def reasons(self) -> Counter[str]:
        """Count the continuations by finish reason."""
        return Counter(reason.value for entry in self.ledger.entries.values() for reason in entry.reasons.values())

    def waits(self) -> list[Waits]:
        """Return the waits by class, highest class first, then by tenant if there are several."""
        by_class: dict[str, list[float]] = {"high": [], "normal": [], "low": []}
        by_tenant: dict[str, list[float]] = {}
        for entry in self.ledger.entries.values():
            if entry.first_wait_s is not None:
                by_class[entry.request.priority.value].append(entry.first_wait_s)
                by_tenant.setdefault(entry.request.tenant, []).append(entry.first_wait_s)
        tenants = sorted(by_tenant.items()) if len(by_tenant) > 1 else []
        spreads = [(group, waits_s, Spread.of(waits_s)) for group, waits_s in (*by_class.items(), *tenants) if waits_s]
        return [Waits(group, len(waits_s), spread.p50, spread.p95, max(waits_s)) for group, waits_s, spread in spreads]
