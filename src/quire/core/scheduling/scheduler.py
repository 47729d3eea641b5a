"""Plans steps and applies their results. Callers pass in the time; a runner does the computation.

**No phases.** A sequence has known tokens, the first of which are already computed; every step computes more of them
within a token budget. A long prompt, a newly sampled token, a resume after preemption or a crash, several continuations
of one prompt: in all cases, some known tokens are not computed yet. There is no prefill phase and no decode phase.

    submit ─► waiting queue ─► plan: admit, then assign tokens, most urgent first ─► runner ─► apply: commit, stop, fork

A step is planned in order of urgency. When blocks run out, the running sequence with the latest key is preempted,
possibly the one that needs blocks; so the most urgent sequence always progresses to its end. If a sequence needs a
block that another one computes in the same step, it waits and finds the block at the next plan, so N equal prompts are
computed once. Tokens and blocks left over may be used for drafts (speculative decoding).
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from heapq import heapify, heappop, heappush

from quire.core.digests import Namespace
from quire.core.divergence import Divergence
from quire.core.events import Admitted, Preempted, RequestEvent
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import FinishReason, Request
from quire.core.scheduling import rows
from quire.core.scheduling.drafts import OnEnd, Propose, draft_budget, ignore_end
from quire.core.scheduling.placement import Placement
from quire.core.scheduling.policy import check_request, chunk_length, reduce_to_budget, victims_for
from quire.core.scheduling.scheduler_config import ActiveRequest, SchedulerConfig, SchedulerStats
from quire.core.scheduling.sequence import Sequence, SequenceStatus, table_of
from quire.core.scheduling.state_checkpoints import checkpoint_after, tokens_to_border
from quire.core.scheduling.step_size import ChunkBudget, StepSizer, TokenLoad
from quire.core.scheduling.waiting_queue import WaitingQueue
from quire.core.step import BlockCopy, RowError, RowResult, StepPlan, StepResult, WorkItem
from quire.errors import DuplicateRequestError, InvariantError, OutOfBlocksError


class NonDecreasingClock:
    """Makes a monotonic clock from an input clock that may be set back; the output then stands still.

    input      1.0  2.0  3.0   -50.0  -49.0  -48.0
    output     1.0  2.0  3.0     3.0    4.0    5.0
    """

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._behind_s = 0.0

    def at(self, now_s: float) -> float:
        """Convert a time of the input clock to a time of the output clock."""
        if now_s < self._last_s:
            self._behind_s += self._last_s - now_s
        self._last_s = now_s
        return now_s + self._behind_s


class Deadlines:
    """A heap of request deadlines, earliest first.

    Entries of ended requests stay until their deadline, or until they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, deadline_s: float, request_id: str) -> None:
        """Add a request's deadline."""
        heappush(self._heap, (deadline_s, request_id))

    def take_due(self, now_s: float) -> Iterator[tuple[float, str]]:
        """Remove and yield the entries that are due, earliest first."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heappop(self._heap)

    def forget_ended(self, live: Collection[str]) -> None:
        """Drop the entries of requests that are not in `live`, once they are the majority."""
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)


MustWait = Callable[[Sequence], bool]
"""A function that returns whether a running sequence must be left out of the current plan."""


def never_waits(_sequence: Sequence) -> bool:
    """Leave out no sequence: the default of `MustWait`."""
    return False


class Scheduler:
    """Schedules the sequences of one model on one KV memory."""

    def __init__(
        self, config: SchedulerConfig, memory: KVMemory, propose: Propose | None = None, on_end: OnEnd = ignore_end
    ) -> None:
        config.check(memory.config)
        self.config = config
        self.memory = memory
        memory.pins.weights = config.queue.tenant_weights
        self.queue = WaitingQueue(config.queue)
        self.placement = Placement(config, memory)
        self.running = self.placement.running
        self.live: dict[str, ActiveRequest] = {}
        self.in_flight: StepPlan | None = None
        self.stats = SchedulerStats()
        self.sizer = StepSizer(config.step_limit_s, memory.config.block_size)
        self.propose = propose
        self.on_end = on_end
        self.planned: list[Sequence] = []
        """The sequences of the plan in flight, in the order of its items."""
        self.deadlines = Deadlines()
        self._cancelled: dict[tuple[str, int], None] = {}
        """Request id and index of continuations to end when the step in flight returns, in order of the calls."""
        self._events: list[RequestEvent] = []
        self._now_s = 0.0
        self._has_chunks = False
        """Whether the plan in flight contains prefill chunks, not only decoding sequences."""
        self._arrivals = NonDecreasingClock()
        self._next_sequence_id = 1

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request, which may displace a waiting request. Raises RequestError or CapacityError."""
        self._check(request)
        # If the clock goes back, new requests must not overtake waiting ones, and retry times must still be reached.
        arrival_s = self._arrivals.at(request.arrival_s)
        grant = self.queue.request_place(request, arrival_s)
        if grant.displaced_name is not None:
            self._displace(self.live[grant.displaced_name], arrival_s)
        self._enter(request, arrival_s, has_reservation=grant.has_reservation)
        self.queue.charge(request.tenant, request.work_tokens, 0)

    def restore(self, request: Request) -> None:
        """Queue a request that an earlier engine had accepted, with its tokens so far, even if no place is free."""
        self._check(request)
        self._enter(request, request.arrival_s, has_reservation=request.has_reservation or request.has_begun)

    def _displace(self, record: ActiveRequest, now_s: float) -> None:
        """End a waiting request whose place goes to another request; its client receives the delay before a retry."""
        record.retry_after_s = self.queue.displace(record.request, now_s)
        self._end(record.request.request_id, FinishReason.DISPLACED)

    def _enter(self, request: Request, arrival_s: float, *, has_reservation: bool) -> None:
        first_id = self._next_sequence_id
        self._next_sequence_id += len(request.continuations)
        sequences = [
            Sequence(sequence_id, request, self.queue.key(request, arrival_s, sequence_id), part.index, part.produced)
            for sequence_id, part in enumerate(request.continuations, first_id)
        ]
        limit = self.config.max_sequence_tokens - len(request.prompt)
        reasons = [rows.token_acceptance(request.params, part.produced, 0, limit)[1] for part in request.continuations]
        unfinished = [sequence for sequence, reason in zip(sequences, reasons, strict=True) if reason is None]
        leader = (unfinished or sequences)[0]
        self.live[request.request_id] = ActiveRequest(
            request, sequences, leader, len(sequences), has_begun=request.has_begun
        )
        self.queue.enter(request.tenant, len(sequences))
        if unfinished:
            leader.siblings = unfinished[1:]
            add = self.queue.add_promised if has_reservation else self.queue.add
            add(leader)
            if request.deadline_s is not None:
                self.deadlines.add(request.deadline_s, request.request_id)
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason is not None:
                self._finish(sequence, reason)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only the continuation with this index, as soon as no step is in flight. Unknown and ended
        requests are ignored."""
        record = self.live.get(request_id)
        # Last continuation first: if all end, no sibling has to replace the leader.
        for sequence in reversed(record.sequences if record is not None else []):
            if index is None or sequence.index == index:
                self._cancelled[request_id, sequence.index] = None
        if self.in_flight is None:
            self._end_cancelled()

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], excluded: Sequence | None = None) -> Divergence:
        """Return the reason for a prompt's first cache miss; `excluded`: its own sequence, if any. Changes nothing."""
        return self.placement.explain(namespace, prompt, excluded)

    def preempt_latest(self) -> None:
        """Preempt the least urgent running sequence, if any. For tests and aborted steps; `plan` does not use it."""
        if self.in_flight is None and self.running:
            self._preempt(self.running[-1])

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[RequestEvent]:
        """Return and clear the events since the last call."""
        events, self._events = self._events, []
        return events

    # -- one step ------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float, must_wait: MustWait = never_waits) -> StepPlan:
        """Plan the next step. A plan with items is in flight until `apply`; an empty plan is not. Running sequences for
        which `must_wait` returns True are left out: they wait for work outside the step, such as a grammar mask."""
        if self.in_flight is not None:
            raise InvariantError(f"plan: expected no step in flight, got {self.in_flight.step}", code="step_in_flight")
        self._now_s = now_s
        self.memory.advance(now_s)
        self._end_overdue()
        self._admit()
        waiting_ids = tuple(sequence.sequence_id for sequence in self.running if must_wait(sequence))

        items, copies, planned = list[WorkItem](), list[BlockCopy](), list[Sequence]()
        # Decoding sequences come first, with their few tokens; the rest of the budget goes to chunks, by urgency.
        counts = [0 if sequence.sequence_id in waiting_ids else sequence.num_decoding for sequence in self.running]
        decoding = reduce_to_budget(counts, self.config.max_step_tokens)
        chunks = self._chunk_budget(decoding)
        budget = draft_budget(self.propose, self.placement, self.memory, self.config)
        for sequence, num_decoding in zip(list(self.running), decoding, strict=True):
            is_waiting = sequence.sequence_id in waiting_ids
            num_tokens = 0 if is_waiting else self._num_tokens_for(sequence, chunks, num_decoding)
            if num_tokens == 0:
                continue
            drafts = () if budget is None else budget.take(sequence, num_tokens)
            if not self._reserve(sequence, num_tokens, drafts, copies):
                continue
            if not num_decoding:
                chunks.take(table_of(sequence).num_computed, num_tokens)
                self._has_chunks = True
            items.append(rows.work_item(sequence, num_tokens, drafts, reads_cache=self._reads_cache(sequence)))
            planned.append(sequence)

        slot_copies, cache_copies = self.memory.slots.pop_copies() if items else ((), ())
        plan = StepPlan(self.stats.num_steps + 1, tuple(copies), tuple(items), slot_copies, cache_copies, waiting_ids)
        if items:
            self.stats.num_steps += 1
            self.in_flight, self.planned = plan, planned
        return plan

    def apply(self, result: StepResult, now_s: float) -> list[RequestEvent]:
        """Apply the result of a step: commit blocks, accept tokens, end and fork sequences. Returns all new events."""
        plan = self.in_flight
        if plan is None or result.step != plan.step or result.rows.keys() != {item.sequence_id for item in plan.items}:
            raise InvariantError(f"apply: expected the step in flight, got {result.step}", code="result_not_planned")
        planned, self.planned, self.in_flight = self.planned, [], None
        if self._events:
            rows.backdate_admissions(self._events, step_s=now_s - self._now_s)
        if self._has_chunks:
            self.sizer.learn(TokenLoad.of(plan.items), now_s - self._now_s)
        self._now_s = now_s
        for item, sequence in zip(plan.items, planned, strict=True):
            self._apply_row(sequence, item, result.rows[item.sequence_id])
        self._end_cancelled()
        return self.take_events()

    # -- running sequences ---------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start sequences from the head of the queue while places, blocks and tokens of this step are left."""
        placement, head = self.placement, self.queue.head()
        if head is None or not placement.may_fit(head):
            return  # the usual case, so `needs` is not computed
        needs = placement.needs()
        while (head := self.queue.head()) is not None and placement.may_fit(head) and placement.has_budget(head, needs):
            namespace = head.request.namespace
            head.table = self.memory.reopen(namespace) if head.num_preemptions else self.memory.open(namespace)
            num_cached = head.num_cached_tokens
            self._match(head)
            fits = partial(placement.fits, head, needs)
            while (victims := victims_for(head, self.running, fits)) is None:
                if self.running or not self.memory.yield_pin():
                    break  # while nothing runs, only pins hold blocks
            if victims is None:
                # The head is not skipped: it waits, and so do all sequences after it.
                self.memory.release(head.table)
                head.table = None
                head.num_cached_tokens = num_cached
                placement.mark_blocked(head)
                return
            for victim in victims:
                self._preempt(victim)
            self._start(head)
            needs = placement.needs() if victims else needs.add(head, placement.num_blocks_wanted(head))

    def _start(self, sequence: Sequence) -> None:
        self.queue.remove(sequence)
        sequence.move(SequenceStatus.RUNNING)
        self.placement.add(sequence)
        record = self.live[sequence.request.request_id]
        if not record.is_admitted:
            record.is_admitted = True
            self.queue.shares.record_departure(self._now_s)  # retry delays are estimated from the rate of departures
            self._events.append(self._admitted_event(sequence))
        self.placement.fork_if_due(sequence)

    def _admitted_event(self, sequence: Sequence) -> Admitted:
        request = sequence.request
        miss = self.explain(request.namespace, request.prompt, excluded=sequence) if request.is_explained else None
        wait_s = self._now_s - request.arrival_s
        return Admitted(request.request_id, 0.0, wait_s, sequence.num_cached_tokens, miss, epoch=request.epoch)

    def _preempt(self, sequence: Sequence) -> None:
        """Free the sequence's blocks, which stay cached as most recently used, and requeue it with its old key."""
        self._stop_running(sequence)
        sequence.move(SequenceStatus.WAITING)
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.queue.wait(sequence)
        self._events.append(Preempted(sequence.request.request_id, sequence.index, epoch=sequence.request.epoch))

    def _stop_running(self, sequence: Sequence) -> None:
        self.placement.remove(sequence)
        self.memory.release(table_of(sequence))
        sequence.table = None

    # -- tokens and blocks of a step -----------------------------------------------------------------------------------

    def _chunk_budget(self, decoding: list[int]) -> ChunkBudget:
        """Return the budget for prefill chunks; `decoding`: tokens of each running sequence if it decodes, else 0."""
        self._has_chunks = False
        num_tokens = sum(decoding)
        load = TokenLoad(num_tokens, 0.0)
        if 0 in decoding:
            pairs = (count * len(sequence.tokens) for count, sequence in zip(decoding, self.running, strict=True))
            load = TokenLoad(num_tokens, float(sum(pairs)))
        return self.sizer.chunk_budget(self.config.max_step_tokens - num_tokens, load)

    def _num_tokens_for(self, sequence: Sequence, chunks: ChunkBudget, num_decoding: int) -> int:
        if sequence.table is None:
            return 0  # it was preempted during this plan
        table, tokens, block_size = sequence.table, sequence.tokens, self.memory.config.block_size
        num_tokens = num_decoding
        if not num_decoding:
            self._match(sequence)
            if self.memory.states is not None:
                self.placement.fork_if_due(sequence)  # siblings copy the state at this point, not a later one
            budget = chunks.num_tokens(table.num_computed)
            num_tokens = chunk_length(table.num_computed, len(tokens), budget, block_size, sequence.fork_point)
            is_waiting = sequence.num_uncomputed > 1 and self._reads_cache(sequence)
            if is_waiting and self.memory.is_computing(table, tokens):
                return 0
        return num_tokens if self.memory.states is None else tokens_to_border(sequence, num_tokens)

    def _reserve(self, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], copies: list[BlockCopy]) -> bool:
        """Reserve blocks, preempting the latest key while too few are free; False if that preempted `sequence`."""
        while (table := sequence.table) is not None:
            keep = None if self.memory.states is None else checkpoint_after(sequence, num_tokens)
            try:
                copy = self.memory.reserve(table, sequence.tokens, num_tokens, drafts, keep)
            except OutOfBlocksError:
                # A sequence that runs alone needs blocks of pins. Otherwise the latest key yields: planning goes by
                # urgency, so it is not in the plan yet.
                if len(self.running) > 1 or not self.memory.yield_pin():
                    self._preempt(self.running[-1])
                continue
            if copy is not None:
                copies.append(copy)
            return True
        return False

    def _match(self, sequence: Sequence) -> None:
        """Use newly cached blocks. Hits before the sequence's first preemption are reported to the client as cached."""
        table, tokens = table_of(sequence), sequence.tokens
        if not self._reads_cache(sequence):
            # Prompt rows whose log-probabilities were not reported yet must be computed; reported ones may be cached.
            tokens = tokens[: self.live[sequence.request.request_id].num_prompt_reported]
        if self.memory.states is not None and (point := sequence.fork_point) is not None:
            tokens = tokens[: point + 1]  # a hit must not pass the fork point
        num_before = table.num_computed
        if not self.memory.match(table, tokens):
            return
        if sequence.num_preemptions == 0:
            num_prompt = sequence.num_prompt_tokens
            sequence.num_cached_tokens += min(table.num_computed, num_prompt) - min(num_before, num_prompt)
        if sequence.status is SequenceStatus.RUNNING:  # otherwise its `Admitted` event follows
            self._events += rows.progress_events(sequence, num_before)

    def _reads_cache(self, sequence: Sequence) -> bool:
        """Return whether the sequence may use the cache: not while requested prompt log-probabilities are missing."""
        is_scored = sequence.request.params.prompt_logprobs is not None
        return not is_scored or self.live[sequence.request.request_id].num_prompt_reported >= sequence.num_prompt_tokens

    # -- results -------------------------------------------------------------------------------------------------------

    def _apply_row(self, sequence: Sequence, item: WorkItem, row: RowResult) -> None:
        if row.work_tokens:
            self.queue.charge(sequence.request.tenant, row.work_tokens, 0)
        if row.error is not None:
            self.memory.commit(table_of(sequence), 0)
            self._finish(sequence, FinishReason.ERROR, row.error)
            return
        request, stats, max_tokens = sequence.request, self.stats, self.config.max_sequence_tokens
        num_accepted, reason = rows.row_acceptance(sequence, item, row.token_ids, row.forced, max_tokens)
        num_computed = item.num_true_tokens(min(num_accepted, len(row.token_ids)))
        num_written = self.memory.commit(table_of(sequence), num_computed)
        self._events += rows.progress_events(sequence, item.first_position)
        num_new_prompt, num_recomputed = rows.charge_tokens(sequence, item.first_position, num_computed)
        stats.num_computed_tokens += num_computed
        stats.num_recomputed_tokens += num_recomputed
        stats.num_output_tokens += num_accepted
        stats.num_forced_tokens += max(0, num_accepted - len(row.token_ids))
        if len(item.token_ids) > 1 and (num_drafts := item.num_drafts):
            stats.num_draft_tokens += num_drafts
            stats.num_accepted_tokens += rows.update_acceptance_rate(sequence, item, num_computed)
        if num_new_prompt or num_accepted:
            self.queue.charge(request.tenant, num_new_prompt, num_accepted)
        if item.scoring is not None:
            self._events += rows.prompt_logprob_events(self.live[request.request_id], item.scoring.first_position, row)
        if (request.request_id, sequence.index) in self._cancelled:
            return
        record = self.live[request.request_id]
        record.num_written_blocks += num_written
        if num_accepted and not record.has_begun:
            record.has_begun = True
            num_pinned = self._pin_prompt(sequence)
            self._events.append(rows.first_token_event(record, self.memory.config.block_size, num_pinned))
        new_tokens = row.token_ids + row.forced if row.forced else row.token_ids
        for index, token_id in enumerate(new_tokens if len(new_tokens) == num_accepted else new_tokens[:num_accepted]):
            sequence.tokens.append(token_id)
            self._events.append(rows.token_event(sequence, row, index))
        if sequence.siblings:
            self.placement.fork_if_due(sequence)
        if num_accepted == 0 and sequence.num_uncomputed == 0:
            reason = FinishReason.LENGTH  # max_tokens is 0: only the prompt was requested
        if reason is not None:
            self._finish(sequence, reason)

    def _pin_prompt(self, sequence: Sequence) -> int:
        """Pin the requested prefixes of a computed prompt; returns the number of tokens that the longest pin holds."""
        request, table = sequence.request, table_of(sequence)
        pins = [
            self.memory.pin_table(table, pin.num_tokens, self._now_s + pin.keep_s, request.tenant)
            for pin in request.pins
        ]
        return max((pin.num_tokens for pin in pins), default=0)

    # -- the end of sequences ------------------------------------------------------------------------------------------

    def _end_overdue(self) -> None:
        for deadline_s, request_id in self.deadlines.take_due(self._now_s):
            record = self.live.get(request_id)
            if record is not None and record.request.deadline_s == deadline_s:
                self._end(request_id, FinishReason.DEADLINE)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        """End all unfinished continuations of a request."""
        record = self.live.get(request_id)
        for sequence in record.sequences if record is not None else ():
            if sequence.status is not SequenceStatus.FINISHED:
                self._finish(sequence, reason)

    def _end_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, {}
        for request_id, index in cancelled:
            record = self.live.get(request_id)
            for sequence in record.sequences if record is not None else ():
                if sequence.index == index and sequence.status is not SequenceStatus.FINISHED:
                    self._end_continuation(sequence)
                    break

    def _end_continuation(self, sequence: Sequence) -> None:
        """End a single continuation. A leader with unforked siblings computes the prompt for them, so it takes over the
        role of its first sibling, and the sibling ends in its place.
        """
        leader = self.live[sequence.request.request_id].leader
        if sequence is leader and leader.table is not None:
            self.placement.fork_if_due(leader)
        if sequence is leader and leader.siblings:
            sequence = leader.siblings[0]
            leader.swap_roles(sequence)
        if sequence in leader.siblings:
            leader.siblings.remove(sequence)
            self.placement.remove_sibling(has_place=leader.status is SequenceStatus.RUNNING)
        self._finish(sequence, FinishReason.CANCELLED)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: RowError | None = None) -> None:
        """End a sequence, and its siblings that are not forked yet."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)
        sequence.move(SequenceStatus.FINISHED)
        self.on_end(sequence)
        siblings, sequence.siblings = sequence.siblings, []
        record = self.live[sequence.request.request_id]
        self.queue.leave(record.request.tenant)
        self._events.append(rows.sequence_finished_event(sequence, record, reason, error))
        for sibling in siblings:
            self._finish(sibling, reason, error)
        record.num_unfinished -= 1
        if record.num_unfinished == 0:
            self._finish_request(record)

    def _finish_request(self, record: ActiveRequest) -> None:
        del self.live[record.request.request_id]
        self._events.append(rows.request_finished_event(record))
        self.deadlines.forget_ended(self.live)

    def check(self, request: Request) -> None:
        """Raise RequestError if the request could not finish even on an idle engine."""
        config, block_size = self.config, self.memory.config.block_size
        check_request(
            request, config.max_sequence_tokens, config.max_running, block_size, self.memory.config.num_blocks
        )

    def _check(self, request: Request) -> None:
        if request.request_id in self.live:
            raise DuplicateRequestError(request.request_id)
        self.check(request)
