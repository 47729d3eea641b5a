"""Applies grammars to sequences: which tokens are allowed and which are forced. The only module that reads grammars.

    collect ─► must_wait? ─► plan ─► masks: allowed tokens per position ─► runner ─► sampled ─► forced tokens after them

The state of a sequence follows from its grammar and output tokens; a matcher only caches it. After a crash or a
preemption, or for one of several continuations, a new matcher is fed the sequence's tokens. For each grammar, one
pristine matcher is kept, whose first mask is already computed; sequences get copies of it.

The duration of a mask depends on the client's grammar. Masks of grammars that were quick so far are computed during the
step. All other masks are computed in a background thread (`grammar_thread`), which also compiles grammars and feeds
known tokens to new matchers. A sequence whose mask is not ready is left out of the plan, without delaying others. All
processor time is charged to the tenant, and a sequence that exceeds its `work_budget` ends with an error.

Forced tokens (the only ones allowed) are appended without sampling, including the end token of a complete output. The
result does not depend on load, but the model might have sampled another tokenization of the forced text. With
log-probabilities, no token is forced, because every token then needs a computed row.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from time import thread_time
from typing import TYPE_CHECKING

from quire.checkpoints.grammar_vocabulary import first_mask, matcher_of
from quire.core import request as core
from quire.core.events import RequestEvent, SequenceFinished
from quire.core.scheduling import sequence as scheduled
from quire.core.step import GRAMMAR_FAILED, NO_MASKS, Masks, RowError, RowResult, StepPlan, StepResult, WorkItem
from quire.core.work_budget import SERVICE_TOKENS_PER_S, WorkAccount, WorkBudget
from quire.engine.grammar_thread import GrammarThread, ThreadWork
from quire.errors import CheckpointError, InvalidParameterError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_CACHED_BYTES = 2 << 20
"""Bound on the total text size of cached grammars (LRU); compiled grammars take about forty times as much memory."""
LIMITS_TOKENS = "[max_tokens="
"""Text in grammars that limit the tokens of a rule; the library cannot roll back the matchers of such grammars."""
SLOW_S = 0.003
"""After one mask that took longer, all masks of a grammar are computed in the background thread."""
MIN_QUICK_MASKS = 64
"""Until this many masks of a grammar are measured, its masks are computed in the background thread as well."""
STEP_S = 0.01
"""Limit on the time per step that slow grammars take to follow sampled tokens and for masks of drafts."""
BRIEF_WAIT_S = 0.003
"""Longest wait of a step for background work that is expected to be brief."""
MAX_FAILURES = 16
"""Number of remembered grammar texts that failed to compile, newest last."""
MAX_OWING_TENANTS = 1024
"""Limit on the number of tenants with uncharged time."""
COMPILE_WAIT_S = 1.0
CATCH_UP_TOKENS = 16
"""Number of known tokens that one piece of background work feeds to a new matcher."""


class _Grammar:
    """A compiled grammar."""

    def __init__(self, text: str, pristine: "LLMatcher", first: bytes) -> None:
        self.text = text
        self.pristine = pristine
        self.first_mask = first
        self.counts_tokens = LIMITS_TOKENS in text
        self.num_masks_measured = 0
        """Number of masks measured so far, of all sequences."""
        self.is_slow = False

    @property
    def is_quick(self) -> bool:
        """Whether masks are computed during the step."""
        return not self.is_slow and self.num_masks_measured >= MIN_QUICK_MASKS

    def record_mask(self, seconds: float) -> None:
        self.num_masks_measured += 1
        self.is_slow = self.is_slow or seconds > SLOW_S


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, grammar: _Grammar, tenant: str) -> None:
        self.grammar = grammar
        self.matcher = grammar.pristine.deep_copy()
        self.num_consumed = 0
        """Output tokens that the matcher has consumed."""
        self.mask: bytes | None = grammar.first_mask
        """Mask of the next position, once computed."""
        self.is_at_work = False
        """Whether a piece of work in the background thread uses the matcher."""
        self.error: RowError | None = None
        """The error with which this sequence ends."""
        self.account = WorkAccount(tenant)
        self.follow_s = 0.0
        """Processor time of the last call of `_follow_tokens`."""
        self.num_true_masks = 1
        """Number of positions of the step (of the drafts and after them) whose masks were computed, not filled up."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Consume tokens; if the grammar forbids one, the matcher is in an error state from then on."""
        self.matcher.consume_tokens(list(tokens))
        self.num_consumed += len(tokens)
        self.mask = None

    def make_mask(self) -> None:
        """Compute the mask of the next position."""
        self.mask = self.matcher.compute_bitmask()

    def masks_of_drafts(self, drafts: Sequence[int], width: int, limit_s: float) -> tuple[bytes, ...]:
        """Return a mask for each draft's position and for the position after the last, computed on a copy so that
        nothing is rolled back. Masks after a forbidden draft, or after `limit_s`, allow all tokens, because tokens
        sampled there are discarded."""
        started_s, matcher, masks = thread_time(), self.matcher.deep_copy(), list[bytes]()
        self.num_true_masks = len(drafts) + 1
        for draft in (*drafts, None):
            is_first = self.mask is not None and not masks
            masks.append((self.mask if is_first and self.mask is not None else matcher.compute_bitmask())[:width])
            if draft is None or not matcher.consume_token(draft):
                break
            if thread_time() - started_s > limit_s:
                self.num_true_masks = len(masks)
                break
        return (*masks, *[b"\xff" * width] * (len(drafts) + 1 - len(masks)))


class GrammarMatchers:
    """Compiles and applies the grammars of one engine's requests."""

    def __init__(self, read_vocabulary: Callable[[], "LLTokenizer"]) -> None:
        self.read_vocabulary = read_vocabulary
        self._opened: tuple[LLTokenizer, LLExecutor] | None = None
        self.grammars: OrderedDict[str, _Grammar] = OrderedDict()
        self._num_bytes = 0
        """Total size of the cached grammar texts."""
        self._failures: OrderedDict[str, str] = OrderedDict()
        """Error messages of the grammars that failed to compile last, by text."""
        self._compiling: set[str] = set()
        self.guides: dict[tuple[str, int], GrammarMatcher] = {}
        """By request id and sequence index."""
        self._owed_s: OrderedDict[str, float] = OrderedDict()
        """Processor time by tenant that is not charged yet; the tenant's next row is charged."""
        self._thread = GrammarThread()
        self._step_s = 0.0
        """Expected time of slow grammars in the step that is being planned."""
        self._now_s = 0.0
        self.budget = WorkBudget()
        """Limits the time of requests, but not of tenants, which take turns in the grammar thread."""
        self.num_forced_tokens = 0
        self.compile_s = 0.0
        self.mask_s = 0.0
        """Processor time of masks, and of following sampled tokens."""

    # -- between steps -------------------------------------------------------------------------------------------------

    def is_compiled(self, request: core.Request) -> bool:
        """Return whether the request's grammar is compiled; if not, start to compile it. Raises InvalidParameterError
        if the compilation failed."""
        text = request.grammar or ""
        if text in self.grammars:
            self.grammars.move_to_end(text)
            return True
        if (failure := self._failures.get(text)) is not None:
            raise InvalidParameterError(failure, "grammar")
        if text not in self._compiling:
            self._compiling.add(text)
            grammars: list[_Grammar] = []
            self._thread.put(
                ThreadWork(
                    request.tenant,
                    request.request_id,
                    lambda: grammars.append(self.compile_text(text)),
                    lambda piece: self._store_grammar(text, grammars, piece),
                )
            )
        return False

    def compile(self, request: core.Request) -> None:
        """Compile the request's grammar and block until it is done. Raises InvalidParameterError if that fails."""
        while not self.is_compiled(request):
            self.wait(COMPILE_WAIT_S)
            self._take_back()

    def collect(self) -> None:
        """Take back finished background work, after a short wait for work that is expected to be brief."""
        if not self._thread.is_idle:
            self._thread.wait_for_brief(BRIEF_WAIT_S)
            self._take_back()

    def _take_back(self) -> None:
        for piece in self._thread.take():
            piece.finish(piece)

    def begin(self, now_s: float) -> None:
        """Reset the time of slow grammars, before a step is planned."""
        self._now_s, self._step_s = now_s, 0.0

    def wait(self, timeout_s: float) -> None:
        """Block until some background work is done, or until the timeout."""
        self._thread.wait_for_any(timeout_s)

    def must_wait(self, sequence: scheduled.Sequence) -> bool:
        """Return whether this sequence must wait for grammar work; if so, the work has been started."""
        if (text := sequence.request.grammar) is None:
            return False
        guide = self.guides.get((sequence.request.request_id, sequence.index))
        if guide is None:
            if (grammar := self.grammars.get(text)) is None:
                return text not in self._failures and not self.is_compiled(sequence.request)
            guide = GrammarMatcher(grammar, sequence.request.tenant)
            self.guides[sequence.request.request_id, sequence.index] = guide
        if guide.error is not None:
            return False  # the sequence ends with its next row
        if guide.is_at_work:
            return True
        if guide.num_consumed < sequence.num_output_tokens:
            self._catch_up(guide, sequence)
            return True
        if guide.grammar.is_quick:
            return False
        if guide.mask is None:
            self._begin_mask(guide, sequence)
            return True
        return not self._reserve_step_time(guide)

    def _reserve_step_time(self, guide: GrammarMatcher) -> bool:
        """Return whether the step has time to follow this grammar, if it takes as long as last time, and reserve it."""
        if self._step_s and self._step_s + guide.follow_s > STEP_S:
            return False
        self._step_s += guide.follow_s
        return True

    @property
    def request_ids(self) -> list[str]:
        """The request whose grammar is in work (at most one id). It counts as in flight if the worker dies."""
        return self._thread.request_ids

    def forget(self, events: Iterable[RequestEvent]) -> None:
        """Drop the matchers of finished sequences."""
        for event in events:
            if isinstance(event, SequenceFinished):
                guide = self.guides.pop((event.request_id, event.sequence_index), None)
                if guide is not None and guide.is_at_work:
                    self._thread.remove(guide)

    def close(self) -> None:
        """Start no more background work."""
        self._thread.close()

    # -- in a step -----------------------------------------------------------------------------------------------------

    def masks(self, plan: StepPlan, planned: Sequence[scheduled.Sequence]) -> Masks:
        """Return masks of allowed tokens for all items that sample with a grammar; `planned`: the plan's sequences."""
        rows = [
            (item, guide)
            for item, sequence in zip(plan.items, planned, strict=True)
            if item.sampling is not None
            and (guide := self.guides.get((sequence.request.request_id, sequence.index))) is not None
            and guide.error is None
        ]
        if not rows:
            return NO_MASKS
        width = -(-self._open()[0].vocab_size // 8)
        masks: dict[int, tuple[bytes, ...]] = {}
        for item, guide in rows:
            guide.num_true_masks = 1 + item.num_drafts
            if not item.num_drafts:
                # Computed one by one on this thread: another thread would have to be woken and has cold caches.
                masks[item.sequence_id] = (self._mask_now(guide)[:width],)
            elif guide.grammar.counts_tokens or not guide.grammar.is_quick:
                masks[item.sequence_id] = self._masks_from_copy(item, guide, width)
        quick = [(item, guide) for item, guide in rows if item.sequence_id not in masks]
        masks |= self._masks_of_drafts(quick, width)
        return {item.sequence_id: masks[item.sequence_id] for item, guide in rows if guide.error is None}

    def apply(self, plan: StepPlan, planned: Sequence[scheduled.Sequence], result: StepResult) -> StepResult:
        """Return the result with forced tokens after the sampled ones, with grammar errors, and with the charges to
        tenants."""
        rows: dict[int, RowResult] = {}
        for item, sequence in zip(plan.items, planned, strict=True):
            row = result.rows[item.sequence_id]
            if sequence.request.grammar is not None and row.token_ids and row.error is None:
                row = rows[item.sequence_id] = self._follow_row(sequence, row)
            if work_tokens := self._charge(sequence.request.tenant):
                rows[item.sequence_id] = row._replace(work_tokens=work_tokens)
        return StepResult(result.step, result.rows | rows) if rows else result

    def _mask_now(self, guide: GrammarMatcher) -> bytes:
        if guide.mask is None:
            started_s = thread_time()
            guide.make_mask()
            self._record_masks(guide, thread_time() - started_s)
        return guide.mask or b""

    def _masks_from_copy(self, item: WorkItem, guide: GrammarMatcher, width: int) -> tuple[bytes, ...]:
        started_s = thread_time()
        masks = guide.masks_of_drafts(item.drafts, width, max(0.0, STEP_S - self._step_s))
        duration_s = thread_time() - started_s
        self._step_s += duration_s
        self._record_masks(guide, duration_s, guide.num_true_masks)
        return masks

    def _masks_of_drafts(
        self, rows: Sequence[tuple[WorkItem, GrammarMatcher]], width: int
    ) -> dict[int, tuple[bytes, ...]]:
        """Return one mask for each draft's position, and one for the position after the last, for each item."""
        if not rows:
            return {}
        import llguidance.numpy as bits  # noqa: PLC0415 - loaded on first use of a grammar

        started_s = thread_time()
        vocabulary, executor = self._open()
        offsets = [0, *accumulate(item.num_drafts + 1 for item, _ in rows)]
        mask = bits.allocate_token_bitmask(offsets[-1], vocabulary.vocab_size)
        requests = [
            (guide.matcher, first, list(item.drafts)) for (item, guide), first in zip(rows, offsets, strict=False)
        ]
        bits.fill_next_token_bitmask_par_with_draft_tokens(executor, requests, mask)
        for item, guide in rows:
            self._record_masks(guide, (thread_time() - started_s) / len(rows), item.num_drafts + 1)
        return {
            item.sequence_id: tuple(mask[row].tobytes()[:width] for row in range(first, first + item.num_drafts + 1))
            for (item, _), first in zip(rows, offsets, strict=False)
        }

    def _follow_row(self, sequence: scheduled.Sequence, row: RowResult) -> RowResult:
        request, params = sequence.request, sequence.request.params
        guide = self.guides.get((request.request_id, sequence.index))
        if guide is None:
            return RowResult(error=_grammar_error("it cannot be compiled"))
        if guide.error is not None:
            return RowResult(error=guide.error)
        is_forced = params.logprobs is None  # with logprobs every token needs its own row
        sampled, started_s = row.token_ids[: guide.num_true_masks], thread_time()
        count, forced, forced_at = self._follow_tokens(guide, sampled, params.stop_token_ids, is_forced=is_forced)
        guide.follow_s = thread_time() - started_s
        self._spend(guide, guide.follow_s, num_units=0)
        if guide.error is not None:
            return RowResult(error=guide.error)
        self.num_forced_tokens += len(forced)
        is_over = guide.matcher.is_stopped() or (*sampled[:count], *forced)[-1] in params.stop_token_ids
        if not is_over and not guide.grammar.is_quick:
            self._begin_mask(guide, sequence)
        return row._replace(token_ids=sampled[:count], forced=forced, forced_at=forced_at)

    def _follow_tokens(
        self, guide: GrammarMatcher, sampled: tuple[int, ...], stop_ids: frozenset[int], *, is_forced: bool
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return how many of the sampled tokens count, the tokens forced after them, and the positions of sampled
        tokens that would have been forced.

        When a token forces others, these replace the tokens sampled in their positions, so that a step with drafts has
        the same result as without. A sampled token that equals the forced one counts as sampled.
        """
        end_ids = [token for token in self._open()[0].eos_tokens if token in stop_ids]
        count, forced_at = 0, list[int]()
        while count < len(sampled):
            token_id, count = sampled[count], count + 1
            if token_id in stop_ids:
                break  # a matcher accepts no tokens after a complete output
            guide.consume([token_id])
            if guide.matcher.is_error():
                break
            if not is_forced:
                continue
            forced = guide.matcher.compute_ff_tokens()
            guide.consume(forced)
            is_complete = guide.matcher.is_stopped() and bool(end_ids)
            forced = [*forced, *end_ids[:is_complete]]
            num_equal = _common_prefix_length(forced, sampled[count:])
            forced_at += range(count, count + num_equal)
            count += num_equal
            if is_complete or num_equal < len(forced):
                return count, tuple(forced[num_equal:]), tuple(forced_at)
        return count, (), tuple(forced_at)

    # -- background work ----------------------------------------------------------------------------------------------

    def _begin_mask(self, guide: GrammarMatcher, sequence: scheduled.Sequence) -> None:
        self._put(guide, sequence, guide.make_mask, lambda piece: self._record_masks(guide, piece.seconds))

    def _catch_up(self, guide: GrammarMatcher, sequence: scheduled.Sequence) -> None:
        """Feed known tokens to a new matcher. Not limited by the work budget: the tokens were within it when they were
        sampled, and the same work may take longer now."""
        first = sequence.num_prompt_tokens + guide.num_consumed
        tokens = sequence.tokens[first : first + CATCH_UP_TOKENS]
        self._put(guide, sequence, lambda: guide.consume(tokens), lambda _piece: self._check_matcher(guide))

    def _put(
        self,
        guide: GrammarMatcher,
        sequence: scheduled.Sequence,
        work: Callable[[], None],
        done: Callable[[ThreadWork], None],
    ) -> None:
        def finish(piece: ThreadWork) -> None:
            guide.is_at_work = False
            if piece.error is not None:
                guide.error = _grammar_error(str(piece.error))
            done(piece)

        guide.is_at_work = True
        request = sequence.request
        self._thread.put(ThreadWork(request.tenant, request.request_id, work, finish, guide, not guide.grammar.is_slow))

    def compile_text(self, text: str) -> _Grammar:
        """Compile a grammar. Runs in the grammar thread. Raises InvalidParameterError if that fails."""
        matcher = matcher_of(self._open()[0], text)
        try:
            return _Grammar(text, matcher, first_mask(matcher))
        except ValueError as error:
            raise InvalidParameterError(f"the grammar cannot be used: {error}", "grammar") from None

    def _store_grammar(self, text: str, grammars: list[_Grammar], piece: ThreadWork) -> None:
        self._compiling.discard(text)
        self.compile_s += piece.seconds
        self._add_owed(piece.tenant, piece.seconds)
        self.budget.spend(WorkAccount(piece.tenant), "grammar_compile", piece.seconds, self._now_s)
        for grammar in grammars:
            self.grammars[text] = grammar
            self._num_bytes += len(text)
        while self._num_bytes > MAX_CACHED_BYTES and len(self.grammars) > 1:
            self._num_bytes -= len(self.grammars.popitem(last=False)[0])
        if piece.error is not None:
            self._failures[text] = str(piece.error)
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)

    def _open(self) -> "tuple[LLTokenizer, LLExecutor]":
        if self._opened is None:
            from llguidance import LLExecutor  # noqa: PLC0415 - loaded on first use of a grammar

            try:
                self._opened = self.read_vocabulary(), LLExecutor(num_threads=1)
            except CheckpointError as error:  # only requests with a grammar fail
                raise InvalidParameterError(f"this model does not support grammars: {error}", "grammar") from error
        return self._opened

    # -- processor time ------------------------------------------------------------------------------------------------

    def _record_masks(self, guide: GrammarMatcher, seconds: float, num_masks: int = 1) -> None:
        guide.grammar.record_mask(seconds / num_masks)
        self._spend(guide, seconds, num_masks)

    def _spend(self, guide: GrammarMatcher, seconds: float, num_units: int) -> None:
        self.mask_s += seconds
        self._add_owed(guide.account.tenant, seconds)
        cut = self.budget.spend(guide.account, "grammar_mask", seconds, self._now_s, num_units)
        self._check_matcher(guide)
        if cut is not None and guide.error is None:
            guide.error = RowError(cut.error.code, f"the work budget was exceeded: {cut.error}")

    @staticmethod
    def _check_matcher(guide: GrammarMatcher) -> None:
        if guide.error is None and guide.matcher.is_error():
            guide.error = _grammar_error(guide.matcher.get_error())

    def _add_owed(self, tenant: str, seconds: float) -> None:
        self._owed_s[tenant] = self._owed_s.get(tenant, 0.0) + seconds
        if len(self._owed_s) > MAX_OWING_TENANTS:
            self._owed_s.popitem(last=False)

    def _charge(self, tenant: str) -> int:
        """Return the tenant's uncharged time in whole tokens; the fraction of a token stays uncharged."""
        owed_s = self._owed_s.get(tenant, 0.0)
        num_tokens = int(owed_s * SERVICE_TOKENS_PER_S)
        if num_tokens:
            self._owed_s[tenant] = owed_s - num_tokens / SERVICE_TOKENS_PER_S
        return num_tokens


def _common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(a, b, strict=False)
    return next((index for index, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _grammar_error(reason: str) -> RowError:
    return RowError(GRAMMAR_FAILED, f"the grammar failed: {reason[:300]}")
