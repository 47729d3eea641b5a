"""Plans steps and applies their results. Time is handed in, never read; the device is the runner's business.

**No phases.** A sequence has computed tokens and known tokens, and every step lets the first catch up with the second
under a token budget. A long prompt, a token just sampled, a resume after preemption, a resume after a crash, several
continuations of one prompt: all are "some tokens not computed yet". There is no prefill phase and no decode phase.

    submit ─► waiting queue ─► plan: admit, then give tokens, most urgent first ─► runner ─► apply: commit, stop, fork

A step is planned in order of urgency. When blocks run out, the latest key is preempted, perhaps the one in need; so
the most urgent sequence always gets on, and ends. One that needs a block that another writes in this very step waits
for it and matches it at the next plan: N equal cold prompts are computed once. What a step has left may go to drafts.
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
from quire.core.scheduling.policy import RequestLimits, check_request, chunk_length, victims_for, within_budget
from quire.core.scheduling.scheduler_config import ActiveRequest, SchedulerConfig, SchedulerStats
from quire.core.scheduling.sequence import Sequence, SequenceStatus, table_of
from quire.core.scheduling.state_checkpoints import keep_behind, run_to_border
from quire.core.scheduling.step_size import Fed, StepRoom, StepSizer
from quire.core.scheduling.waiting_queue import WaitingQueue
from quire.core.step import BlockCopy, RowError, RowResult, StepPlan, StepResult, WorkItem
from quire.errors import DuplicateRequestError, InvariantError, OutOfBlocksError


class NonDecreasingClock:
    """A clock that never goes back, made of one that may: it counts what the other counts forwards.

    other      1.0  2.0  3.0   -50.0  -49.0  -48.0
    this       1.0  2.0  3.0     3.0    4.0    5.0
    """

    __slots__ = ("_behind_s", "_last_s")

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._behind_s = 0.0

    def at(self, now_s: float) -> float:
        """The own time at this moment of the other clock."""
        if now_s < self._last_s:
            self._behind_s += self._last_s - now_s
        self._last_s = now_s
        return now_s + self._behind_s


class Deadlines:
    """When requests must have ended: a heap of times and requests, earliest first.

    The entry of a request that has ended stays until its time, or until most entries are such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, deadline_s: float, request_id: str) -> None:
        """A request must have ended then."""
        heappush(self._heap, (deadline_s, request_id))

    def take_due(self, now_s: float) -> Iterator[tuple[float, str]]:
        """Take out what is due, earliest first."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heappop(self._heap)

    def forget_ended(self, live: Collection[str]) -> None:
        """Drop the entries of requests that are not among these, once they are most."""
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)


Holds = Callable[[Sequence], bool]
"""Whether a running sequence must be left out of the plan that is being made."""


def held_by_nothing(_sequence: Sequence) -> bool:
    """No work beside the step keeps it back."""
    return False


class Scheduler:
    """One model's sequences on one KV memory."""

    def __init__(
        self, config: SchedulerConfig, memory: KVMemory, propose: Propose | None = None, ended: Ended = ignore_ended
    ) -> None:
        config.check(memory.config)
        self.config = config
        self.memory = memory
        self.limits = RequestLimits.of(config, memory.config)
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
        """Request and index of what ends when the step in flight has returned, in the order of the calls."""
        self._events: list[RequestEvent] = []
        self._now_s = 0.0
        self._has_chunks = False
        """The plan in flight feeds more than those that decode."""
        self._arrivals = NonDecreasingClock()
        self._next_sequence_id = 1

    # -- requests come and go ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request, perhaps in the place of one that waits, or raise RequestError or CapacityError."""
        self._check(request)
        # A clock that goes back must not let newcomers pass those that wait, nor stop the time until others may retry.
        arrival_s = self._arrivals.at(request.arrival_s)
        room = self.queue.request_place(request, arrival_s)
        if room.gives_up is not None:
            self._displace(self.live[room.gives_up], arrival_s)
        self._enter(request, arrival_s, has_reservation=room.has_reservation)
        self.queue.charge(request.tenant, request.work_tokens, 0)

    def restore(self, request: Request) -> None:
        """Queue a request that was let in before, with the tokens it had: a crash must not send it away."""
        self._check(request)
        self._enter(request, request.arrival_s, has_reservation=request.has_reservation or request.has_begun)

    def _displace(self, live: ActiveRequest, now_s: float) -> None:
        """It has not begun: another waits in its place, and its client is sent when to retry."""
        live.retry_after_s = self.queue.displace(live.request, now_s)
        self._end(live.request.request_id, FinishReason.DISPLACED)

    def _enter(self, request: Request, arrival_s: float, *, has_reservation: bool) -> None:
        first_id = self._next_sequence_id
        self._next_sequence_id += len(request.continuations)
        sequences = [
            Sequence(at, request, self.queue.key(arrival_s, request.priority, at), one.index, one.produced)
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
        """End a request, or one of its continuations alone, in whatever state; while a step is in flight, when it has
        returned. What is unknown or has ended is ignored."""
        live = self.live.get(request_id)
        # The last comes first: where all end, no sibling has to take over from a leader.
        for sequence in reversed(live.sequences if live is not None else []):
            if index is None or sequence.index == index:
                self._cancelled[request_id, sequence.index] = None
        if self.in_flight is None:
            self._end_cancelled()

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], besides: Sequence | None = None) -> Divergence:
        """Why the next token of this prompt is not in the cache; `besides` is the one in question. Changes nothing."""
        return self.placement.explain(namespace, prompt, besides)

    def preempt_latest(self) -> None:
        """Make the least urgent running sequence yield, if any: for tests and operators, never needed to get on."""
        if self.in_flight is None and self.running:
            self._preempt(self.running[-1])

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[RequestEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    # -- one step ------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float, holds: Holds = held_by_nothing) -> StepPlan:
        """What the next step computes. A plan with items is in flight until `apply`; an empty one is not. Running
        sequences that `holds` names are left out: what they need beside the step is not there yet."""
        if self.in_flight is not None:
            raise InvariantError(f"plan: step {self.in_flight.step} has not returned", code="step_in_flight")
        self._now_s = now_s
        self.memory.advance(now_s)
        self._end_late()
        self._admit()
        held = tuple(one.sequence_id for one in self.running if holds(one))

        items, copies, planned = list[WorkItem](), list[BlockCopy](), list[Sequence]()
        # First those that decode, with the few tokens they have; what is left goes in chunks, to the most urgent first.
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
        """Take in what the step returned: commit, accept tokens, end and fork sequences. Returns all events so far."""
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
        """Start what is next, as long as it would get tokens in this step and has a place and blocks."""
        placement, head = self.placement, self.queue.head()
        if head is None or not placement.can_start(head):
            return  # in most steps nothing can start: what the others need is not added up
        needs = placement.needs()
        while (head := self.queue.head()) is not None and placement.can_start(head) and placement.reaches(head, needs):
            namespace = head.request.namespace
            head.table = self.memory.reopen(namespace) if head.num_preemptions else self.memory.open(namespace)
            num_cached = head.num_cached_tokens
            self._match(head)
            victims = victims_for(head, self.running, lambda victims: placement.fits(head, needs, victims))  # noqa: B023
            if victims is None:
                # Not skipped: the head waits, and all behind it.
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
            self.queue.started(self._now_s)
            self._events.append(self._admitted(sequence))
        self.placement.fork_if_due(sequence)

    def _admitted(self, sequence: Sequence) -> Admitted:
        request = sequence.request
        miss = self.explain(request.namespace, request.prompt, besides=sequence) if request.is_explained else None
        wait_s = self._now_s - request.arrival_s
        return Admitted(request.request_id, 0.0, wait_s, sequence.num_cached_tokens, miss, epoch=request.epoch)

    def _preempt(self, sequence: Sequence) -> None:
        """Give its blocks back, named and most recently used, and let it wait again with the key it has."""
        self._stop_running(sequence)
        sequence.move(SequenceStatus.WAITING)
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.queue.put_back(sequence)
        self._events.append(Preempted(sequence.request.request_id, sequence.index, epoch=sequence.request.epoch))

    def _stop_running(self, sequence: Sequence) -> None:
        self.placement.remove(sequence)
        self.memory.release(table_of(sequence))
        sequence.table = None

    # -- what it computes ----------------------------------------------------------------------------------------------

    def _room_for_chunks(self, decoding: list[int]) -> StepRoom:
        """Of a step in which these decode; the others of those that run take a chunk."""
        self._has_chunks = False
        num_tokens = sum(decoding)
        fed = Fed(num_tokens, 0.0)
        if 0 in decoding:
            pairs = (num * len(one.tokens) for num, one in zip(decoding, self.running, strict=True))
            fed = Fed(num_tokens, float(sum(pairs)))
        return self.sizer.room(self.config.max_step_tokens - num_tokens, fed)

    def _num_tokens_for(self, sequence: Sequence, chunks: StepRoom, num_decoding: int) -> int:
        if sequence.table is None:
            return 0  # it yielded to a more urgent one in this very plan
        table, tokens, block_size = sequence.table, sequence.tokens, self.memory.config.block_size
        num_tokens = num_decoding
        if not num_decoding:
            self._match(sequence)
            if self.memory.states is not None:
                self.placement.fork_if_due(sequence)  # siblings take the state that is there now, not a later one
            budget = chunks.num_tokens(table.num_computed)
            num_tokens = chunk_length(table.num_computed, len(tokens), budget, block_size, sequence.fork_point)
            is_waiting = sequence.num_uncomputed > 1 and self._reads_cache(sequence)
            if is_waiting and self.memory.is_computing(table, tokens):
                return 0
        return num_tokens if self.memory.states is None else run_to_border(sequence, num_tokens)

    def _reserve(self, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], copies: list[BlockCopy]) -> bool:
        """Get blocks; while there are none the latest key yields. False if that is the sequence itself."""
        while (table := sequence.table) is not None:
            keep = None if self.memory.states is None else keep_behind(sequence, num_tokens)
            try:
                copy = self.memory.reserve(table, sequence.tokens, num_tokens, drafts, keep)
            except OutOfBlocksError:
                # In order of urgency the latest key has not been planned yet: nothing in flight is touched.
                self._preempt(self.running[-1])
                continue
            if copy is not None:
                copies.append(copy)
            return True
        return False

    def _match(self, sequence: Sequence) -> None:
        """Take what the cache has by now; tokens found before the first preemption count as cached for the client."""
        table, tokens = table_of(sequence), sequence.tokens
        if not self._reads_cache(sequence):
            # What it owes its client must be computed; what it has reported may be found.
            tokens = tokens[: self.live[sequence.request.request_id].num_prompt_reported]
        if self.memory.states is not None and (point := sequence.fork_point) is not None:
            tokens = tokens[: point + 1]  # a hit must not go beyond that point
        before = table.num_computed
        if self.memory.match(table, tokens) and sequence.num_preemptions == 0:
            num_prompt = sequence.num_prompt_tokens
            sequence.num_cached_tokens += min(table.num_computed, num_prompt) - min(before, num_prompt)

    def _reads_cache(self, sequence: Sequence) -> bool:
        """Not while it owes its client the log-probabilities of prompt tokens: those need every row computed."""
        is_owed = sequence.request.params.prompt_logprobs is not None
        return not is_owed or self.live[sequence.request.request_id].num_prompt_reported >= sequence.num_prompt_tokens

    # -- what came of it -----------------------------------------------------------------------------------------------

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
            # Only now is it known what of the prompt had to be computed: a block may be found on the way.
            live.has_begun = True
            self._events.append(FirstToken(request.request_id, live.leader.num_cached_tokens, epoch=request.epoch))
        chosen = row.token_ids + row.forced if row.forced else row.token_ids
        for at, token_id in enumerate(chosen if len(chosen) == num_taken else chosen[:num_taken]):
            sequence.tokens.append(token_id)
            self._events.append(rows.token_event(sequence, row.logprobs[at] if row.logprobs else None))
        if sequence.siblings:
            self.placement.fork_if_due(sequence)
        if num_taken == 0 and sequence.num_uncomputed == 0:
            reason = FinishReason.LENGTH  # nothing but its prompt was requested
        if reason is not None:
            self._finish(sequence, reason)

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _end_late(self) -> None:
        for deadline_s, request_id in self.deadlines.take_due(self._now_s):
            live = self.live.get(request_id)
            if live is not None and live.request.deadline_s == deadline_s:
                self._end(request_id, FinishReason.DEADLINE)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        """End all of a request that has not ended by itself."""
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
        """End a sequence and no other. Before the fork point all that is computed belongs to the prompt: a leader
        then goes on for its first sibling, and it is the sibling's place that falls empty.
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
        """End a sequence, and the siblings that would have branched off it."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)
        sequence.move(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
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
        self.stats.num_finished += 1
        self._events.append(rows.end_of_request(live))
        self.deadlines.forget_ended(self.live)

    def _check(self, request: Request) -> None:
        if request.request_id in self.live:
            raise DuplicateRequestError(request.request_id)
        check_request(request, *self.limits)
