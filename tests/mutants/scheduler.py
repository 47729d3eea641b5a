"""Bugs of queue, policy and scheduler, one small change each."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/core/test_request.py",
    "tests/unit/core/scheduling/test_policy.py",
    "tests/unit/core/scheduling/test_shares.py",
    "tests/unit/core/scheduling/test_promises.py",
    "tests/unit/core/scheduling/test_waiting_queue.py",
    "tests/unit/core/scheduling/test_scheduler.py",
    "tests/property/test_shares.py",
    "tests/property/test_scheduler.py",
    "tests/sim",
)

QUEUE = "core/scheduling/waiting_queue.py"
POLICY = "core/scheduling/policy.py"
SEQUENCE = "core/scheduling/sequence.py"
SCHEDULER = "core/scheduling/scheduler.py"
PLACEMENT = "core/scheduling/placement.py"
ROWS = "core/scheduling/rows.py"
SHARES = "core/scheduling/shares.py"
PROMISES = "core/scheduling/shares.py"

MUTANTS = [
    # -- the queue --
    Mutant(
        "a class is a handicap", QUEUE, "WaitingQueue.key", "arrival_s - self.config.head_start_s", "arrival_s + self.config.head_start_s"
    ),
    Mutant("the youngest class goes first", QUEUE, "WaitingQueue.head", "_, queue = min(oldest", "_, queue = max(oldest"),
    Mutant("service received does not count", QUEUE, "WaitingQueue.charge", "tenant.service += (", "tenant.service += 0.0 * ("),
    Mutant(
        "service is remembered from when it was small",
        QUEUE,
        "ClassQueue.next", "oldest.key == key and tenants[name].service == service:", "oldest.key == key:",
    ),
    Mutant("weights do not count", QUEUE, "WaitingQueue.charge", "num_output_tokens) / tenant.weight", "num_output_tokens) / 1.0"),
    Mutant("output is as cheap as input", QUEUE, "OUTPUT_TOKEN_COST", "OUTPUT_TOKEN_COST = 4", "OUTPUT_TOKEN_COST = 1"),
    Mutant("absence is saved up", QUEUE, "WaitingQueue.enter", "tenant.service = max(tenant.service, level)", "tenant.service += 0.0"),
    Mutant(
        "nothing is kept for other classes",
        SHARES,
        "Shares._reach", "limit = self.bounds.max_places - self.bounds.num_kept * (", "limit = self.bounds.max_places - 0 * (",
    ),
    Mutant(
        "a tenant may fill the queue",
        SHARES,
        "Shares.judge", "if num_held < max(LEAST_SHARE, share) and is_free:", "if is_free:",
    ),
    Mutant("one request too many", SHARES, "Shares.judge", "num_taken < reach.limit", "num_taken <= reach.limit"),
    Mutant("a share has no least", SHARES, "Shares.judge", "if num_held < max(LEAST_SHARE, share) and", "if num_held < share and"),
    Mutant("nobody is displaced", SHARES, "Shares.judge", "if num_held < share and (name", "if False and (name"),
    Mutant(
        "who has its share displaces others", SHARES, "Shares.judge", "if num_held < share and (name", "if num_held <= share and (name"
    ),
    Mutant("who is within its share is displaced", SHARES, "Shares._displaced", "furthest, most = None, 0", "furthest, most = None, -99"),
    Mutant(
        "whoever is last above its share is displaced",
        SHARES,
        "Shares._displaced", "furthest, most = newest, num_above", "furthest, most = newest, 0",
    ),
    Mutant(
        "the oldest is displaced",
        SHARES,
        "TenantUsage.newest_in", "next(reversed(self.places[kind].items()))", "next(iter(self.places[kind].items()))",
    ),
    Mutant("who keeps its place loses it", SHARES, "Shares.settle", "places[name] = None", ""),
    Mutant(
        "the asker does not count among those who share",
        SHARES,
        "Shares._reach", "(0.0 if self._is_sharing(tenant) else self._weight_of(tenant))", "0.0 * (0.0 if self._is_sharing(tenant) else self._weight_of(tenant))",
    ),
    Mutant(
        "shares do not go by weight",
        SHARES,
        "Shares._share", "floor(reach.limit * self._weight_of(tenant) / reach.weight)", "floor(reach.limit / reach.weight)",
    ),
    Mutant("nobody is ever forgotten", SHARES, "Shares.advance", "if last_s > self._now_s - ACTIVE_WITHIN_S:", "if True:"),
    Mutant(
        "who waits longer than a minute has no share",
        SHARES,
        "Shares._is_sharing", "return tenant in self._last_request_s or tenant in self.holders", "return tenant in self._last_request_s",
    ),
    Mutant(
        "another class's last kept places are given away",
        SHARES,
        "Shares._reach", "self._num_taken[one] > self.bounds.num_kept", "self._num_taken[one] >= 0",
    ),
    Mutant("promises of a place are not kept", SHARES, "Shares.judge", "if has_reservation and self", "if False and self"),
    Mutant(
        "promised places have no bound",
        SHARES,
        "Shares.judge", "if has_reservation and self._num_promised < self._max_promised:", "if has_reservation:",
    ),
    Mutant(
        "who was promised a place may lose it",
        SCHEDULER,
        "Scheduler._enter", "wait = self.queue.add_promised if has_reservation else self.queue.add", "wait = self.queue.add",
    ),
    Mutant(
        "what had begun before a crash may lose its place",
        SCHEDULER,
        "Scheduler.restore", "has_reservation=request.has_reservation or request.has_begun", "has_reservation=request.has_reservation",
    ),
    Mutant(
        "who is displaced goes on waiting",
        SCHEDULER,
        "Scheduler._displace", "self._end(live.request.request_id, FinishReason.DISPLACED)", "",
    ),
    Mutant(
        "who is displaced was promised nothing",
        QUEUE,
        "WaitingQueue.displace", "self.promises.reserve(request.tenant, now_s, retry_after_s)", "",
    ),
    Mutant(
        "who is refused was promised nothing",
        QUEUE,
        "WaitingQueue.request_place", "self.promises.reserve(tenant, now_s, room.retry_after_s)", "",
    ),
    Mutant("a promise is kept twice", PROMISES, "RetryReservations.redeem", "del self[tenant]", "pass"),
    Mutant("a promise is good too early", PROMISES, "RetryReservations.redeem", "or now_s < promise.first_due_s:", ":"),
    Mutant("a promise is put off by a refusal", PROMISES, "RetryReservations.reserve", "min(before.first_due_s, due_s)", "due_s"),
    Mutant(
        "the last promise is used up with the first",
        PROMISES,
        "RetryReservations.redeem", "RetryReservation(promise.last_due_s)", "RetryReservation(float('inf'))",
    ),
    Mutant("a promise is good for ever", PROMISES, "RetryReservations.redeem", "return now_s <= promise.until_s", "return True"),
    Mutant("starts are not counted", SCHEDULER, "Scheduler._start", "self.queue.started(self._now_s)", ""),
    Mutant(
        "a preempted sequence frees a place twice",
        QUEUE,
        "WaitingQueue.remove", "if sequence.num_preemptions == 0:", "if True:",
    ),
    Mutant(
        "who is gone stays in the heaps", QUEUE, "ClassQueue.remove", "if len(self._by_service) > 2 * len(self._lines) + 64:", "if False:"
    ),
    # -- the policy --
    Mutant(
        "chunks end anywhere",
        POLICY,
        "chunk_length", "return max(0, (num_computed + budget) // block_size * block_size - num_computed)", "return budget",
    ),
    Mutant(
        "a chunk runs past the fork",
        POLICY,
        "chunk_length", "end = num_known if fork_point is None or num_computed >= fork_point else fork_point", "end = num_known",
    ),
    Mutant(
        "equals displace each other",
        POLICY,
        "may_displace", "RANK[newcomer.request.priority] < RANK", "RANK[newcomer.request.priority] <= RANK",
    ),
    Mutant("a later key displaces an earlier one", POLICY, "may_displace", "and newcomer.key < victim.key", ""),
    Mutant(
        "nobody is ever protected", POLICY, "may_displace", "victim.num_preemptions < PROTECTED_AFTER", "victim.num_preemptions < 99"
    ),
    Mutant(
        "displaced in vain",
        POLICY,
        "victims_for", "if not is_enough(chosen):\nreturn None", "if not is_enough(chosen):\n    return chosen",
    ),
    Mutant("stopped too early", ROWS, "taken_tokens", "and num_before + count > params.min_tokens:", ":"),
    Mutant(
        "one token too many",
        ROWS,
        "taken_tokens", "num_before + count >= params.max_tokens", "num_before + count > params.max_tokens",
    ),
    Mutant(
        "continuations are thought to share everything",
        POLICY,
        "blocks_to_finish_alone", "num_sequences * (num_blocks - num_shared)", "(num_blocks - num_shared)",
    ),
    # -- sequences --
    Mutant(
        "the fork comes one token late",
        SEQUENCE,
        "Sequence.fork_point", "return self.num_prompt_tokens - 1 if", "return self.num_prompt_tokens if",
    ),
    Mutant(
        "limits count from the resumed prompt",
        SEQUENCE,
        "Sequence.__init__", "self.num_prompt_tokens = len(request.prompt)", "self.num_prompt_tokens = len(self.tokens)",
    ),
    # -- the scheduler --
    Mutant(
        "single tokens are not set aside",
        SCHEDULER,
        "Scheduler._room_for_chunks", "self.config.max_step_tokens - num_tokens, fed", "self.config.max_step_tokens, fed",
    ),
    Mutant(
        "chunks cost no budget",
        SCHEDULER,
        "Scheduler.plan", "chunks.take(table_of(sequence).num_computed, num_tokens)", "pass",
    ),
    Mutant(
        "equal cold prompts are computed side by side",
        SCHEDULER,
        "Scheduler._num_tokens_for", "if is_waiting and self.memory.is_computing(table, tokens):", "if False:",
    ),
    Mutant(
        "the most urgent yields",
        SCHEDULER,
        "Scheduler._reserve", "self._preempt(self.running[-1])", "self._preempt(self.running[0])",
    ),
    Mutant("a preempted sequence keeps its blocks", SCHEDULER, "Scheduler._stop_running", "self.memory.release(table_of(sequence))", ""),
    Mutant("places are not given back", PLACEMENT, "Placement.remove", "self.num_places -= 1 + len(sequence.siblings)", ""),
    Mutant(
        "siblings need no place", PLACEMENT, "Placement.add", "self.num_places += 1 + len(sequence.siblings)", "self.num_places += 1"
    ),
    Mutant(
        "cancelled blocks are freed in flight",
        SCHEDULER,
        "Scheduler.cancel", "if self.in_flight is None:\nself._end", "if True:\n    self._end",
    ),
    Mutant(
        "a cancel in flight is forgotten",
        SCHEDULER,
        "Scheduler.apply", "self._end_cancelled()\nreturn self.take_events()", "return self.take_events()",
    ),
    Mutant(
        "one continuation takes the whole request with it",
        SCHEDULER,
        "Scheduler.cancel", "if index is None or sequence.index == index:", "if True:",
    ),
    Mutant(
        "a leader takes those who wait for it with it",
        SCHEDULER,
        "Scheduler._end_alone", "if sequence is leader and leader.siblings:", "if False:",
    ),
    Mutant(
        "a sibling that ended is forked off all the same",
        SCHEDULER,
        "Scheduler._end_alone", "leader.siblings.remove(sequence)", "",
    ),
    Mutant(
        "a sibling that ended keeps its place",
        PLACEMENT,
        "Placement.remove_sibling", "self.num_places -= has_place", "",
    ),
    Mutant(
        "a sibling gives back a place that nobody took",
        PLACEMENT,
        "Placement.remove_sibling", "self.num_places -= has_place", "self.num_places -= 1",
    ),
    Mutant(
        "a head that asks for less is not looked at again",
        PLACEMENT,
        "Placement.remove_sibling", "self._blocked = None\nself.num_places -= has", "self.num_places -= has",
    ),
    Mutant(
        "a cancelled continuation says another token",
        SCHEDULER,
        "Scheduler._apply_row", "if (request.request_id, sequence.index) in self._cancelled:", "if False:",
    ),
    Mutant(
        "who changes places keeps its tokens",
        SEQUENCE,
        "Sequence.swap_answers", "self.tokens, other.tokens = other.tokens, self.tokens", "",
    ),
    Mutant(
        "a leader past the fork point hands on what is its own",
        SCHEDULER,
        "Scheduler._end_alone", "self.placement.fork_if_due(leader)", "pass",
    ),
    Mutant(
        "a failed row is committed",
        SCHEDULER,
        "Scheduler._apply_row", "self.memory.commit(table_of(sequence), 0)", "self.memory.commit(table_of(sequence), len(item.token_ids))",
    ),
    Mutant("what is computed again is charged again", ROWS, "charged_tokens", "- max(first, charged))", "- first)"),
    Mutant("own blocks count as cached", SCHEDULER, "Scheduler._match", "and sequence.num_preemptions == 0:", ":"),
    Mutant("deadlines pass", SCHEDULER, "Scheduler.plan", "self._end_late()", ""),
    Mutant("an old deadline ends a new request", SCHEDULER, "Scheduler._end_late", "and live.request.deadline_s == deadline_s:", ":"),
    Mutant(
        "prompt logprobs read the cache",
        SCHEDULER,
        "Scheduler._reads_cache", "is_owed = sequence.request.params.prompt_logprobs is not None", "is_owed = False",
    ),
    Mutant(
        "no block is left for those who run",
        PLACEMENT,
        "Placement.fits", "num_blocks += self._num_watermark_blocks + needs.num_blocks", "num_blocks += needs.num_blocks",
    ),
    Mutant(
        "what others still need is given away",
        PLACEMENT,
        "Placement.fits", "num_blocks += self._num_watermark_blocks + needs.num_blocks", "num_blocks += self._num_watermark_blocks",
    ),
    Mutant("one seed for all", ROWS, "work_item", "Sampling(params, request.seed,", "Sampling(params, 0,"),
    Mutant("one continuation for all", ROWS, "work_item", "request.seed, sequence.index, end", "request.seed, 0, end"),
    Mutant(
        "penalties see no tokens",
        ROWS,
        "work_item", "known = tuple(tokens) if params.needs_known_tokens else None", "known = None",
    ),
    Mutant(
        "the request ends with its first continuation",
        SCHEDULER,
        "Scheduler._finish", "if live.num_unfinished == 0:", "if live.num_unfinished >= 0:",
    ),
    Mutant(
        "resumed sequences count as hits",
        SCHEDULER,
        "Scheduler._admit", "self.memory.reopen(namespace) if head.num_preemptions else self", "self",
    ),
    Mutant("everybody is admitted at once", SCHEDULER, "Scheduler._admit", "and placement.reaches(head, needs):", ":"),
    Mutant(
        "a head that does not fit is started",
        SCHEDULER,
        "Scheduler._admit", "if victims is None:", "if victims is None and False:",
    ),
    Mutant(
        "a complete answer is asked again",
        SCHEDULER,
        "Scheduler._enter", "rows.taken_tokens(request.params, one.produced, 0, room)[1] for one in request.continuations", "None for _ in request.continuations",
    ),
    Mutant("who is not needed yields as well", POLICY, "victims_for", "chosen = others", "pass"),
    Mutant(
        "a victim's own needs count against the newcomer",
        PLACEMENT,
        "Placement.fits", "num_blocks -= sum(self.num_blocks_wanted(victim) for victim in victims)", "",
    ),
    Mutant(
        "blocks that victims share come free for nobody",
        PLACEMENT,
        "Placement._num_freed_by", "ref_count[block] == count for block", "ref_count[block] == 1 for block",
    ),
    Mutant(
        "cached tokens are added up while the head waits",
        SCHEDULER,
        "Scheduler._admit", "head.num_cached_tokens = num_cached", "",
    ),
    Mutant(
        "prompt logprobs begin anew after each preemption",
        SCHEDULER,
        "Scheduler._match", "tokens = tokens[: self.live[sequence.request.request_id].num_prompt_reported]", "return",
    ),
    Mutant(
        "a clock that goes back lets newcomers pass",
        SCHEDULER,
        "Scheduler.submit", "arrival_s = self._arrivals.at(request.arrival_s)", "arrival_s = request.arrival_s",
    ),
    Mutant(
        "a newcomer to an idle server starts from nothing",
        QUEUE,
        "WaitingQueue.enter", "default=self._service_when_last_left)", "default=0.0)",
    ),
    Mutant(
        "a returning tenant is level with the least served who runs",
        QUEUE,
        "WaitingQueue.enter", "for other in active if other.num_waiting)", "for other in active)",
    ),
    Mutant(
        "the queue holds on to who is gone",
        QUEUE,
        "ClassQueue.remove", "del self._lines[name]\nself._pushed", "self._pushed",
    ),
    Mutant(
        "who comes back goes to the end", QUEUE, "Line.add", "if sequence.key > self._last_key or not self._in_order:", "if True:"
    ),
    Mutant(
        "who came back and left is still first",
        QUEUE,
        "Line.remove", "self._returned_ids.remove(sequence.sequence_id)", "pass",
    ),
    Mutant(
        "who came back waits for all newcomers",
        QUEUE,
        "Line.first", "newcomer is not None and newcomer.key < self._returned[0][0]", "newcomer is not None",
    ),
    Mutant(
        "a head that did not fit is not looked at again",
        PLACEMENT,
        "Placement.remove", "self._blocked = None\nself.num_places -= 1", "self.num_places -= 1",
    ),
    Mutant(
        "another head is taken for the one that did not fit",
        PLACEMENT,
        "Placement.is_still_blocked", "and self._blocked.sequence_id == head.sequence_id", "",
    ),
    Mutant(
        "a head is matched anew at every step",
        PLACEMENT,
        "Placement.can_start", "self.has_place(head) and not self.is_still_blocked(head)", "self.has_place(head)",
    ),
]
