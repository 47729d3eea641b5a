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
from heapq import heapify, heappop, heappush

from quire.core.digests import Namespace
from quire.core.divergence import Divergence
from quire.core.events import Admitted, FirstToken, Preempted, RequestEvent
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import FinishReason, Request
from quire.core.scheduling import rows
from quire.core.scheduling.drafts import Ended, Propose, draft_room, ignore_ended
from quire.core.scheduling.placement import Placement
from quire.core.scheduling.policy import check_request, chunk_length, victims_for, within_budget
from quire.core.scheduling.scheduler_config import ActiveRequest, SchedulerConfig, SchedulerStats
from quire.core.scheduling.sequence import Sequence, SequenceStatus, table_of
from quire.core.scheduling.state_checkpoints import keep_behind, run_to_border
from quire.core.scheduling.step_size import Fed, StepRoom, StepSizer
from quire.core.scheduling.waiting_queue import WaitingQueue
from quire.core.step import BlockCopy, RowError, RowResult, StepPlan, StepResult, WorkItem
from quire.errors import DuplicateRequestError, InvariantError, OutOfBlocksError


class NonDecreasingClock:
    """Makes a monotonic clock from an input clock that may go back: it stands still when the input goes back.

    input      1.0  2.0  3.0   -50.0  -49.0  -48.0
    output     1.0  2.0  3.0     3.0    4.0    5.0
    """

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._behind_s = 0.0

    def at(self, now_s: float) -> float:
        """Return the output time for this time of the input clock."""
        if now_s < self._last_s:
            self._behind_s += self._last_s - now_s
        self._last_s = now_s
        return now_s + self._behind_s


class Deadlines:
    """A heap of request deadlines, earliest first.

    Entries of ended requests stay until their deadline, or until most entries are of ended requests.
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
        """Once most entries are of requests that are not in `live`, drop these entries."""
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)


Holds = Callable[[Sequence], bool]
"""A function that returns whether a running sequence must be left out of the current plan."""


def held_by_nothing(_sequence: Sequence) -> bool:
    """Leave out no sequence: the default `Holds`."""
    return False


class Scheduler:
    """Schedules the sequences of one model on one KV memory."""

    def __init__(
        self, config: SchedulerConfig, memory: KVMemory, propose: Propose | None = None, ended: Ended = ignore_ended
    ) -> None:
        config.check(memory.config)
        self.config = config
        self.memory = memory
        self.num_usable_blocks = memory.config.num_blocks - memory.config.pin_budget_blocks
        self.queue = WaitingQueue(config.queue)
        self.placement = Placement(config, memory)
        self.running = self.placement.running
        self.live: dict[str, ActiveRequest] = {}
        self.in_flight: StepPlan | None = None
        self.stats = SchedulerStats()
        self.sizer = StepSizer(config.step_limit_s, memory.config.block_size)
        self.propose = propose
        self.ended = ended
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

    # -- requests come and go ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request, which may displace a waiting one. Raises RequestError or CapacityError."""
        self._check(request)
        # If the clock goes back, new requests must not overtake waiting ones, and retry times must still be reached.
        arrival_s = self._arrivals.at(request.arrival_s)
        room = self.queue.request_place(request, arrival_s)
        if room.gives_up is not None:
            self._displace(self.live[room.gives_up], arrival_s)
        self._enter(request, arrival_s, has_reservation=room.has_reservation)
        self.queue.charge(request.tenant, request.work_tokens, 0)

    def restore(self, request: Request) -> None:
        """Queue a request that was accepted before, with its tokens so far: after a crash it must not be rejected."""
        self._check(request)
        self._enter(request, request.arrival_s, has_reservation=request.has_reservation or request.has_begun)

    def _displace(self, live: ActiveRequest, now_s: float) -> None:
        """End a waiting request whose place goes to another one; its client receives the delay before a retry."""
        live.retry_after_s = self.queue.displace(live.request, now_s)
        self._end(live.request.request_id, FinishReason.DISPLACED)

    def _enter(self, request: Request, arrival_s: float, *, has_reservation: bool) -> None:
        first_id = self._next_sequence_id
        self._next_sequence_id += len(request.continuations)
        sequences = [
            Sequence(at, request, self.queue.key(request, arrival_s, at), one.index, one.produced)
            for at, one in enumerate(request.continuations, first_id)
        ]
        room = self.config.max_sequence_tokens - len(request.prompt)
        reasons = [rows.taken_tokens(request.params, one.produced, 0, room)[1] for one in request.continuations]
        unfinished = [sequence for sequence, reason in zip(sequences, reasons, strict=True) if reason is None]
        leader = (unfinished or sequences)[0]
        self.live[request.request_id] = ActiveRequest(
            request, sequences, leader, len(sequences), has_begun=request.has_begun
        )
        self.queue.enter(request.tenant, len(sequences))
        if unfinished:
            leader.siblings = unfinished[1:]
            wait = self.queue.add_promised if has_reservation else self.queue.add
            wait(leader)
            if request.deadline_s is not None:
                self.deadlines.add(request.deadline_s, request.request_id)
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason is not None:
                self._finish(sequence, reason)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only the continuation with this index; if a step is in flight, after it has returned.
        Unknown and ended requests are ignored."""
        live = self.live.get(request_id)
        # Last continuation first: if all end, no sibling has to replace the leader.
        for sequence in reversed(live.sequences if live is not None else []):
            if index is None or sequence.index == index:
                self._cancelled[request_id, sequence.index] = None
        if self.in_flight is None:
            self._end_cancelled()

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], besides: Sequence | None = None) -> Divergence:
        """Return the reason for a prompt's first cache miss; `besides` is its own sequence. No side effects."""
        return self.placement.explain(namespace, prompt, besides)

    def preempt_latest(self) -> None:
        """Preempt the least urgent running sequence, if any. For tests and operators; scheduling does not need it."""
        if self.in_flight is None and self.running:
            self._preempt(self.running[-1])

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[RequestEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    # -- one step ------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float, holds: Holds = held_by_nothing) -> StepPlan:
        """Plan the next step. A plan with items is in flight until `apply`; an empty plan is not. Running sequences for
        which `holds` returns True are left out, because they wait for other work, such as a grammar mask."""
        if self.in_flight is not None:
            raise InvariantError(f"plan: step {self.in_flight.step} has not returned", code="step_in_flight")
        self._now_s = now_s
        self.memory.advance(now_s)
        self._end_late()
        self._admit()
        held = tuple(one.sequence_id for one in self.running if holds(one))

        items, copies, planned = list[WorkItem](), list[BlockCopy](), list[Sequence]()
        # Decoding sequences come first, with their few tokens; the rest of the budget goes to chunks, by urgency.
        wanted = [0 if one.sequence_id in held else one.num_decoding for one in self.running]
        decoding = within_budget(wanted, self.config.max_step_tokens)
        chunks = self._room_for_chunks(decoding)
        room = draft_room(self.propose, self.placement, self.memory, self.config)
        for sequence, num_decoding in zip(list(self.running), decoding, strict=True):
            is_held = sequence.sequence_id in held
            num_tokens = 0 if is_held else self._num_tokens_for(sequence, chunks, num_decoding)
            if num_tokens == 0:
                continue
            drafts = () if room is None else room.take(sequence, num_tokens)
            if not self._reserve(sequence, num_tokens, drafts, copies):
                continue
            if not num_decoding:
                chunks.take(table_of(sequence).num_computed, num_tokens)
                self._has_chunks = True
            items.append(rows.work_item(sequence, num_tokens, drafts, reads_cache=self._reads_cache(sequence)))
            planned.append(sequence)

        slot_copies, keeps = self.memory.slots.take_moves() if items else ((), ())
        plan = StepPlan(self.stats.num_steps + 1, tuple(copies), tuple(items), slot_copies, keeps, held)
        if items:
            self.stats.num_steps += 1
            self.in_flight, self.planned = plan, planned
        return plan

    def apply(self, result: StepResult, now_s: float) -> list[RequestEvent]:
        """Apply the result of a step: commit blocks, accept tokens, end and fork sequences. Returns all new events."""
        plan = self.in_flight
        if plan is None or result.step != plan.step or result.rows.keys() != {item.sequence_id for item in plan.items}:
            raise InvariantError(f"apply: step {result.step} is not the one in flight", code="result_not_planned")
        planned, self.planned, self.in_flight = self.planned, [], None
        if self._events:
            rows.backdate_admissions(self._events, step_s=now_s - self._now_s)
        if self._has_chunks:
            self.sizer.learn(Fed.of(plan.items), now_s - self._now_s)
        self._now_s = now_s
        for item, sequence in zip(plan.items, planned, strict=True):
            self._apply_row(sequence, item, result.rows[item.sequence_id])
        self._end_cancelled()
        return self.take_events()

    # -- what runs -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start sequences from the head of the queue while each gets a place, blocks, and tokens in this step."""
        placement, head = self.placement, self.queue.head()
        if head is None or not placement.can_start(head):
            return  # the usual case, so `needs` is not computed
        needs = placement.needs()
        while (head := self.queue.head()) is not None and placement.can_start(head) and placement.reaches(head, needs):
            namespace = head.request.namespace
            head.table = self.memory.reopen(namespace) if head.num_preemptions else self.memory.open(namespace)
            num_cached = head.num_cached_tokens
            self._match(head)
            victims = victims_for(head, self.running, lambda victims: placement.fits(head, needs, victims))  # noqa: B023
            if victims is None:
                # The head is not skipped: it waits, and so do all sequences after it.
                self.memory.release(head.table)
                head.table = None
                head.num_cached_tokens = num_cached
                placement.block(head)
                return
            for victim in victims:
                self._preempt(victim)
            self._start(head)
            needs = placement.needs() if victims else needs.with_one_more(head, placement.num_blocks_wanted(head))

    def _start(self, sequence: Sequence) -> None:
        self.queue.remove(sequence)
        sequence.move(SequenceStatus.RUNNING)
        self.placement.add(sequence)
        live = self.live[sequence.request.request_id]
        if not live.is_admitted:
            live.is_admitted = True
            self.queue.shares.left(self._now_s)  # the rate of departures predicts waiting times
            self._events.append(self._admitted(sequence))
        self.placement.fork_if_due(sequence)

    def _admitted(self, sequence: Sequence) -> Admitted:
        request = sequence.request
        miss = self.explain(request.namespace, request.prompt, besides=sequence) if request.is_explained else None
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

    def _room_for_chunks(self, decoding: list[int]) -> StepRoom:
        """Return the budget for prefill chunks of a step whose decoding sequences take `decoding` tokens."""
        self._has_chunks = False
        num_tokens = sum(decoding)
        fed = Fed(num_tokens, 0.0)
        if 0 in decoding:
            pairs = (num * len(one.tokens) for num, one in zip(decoding, self.running, strict=True))
            fed = Fed(num_tokens, float(sum(pairs)))
        return self.sizer.room(self.config.max_step_tokens - num_tokens, fed)

    def _num_tokens_for(self, sequence: Sequence, chunks: StepRoom, num_decoding: int) -> int:
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
        return num_tokens if self.memory.states is None else run_to_border(sequence, num_tokens)

    def _reserve(self, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], copies: list[BlockCopy]) -> bool:
        """Reserve blocks, preempting the latest key while too few are free; False if that was the sequence itself."""
        while (table := sequence.table) is not None:
            keep = None if self.memory.states is None else keep_behind(sequence, num_tokens)
            try:
                copy = self.memory.reserve(table, sequence.tokens, num_tokens, drafts, keep)
            except OutOfBlocksError:
                # Planning goes by urgency, so the latest key is not in the plan yet.
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
        before = table.num_computed
        if self.memory.match(table, tokens) and sequence.num_preemptions == 0:
            num_prompt = sequence.num_prompt_tokens
            sequence.num_cached_tokens += min(table.num_computed, num_prompt) - min(before, num_prompt)

    def _reads_cache(self, sequence: Sequence) -> bool:
        """Return whether the sequence may use the cache: not while requested prompt log-probabilities are missing."""
        is_owed = sequence.request.params.prompt_logprobs is not None
        return not is_owed or self.live[sequence.request.request_id].num_prompt_reported >= sequence.num_prompt_tokens

    # -- results -------------------------------------------------------------------------------------------------------

    def _apply_row(self, sequence: Sequence, item: WorkItem, row: RowResult) -> None:
        if row.work_tokens:
            self.queue.charge(sequence.request.tenant, row.work_tokens, 0)
        if row.error is not None:
            self.memory.commit(table_of(sequence), 0)
            self._finish(sequence, FinishReason.ERROR, row.error)
            return
        request, stats = sequence.request, self.stats
        num_taken, reason = rows.take_row(sequence, item, row.token_ids, row.forced, self.config.max_sequence_tokens)
        num_computed = item.num_true_tokens(min(num_taken, len(row.token_ids)))
        self.memory.commit(table_of(sequence), num_computed)
        num_new_prompt, num_again = rows.charged_tokens(sequence, item.first_position, num_computed)
        stats.num_computed_tokens += num_computed
        stats.num_recomputed_tokens += num_again
        stats.num_output_tokens += num_taken
        stats.num_forced_tokens += max(0, num_taken - len(row.token_ids))
        if len(item.token_ids) > 1 and (num_drafts := item.num_drafts):
            stats.num_draft_tokens += num_drafts
            stats.num_accepted_tokens += rows.num_right_drafts(sequence, item, num_computed)
        if num_new_prompt or num_taken:
            self.queue.charge(request.tenant, num_new_prompt, num_taken)
        if item.scoring is not None:
            self._events += rows.prompt_report(self.live[request.request_id], item.scoring.first_position, row)
        if (request.request_id, sequence.index) in self._cancelled:
            return
        if num_taken and not (live := self.live[request.request_id]).has_begun:
            # Only now is the number of cached prompt tokens final: chunks may find more cached blocks on the way.
            live.has_begun = True
            self._events.append(FirstToken(request.request_id, live.leader.num_cached_tokens, epoch=request.epoch))
        chosen = row.token_ids + row.forced if row.forced else row.token_ids
        for at, token_id in enumerate(chosen if len(chosen) == num_taken else chosen[:num_taken]):
            sequence.tokens.append(token_id)
            self._events.append(rows.token_event(sequence, row.logprobs[at] if row.logprobs else None))
        if sequence.siblings:
            self.placement.fork_if_due(sequence)
        if num_taken == 0 and sequence.num_uncomputed == 0:
            reason = FinishReason.LENGTH  # max_tokens is 0: only the prompt was requested
        if reason is not None:
            self._finish(sequence, reason)

    # -- the end of sequences ------------------------------------------------------------------------------------------

    def _end_late(self) -> None:
        for deadline_s, request_id in self.deadlines.take_due(self._now_s):
            live = self.live.get(request_id)
            if live is not None and live.request.deadline_s == deadline_s:
                self._end(request_id, FinishReason.DEADLINE)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        """End all unfinished continuations of a request."""
        live = self.live.get(request_id)
        for sequence in live.sequences if live is not None else ():
            if sequence.status is not SequenceStatus.FINISHED:
                self._finish(sequence, reason)

    def _end_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, {}
        for request_id, index in cancelled:
            live = self.live.get(request_id)
            for sequence in live.sequences if live is not None else ():
                if sequence.index == index and sequence.status is not SequenceStatus.FINISHED:
                    self._end_alone(sequence)
                    break

    def _end_alone(self, sequence: Sequence) -> None:
        """End one continuation and no other. Before the fork point, the leader computes the prompt for its siblings: it
        then swaps roles with its first sibling, and the sibling's place becomes free.
        """
        leader = self.live[sequence.request.request_id].leader
        if sequence is leader and leader.table is not None:
            self.placement.fork_if_due(leader)
        if sequence is leader and leader.siblings:
            sequence = leader.siblings[0]
            leader.swap_answers(sequence)
        if sequence in leader.siblings:
            leader.siblings.remove(sequence)
            self.placement.remove_sibling(has_place=leader.status is SequenceStatus.RUNNING)
        self._finish(sequence, FinishReason.CANCELLED)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: RowError | None = None) -> None:
        """End a sequence, and the siblings that have not branched off it yet."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)
        sequence.move(SequenceStatus.FINISHED)
        self.ended(sequence)
        siblings, sequence.siblings = sequence.siblings, []
        live = self.live[sequence.request.request_id]
        self.queue.leave(live.request.tenant)
        self._events.append(rows.end_of_sequence(sequence, live, reason, error))
        for sibling in siblings:
            self._finish(sibling, reason, error)
        live.num_unfinished -= 1
        if live.num_unfinished == 0:
            self._finish_request(live)

    def _finish_request(self, live: ActiveRequest) -> None:
        del self.live[live.request.request_id]
        self._events.append(rows.end_of_request(live))
        self.deadlines.forget_ended(self.live)

    def check(self, request: Request) -> None:
        """Raise RequestError if the request could not finish even alone."""
        config, block_size = self.config, self.memory.config.block_size
        check_request(request, config.max_sequence_tokens, config.max_running, block_size, self.num_usable_blocks)

    def _check(self, request: Request) -> None:
        if request.request_id in self.live:
            raise DuplicateRequestError(request.request_id)
        self.check(request)
