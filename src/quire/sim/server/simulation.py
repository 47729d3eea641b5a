"""Simulates one server: submit, inject faults, plan, run, apply; then advance the clock by the duration of the step.

All randomness comes from one seed, and all events enter one digest: equal seeds give equal digests.
"""

from collections import Counter
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from random import Random

from msgspec.structs import replace

from quire.backends.oracle import OracleRunner
from quire.core.digests import BlockHasher, Namespace
from quire.core.events import RequestEvent, SequenceFinished
from quire.core.inspect import invariants
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import Continuation, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.shares import RESERVATION_VALID_S
from quire.errors import (
    DuplicateRequestError,
    QueueFullError,
    QuireError,
    RequestTooLargeError,
    TenantShareError,
)
from quire.sim.server.config import CHAOTIC, SimConfig
from quire.sim.server.deliveries import Deliveries
from quire.sim.server.fault_plan import FaultyOracle, RunnerCrashError
from quire.sim.server.report import Report, Totals
from quire.workload.scenarios import SCENARIOS
from quire.workload.workload_request import WorkloadRequest

WEDGED_AFTER_S = 5.0
MAX_REJECTIONS_PER_STEP = 4
STEPS_PER_REQUEST = 2000
CHECK_EVERY_STEPS = 64


class RetryTimes:
    """The retry times of tenants whose requests were rejected."""

    def __init__(self) -> None:
        self.due_s: dict[str, float] = {}
        self.returned: set[str] = set()
        """Requests that arrived at their tenant's retry time."""

    def take_reservation(self, request: Request, now_s: float) -> bool:
        """Remove the tenant's retry time. Returns whether the request arrived then, as the tenant's first one since."""
        due_s = self.due_s.pop(request.tenant, None)
        is_due = due_s is not None and due_s <= now_s < due_s + RESERVATION_VALID_S
        if is_due:
            self.returned.add(request.request_id)
        return is_due

    def record_rejection(self, tenant: str, now_s: float, retry_after_s: int) -> None:
        """Record the retry time of a tenant whose request was rejected."""
        self.due_s[tenant] = now_s + retry_after_s


class Simulation:
    """One run. `run()` returns when every client has received its last event, or after a violation."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.ledger = Deliveries(config.shape.vocabulary_size, has_recurrent_state=config.shape.num_slots > 0)
        self.totals = Totals()
        self.now_s = 0.0
        self._random = Random(f"faults {config.seed}")
        self._log = blake2b(digest_size=16)
        workload = SCENARIOS[config.scenario].requests(Random(f"asks {config.seed}"), config.num_requests)
        self._arrivals = [(arrival.arrival_s, number, arrival) for number, arrival in enumerate(workload)]
        heapify(self._arrivals)
        self._num_tries: Counter[str] = Counter()
        self._workload = {arrival.name: (number, arrival) for _, number, arrival in self._arrivals}
        self._retry_times = RetryTimes()
        self._cancels: list[tuple[float, str]] = []
        self._drops: list[tuple[float, str, int]] = []
        self._idle_since_s: float | None = None
        self._start_worker()

    def run(self) -> Report:
        """Run until no request is left; stop early after a violation."""
        num_steps = 0
        try:
            while self._arrivals or self.scheduler.live:
                self._step()
                num_steps += 1
                if num_steps > STEPS_PER_REQUEST * (self.config.num_requests + 10):
                    self.ledger.violations.append(f"not finished after {num_steps} steps")
                if self._is_wedged() or self.ledger.violations:
                    break
            else:
                self._check_at_rest()
        except (QuireError, IndexError, KeyError, ValueError) as error:
            self.ledger.violations.append(f"at {self.now_s:.3f} s: {error!r}")
        return Report(self.config, self.totals, self.ledger, self._log.hexdigest(), self.now_s)

    def _start_worker(self) -> None:
        """Start a new worker, without any state of the previous worker."""
        shape = self.config.shape
        self.memory = KVMemory(shape.memory(), BlockHasher(bytes(32)))
        self.scheduler = Scheduler(shape.scheduler(), self.memory, self.config.guesser)
        self._last_running: set[int] = set()
        self.runner = FaultyOracle(OracleRunner(shape.capacity()), self.config.faults, self._random)

    def _step(self) -> None:
        self._submit_due()
        self._inject_faults()
        self.ledger.planned_s = self.now_s
        plan = self.scheduler.plan(self.now_s)
        if not plan.items:
            self._take_events(self.scheduler.take_events())
            self._advance_clock()
            return
        self._idle_since_s = None
        self._check_order()
        self._cancel_due()
        try:
            result = self.runner.run(plan)
        except RunnerCrashError:
            self._recover()
            return
        self.now_s += self.config.shape.duration_s(sum(len(item.token_ids) for item in plan.items))
        failed_ids = [item.sequence_id for item in plan.items if result.rows[item.sequence_id].error is not None]
        for sequence in self.scheduler.running:
            if sequence.sequence_id in failed_ids:
                self.ledger.record_row_failure(sequence.request.request_id)
        self._take_events(self.scheduler.apply(result, self.now_s))
        if self.scheduler.stats.num_steps % CHECK_EVERY_STEPS == 0:
            invariants.check(self.memory)
            invariants.check_scheduler(self.scheduler)

    def _check_order(self) -> None:
        """With one tenant: check that no request started before a waiting request with an earlier key."""
        if len(self.scheduler.queue.tenants) > 1:
            return
        first_waiting = min((one.key for one in self.scheduler.queue if not one.num_preemptions), default=None)
        started_keys = self._started_keys()
        if first_waiting is not None and started_keys and max(started_keys) > first_waiting:
            self.ledger.violations.append(f"expected key {first_waiting} to start first, got {max(started_keys)}")

    def _started_keys(self) -> list[tuple[float, int]]:
        """Return the keys of sequences that started since the last check and were never preempted."""
        running = {one.sequence_id: one for one in self.scheduler.running}
        started = [one for key, one in running.items() if key not in self._last_running and not one.num_preemptions]
        self._last_running = set(running)
        # The other continuations of a request start together with the first.
        return [one.key for one in started if one.index == one.request.continuations[0].index]

    # -- clients -------------------------------------------------------------------------------------------------------

    def _submit_due(self) -> None:
        num_before = self.totals.num_turned_away
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            if self.totals.num_turned_away - num_before >= MAX_REJECTIONS_PER_STEP:
                return  # the remaining clients try in the next step
            _, number, arrival = heappop(self._arrivals)
            due_s = self._retry_times.due_s.get(arrival.tenant, self.now_s)
            if self._is_patient(arrival.tenant) and due_s > self.now_s:
                heappush(self._arrivals, (due_s, number, arrival))
                continue
            request = self._request(arrival)
            try:
                self.scheduler.submit(request)
            except RequestTooLargeError:
                self.totals.num_refused += 1
                continue
            except (QueueFullError, TenantShareError) as error:
                if self._retry_times.take_reservation(request, self.now_s):
                    self.ledger.violations.append(
                        f"{arrival.name}: rejected although it came back after its retry time: {error}"
                    )
                self.totals.num_turned_away += 1
                self._retry_times.record_rejection(arrival.tenant, self.now_s, error.retry_after_s)
                self._schedule_retry(number, arrival, error.retry_after_s)
                continue
            self.totals.num_returned += self._retry_times.take_reservation(request, self.now_s)
            self.ledger.add(request)
            self._plan_cancellations(request)

    def _is_patient(self, tenant: str) -> bool:
        return Random(f"patience {self.config.seed} {tenant}").random() < self.config.faults.patient_tenants

    def _schedule_retry(self, number: int, arrival: WorkloadRequest, retry_after_s: int) -> None:
        """Schedule the retry of a rejected client: after the retry time, or later by exponential backoff."""
        self._num_tries[arrival.name] += 1
        delay_s = max(retry_after_s, 2 ** min(6, self._num_tries[arrival.name] - 1))
        heappush(self._arrivals, (self.now_s + delay_s, number, arrival))

    def _request(self, arrival: WorkloadRequest) -> Request:
        shape = self.config.shape
        return Request(
            request_id=arrival.name,
            prompt=arrival.prompt,
            namespace=Namespace(1, "oracle", "", "slots", shape.block_size, arrival.tenant),
            arrival_s=self.now_s,
            params=self._params(arrival),
            seed=arrival.seed,
            tenant=arrival.tenant,
            priority=PriorityClass(arrival.priority),
            continuations=tuple(Continuation(index) for index in range(arrival.num_continuations)),
            deadline_s=None if arrival.timeout_s is None else self.now_s + arrival.timeout_s,
        )

    def _params(self, arrival: WorkloadRequest) -> ResolvedSampling:
        params = ResolvedSampling(max_tokens=arrival.max_tokens, stop_token_ids=frozenset({0}))
        if self.config.scenario not in CHAOTIC:
            return params
        random = Random(arrival.seed)
        params = replace(
            params,
            min_tokens=random.choice((0, 0, 2)),
            frequency_penalty=random.choice((0.0, 0.0, 0.5)),
            logprobs=random.choice((None, None, 2)),
            prompt_logprobs=random.choice((None,) * 9 + (1,)),
        )
        # With drafts, some requests have no output tokens.
        has_output = self.config.guesser is None or random.random() < 0.9
        return params if has_output else replace(params, max_tokens=0)

    def _plan_cancellations(self, request: Request) -> None:
        faults, random = self.config.faults, self._random
        if random.random() < faults.cancel_per_request:
            heappush(self._cancels, (self.now_s + random.expovariate(2.0), request.request_id))
        if faults.cancel_sequence_per_request and random.random() < faults.cancel_sequence_per_request:
            index = random.choice(request.continuations).index
            heappush(self._drops, (self.now_s + random.expovariate(2.0), request.request_id, index))
        if random.random() < faults.duplicate_per_request:
            try:
                self.scheduler.submit(request)
            except DuplicateRequestError:
                self.totals.num_duplicates += 1
            else:
                self.ledger.violations.append(f"{request.request_id}: the same id was accepted twice")

    def _cancel_due(self) -> None:
        while self._cancels and self._cancels[0][0] <= self.now_s:
            request_id = heappop(self._cancels)[1]
            self.scheduler.cancel(request_id)
            self.ledger.record_cancellation(request_id)
            self.totals.num_cancels += 1
        while self._drops and self._drops[0][0] <= self.now_s:
            _, request_id, index = heappop(self._drops)
            self.scheduler.cancel(request_id, index)
            self.ledger.record_continuation_cancellation(request_id, index)
            self.totals.num_drops += 1

    # -- faults --------------------------------------------------------------------------------------------------------

    def _inject_faults(self) -> None:
        faults, random = self.config.faults, self._random
        if random.random() < 0.5:
            self._cancel_due()
        if faults.preempt_per_step and random.random() < faults.preempt_per_step:
            self.scheduler.preempt_latest()
        if faults.pool_pressure_per_step and random.random() < faults.pool_pressure_per_step:
            self._change_memory()
        if faults.time_jump_per_step and random.random() < faults.time_jump_per_step:
            self.now_s += random.choice((-1.0, 1.0)) * random.random() * 3600.0
            self._retry_times = RetryTimes()

    def _change_memory(self) -> None:
        entry = self._random.choice(list(self.ledger.entries.values())) if self.ledger.entries else None
        draw = self._random.random()
        if draw < 0.05:
            self.memory.clear()
        elif draw < 0.5 or entry is None:
            self.memory.evict(self._random.randint(1, self.config.shape.num_blocks))
        else:
            request, end_s = entry.request, self.now_s + 10 * self._random.random()
            self.memory.pin(request.namespace, request.prompt, end_s, request.tenant)

    def _recover(self) -> None:
        """Replace the crashed worker. The new worker receives every open request with its output tokens."""
        self.totals.absorb(self.scheduler.stats, self.memory.stats())
        self.totals.num_crashes += 1
        # Retry times are lost with the worker, because the simulation has no server process that survives a crash.
        self._retry_times = RetryTimes()
        self.now_s += 1.0
        # The crashed worker may not have reported the end of cancelled requests, so they are cancelled again.
        cancellations = self.ledger.open_cancellations()
        self._start_worker()
        for request in self.ledger.unfinished():
            self.scheduler.restore(request)
        for request_id, index in cancellations:
            self.scheduler.cancel(request_id, index)
        self._take_events(self.scheduler.take_events())

    # -- clock and ledger ----------------------------------------------------------------------------------------------

    def _take_events(self, events: list[RequestEvent]) -> None:
        for event in events:
            self._log.update(repr(event).encode())
            self.ledger.take(event)
            if isinstance(event, SequenceFinished) and event.retry_after_s is not None:
                self._handle_displacement(event.request_id, event.sequence_index, event.retry_after_s)

    def _handle_displacement(self, request_id: str, index: int, retry_after_s: int) -> None:
        number, arrival = self._workload[request_id]
        if index == 0:
            self.totals.num_displaced += 1
            self._schedule_retry(number, arrival, retry_after_s)
        if request_id in self._retry_times.returned:
            self.ledger.violations.append(f"{request_id}: displaced although it came back after its retry time")

    def _advance_clock(self) -> None:
        """Advance the clock to the next event, because there is nothing to compute."""
        if self.scheduler.live:
            self.totals.num_idle_steps += 1
            self._idle_since_s = self.now_s if self._idle_since_s is None else self._idle_since_s
            self.now_s += 0.1
        elif self._arrivals:
            self.now_s = max(self.now_s, self._arrivals[0][0])

    def _is_wedged(self) -> bool:
        self.totals.is_wedged = self._idle_since_s is not None and self.now_s - self._idle_since_s > WEDGED_AFTER_S
        return self.totals.is_wedged

    def _check_at_rest(self) -> None:
        self.memory.advance(self.now_s + 1e9)
        while self.memory.pins.tables:
            self.memory.advance(self.now_s + 1e9)
        invariants.check_at_rest(self.memory)
        self.totals.absorb(self.scheduler.stats, self.memory.stats())
        for tenant in self.scheduler.queue.tenants.values():
            if tenant.num_live or tenant.num_waiting:
                self.ledger.violations.append(f"at rest: tenant {tenant.name} still has waiting or live requests")
        if self.ledger.open:
            self.ledger.violations.append(f"lost: {sorted(self.ledger.open)[:5]} never received a last event")
