"""What grammars allow and force, sequence by sequence: the one room that knows what is in a request's grammar.

    collect ─► holds? ─► plan ─► masks: which tokens may stand at each place ─► runner ─► chosen ─► forced: what follows

A grammar and the tokens produced so far are all there is to know. So a matcher here is a shortcut and never the truth:
after a crash, a preemption, or for one of several answers, one is made anew of the grammar and fed the tokens that the
sequence has. One pristine matcher for each grammar is kept, for it has done what the first mask costs; sequences get
copies of it.

How long a mask takes follows from what a client wrote. Those of a grammar that has shown itself quick are made in the
step; all others in a thread beside it (`grammar_thread`), as is compiling, and following again what was known before a
crash. A sequence whose mask is not there is held: the plan leaves it out, and its neighbours lose nothing. Every second
is charged to its tenant, and a sequence that takes more than `work_budget` allows ends with its error.

What is forced is appended without being sampled, and the end of an answer that is complete is forced too. This is a
rule of the build and not of the load: the grammar may allow other spellings of what it forces, which a model could have
chosen. A request that is owed log-probabilities is owed a row for each token: for it nothing is forced.
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
from quire.core.work_budget import SERVICE_TOKENS_PER_S, WorkAccount, WorkBudget, WorkKind
from quire.engine.grammar_thread import GrammarThread, ThreadWork
from quire.errors import CheckpointError, InvalidParameterError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT_BYTES = 2 << 20
"""Of the texts of grammars whose pristine matchers are kept, the latest used: compiled they take some forty times as
much memory."""
COUNTS_TOKENS = "[max_tokens="
"""In a grammar with a rule that may have so many tokens: of such the library takes nothing back."""
SLOW_S = 0.003
"""Masks of a grammar of which one took longer than this are made beside the steps from then on."""
QUICK_PIECES = 64
"""And so are those of one that has not yet shown so many that took less."""
STEP_S = 0.01
"""Following the tokens of slow grammars, and drafts of theirs, take no more than this of a step."""
BRIEF_WAIT_S = 0.003
"""So long a step waits for masks that are expected at once."""
KEPT_FAILURES = 16
"""Texts that could not be compiled, the latest."""
MAX_OWING = 1024
"""Tenants that have not been charged yet."""
COMPILE_WAIT_S = 1.0
CATCH_UP = 16
"""Known tokens that are followed again in one piece."""


class _Grammar:
    """One that is compiled."""

    __slots__ = ("counts_tokens", "first_mask", "is_slow", "num_pieces", "pristine", "text")

    def __init__(self, text: str, pristine: "LLMatcher", first: bytes) -> None:
        self.text = text
        self.pristine = pristine
        self.first_mask = first
        self.counts_tokens = COUNTS_TOKENS in text
        self.num_pieces = 0
        """Masks made so far, all its answers together."""
        self.is_slow = False

    @property
    def is_quick(self) -> bool:
        """Its masks are made in the step."""
        return not self.is_slow and self.num_pieces >= QUICK_PIECES

    def took(self, seconds: float) -> None:
        self.num_pieces += 1
        self.is_slow = self.is_slow or seconds > SLOW_S


class GrammarMatcher:
    """One answer on its way through its grammar."""

    __slots__ = ("account", "error", "follow_s", "grammar", "is_at_work", "mask", "matcher", "num_consumed",
                 "num_true_masks")  # fmt: skip

    def __init__(self, grammar: _Grammar, tenant: str) -> None:
        self.grammar = grammar
        self.matcher = grammar.pristine.deep_copy()
        self.num_consumed = 0
        """Tokens of the answer that the matcher has seen."""
        self.mask: bytes | None = grammar.first_mask
        """Of the place behind them, once it is made."""
        self.is_at_work = False
        """The matcher is the thread's, until its piece is taken back."""
        self.error: RowError | None = None
        """Why this answer ends."""
        self.account = WorkAccount(tenant)
        self.follow_s = 0.0
        """What following took the last time."""
        self.num_true_masks = 1
        """Places of the step's drafts, and one behind them, for which there is a mask."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Follow these; if that cannot be, the matcher says so from now on."""
        self.matcher.consume_tokens(list(tokens))
        self.num_consumed += len(tokens)
        self.mask = None

    def make_mask(self) -> None:
        """The tokens that may follow, for the next step."""
        self.mask = self.matcher.compute_bitmask()

    def masks_of_drafts(self, drafts: Sequence[int], width: int, within_s: float) -> tuple[bytes, ...]:
        """For the place of every draft and for what follows the last, on a copy: nothing has to be taken back. Behind a
        draft that cannot be, nothing will count, and anything is allowed; so it is where the time is over, and what is
        chosen behind that will not count either."""
        started_s, matcher, made = thread_time(), self.matcher.deep_copy(), list[bytes]()
        self.num_true_masks = len(drafts) + 1
        for draft in (*drafts, None):
            is_first = self.mask is not None and not made
            made.append((self.mask if is_first and self.mask is not None else matcher.compute_bitmask())[:width])
            if draft is None or not matcher.consume_token(draft):
                break
            if thread_time() - started_s > within_s:
                self.num_true_masks = len(made)
                break
        return (*made, *[b"\xff" * width] * (len(drafts) + 1 - len(made)))


class GrammarMatchers:
    """The grammars of one engine's requests."""

    def __init__(self, read_vocabulary: Callable[[], "LLTokenizer"]) -> None:
        self.read_vocabulary = read_vocabulary
        self._opened: tuple[LLTokenizer, LLExecutor] | None = None
        self.grammars: OrderedDict[str, _Grammar] = OrderedDict()
        self._num_bytes = 0
        """Of their texts."""
        self._failures: OrderedDict[str, str] = OrderedDict()
        """Of the latest that could not be compiled."""
        self._compiling: set[str] = set()
        self.guides: dict[tuple[str, int], GrammarMatcher] = {}
        """By request and answer."""
        self._owed_s: OrderedDict[str, float] = OrderedDict()
        """What work took that was not charged yet, by tenant: the next row of the tenant pays."""
        self._thread = GrammarThread()
        self._step_s = 0.0
        """What slow grammars will take of the step that is planned."""
        self._now_s = 0.0
        self.budget = WorkBudget()
        """Tenants are not cut here: they take turns in the thread."""
        self.num_forced_tokens = 0
        self.compile_s = 0.0
        self.mask_s = 0.0
        """Processor time of masks, and of following the tokens chosen."""

    # -- between steps -------------------------------------------------------------------------------------------------

    def is_compiled(self, request: core.Request) -> bool:
        """Whether a sequence can begin; if not, its grammar is being compiled. Raises InvalidParameterError if that
        cannot be."""
        text = request.grammar or ""
        if text in self.grammars:
            self.grammars.move_to_end(text)
            return True
        if (failure := self._failures.get(text)) is not None:
            raise InvalidParameterError(failure, "grammar")
        if text not in self._compiling:
            self._compiling.add(text)
            made: list[_Grammar] = []
            self._thread.put(
                ThreadWork(
                    request.tenant,
                    request.request_id,
                    lambda: made.append(self.compiled(text)),
                    lambda piece: self._keep(text, made, piece),
                )
            )
        return False

    def compile(self, request: core.Request) -> None:
        """The same, and wait for it: for those who have nothing else to do."""
        while not self.is_compiled(request):
            self.wait(COMPILE_WAIT_S)
            self._take_back()

    def collect(self) -> None:
        """Take back what the thread has done. A moment is waited for what is brief."""
        if not self._thread.is_idle:
            self._thread.wait_for_brief(BRIEF_WAIT_S)
            self._take_back()

    def _take_back(self) -> None:
        for piece in self._thread.take():
            piece.finish(piece)

    def begin(self, now_s: float) -> None:
        """A step is about to be planned."""
        self._now_s, self._step_s = now_s, 0.0

    def wait(self, timeout_s: float) -> None:
        """There is nothing else to do: until something is done in the thread."""
        self._thread.wait_for_any(timeout_s)

    def holds(self, sequence: scheduled.Sequence) -> bool:
        """Whether what this sequence needs is not there; then it is being made."""
        if (text := sequence.request.grammar) is None:
            return False
        guide = self.guides.get((sequence.request.request_id, sequence.index))
        if guide is None:
            if (grammar := self.grammars.get(text)) is None:
                return text not in self._failures and not self.is_compiled(sequence.request)
            guide = GrammarMatcher(grammar, sequence.request.tenant)
            self.guides[sequence.request.request_id, sequence.index] = guide
        if guide.error is not None:
            return False  # it ends with its next row
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
        return not self._has_room(guide)

    def _has_room(self, guide: GrammarMatcher) -> bool:
        """Whether what following took the last time has room in this step."""
        if self._step_s and self._step_s + guide.follow_s > STEP_S:
            return False
        self._step_s += guide.follow_s
        return True

    @property
    def request_ids(self) -> list[str]:
        """Whose grammar is worked on at this moment: if the worker dies now, they are named."""
        return self._thread.request_ids

    def forget(self, events: Iterable[RequestEvent]) -> None:
        """Let go of the answers that have ended."""
        for event in events:
            if isinstance(event, SequenceFinished):
                guide = self.guides.pop((event.request_id, event.sequence_index), None)
                if guide is not None and guide.is_at_work:
                    self._thread.remove(guide)

    def close(self) -> None:
        """No more work is begun."""
        self._thread.close()

    # -- in a step -----------------------------------------------------------------------------------------------------

    def masks(self, plan: StepPlan, planned: Sequence[scheduled.Sequence]) -> Masks:
        """What may be chosen, for every guided item of a plan that samples; `planned` are its sequences."""
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
                # One by one and here: a thread would have to be woken, and finds nothing in its caches.
                masks[item.sequence_id] = (self._mask_now(guide)[:width],)
            elif guide.grammar.counts_tokens or not guide.grammar.is_quick:
                masks[item.sequence_id] = self._masks_on_a_copy(item, guide, width)
        quick = [(item, guide) for item, guide in rows if item.sequence_id not in masks]
        masks |= self._masks_of_drafts(quick, width)
        return {item.sequence_id: masks[item.sequence_id] for item, guide in rows if guide.error is None}

    def guided(self, plan: StepPlan, planned: Sequence[scheduled.Sequence], result: StepResult) -> StepResult:
        """The same result with what is forced behind the tokens chosen, with the errors of grammars, and with what
        tenants are charged."""
        found: dict[int, RowResult] = {}
        for item, sequence in zip(plan.items, planned, strict=True):
            row = result.rows[item.sequence_id]
            if sequence.request.grammar is not None and row.token_ids and row.error is None:
                row = found[item.sequence_id] = self._followed(sequence, row)
            if work_tokens := self._charge(sequence.request.tenant):
                found[item.sequence_id] = row._replace(work_tokens=work_tokens)
        return StepResult(result.step, result.rows | found) if found else result

    def _mask_now(self, guide: GrammarMatcher) -> bytes:
        if guide.mask is None:
            started_s = thread_time()
            guide.make_mask()
            self._took(guide, thread_time() - started_s)
        return guide.mask or b""

    def _masks_on_a_copy(self, item: WorkItem, guide: GrammarMatcher, width: int) -> tuple[bytes, ...]:
        started_s = thread_time()
        made = guide.masks_of_drafts(item.drafts, width, max(0.0, STEP_S - self._step_s))
        took_s = thread_time() - started_s
        self._step_s += took_s
        self._took(guide, took_s, guide.num_true_masks)
        return made

    def _masks_of_drafts(
        self, drafted: Sequence[tuple[WorkItem, GrammarMatcher]], width: int
    ) -> dict[int, tuple[bytes, ...]]:
        """Of each item one for the place of every draft, and one for what follows the last."""
        if not drafted:
            return {}
        import llguidance.numpy as bits  # noqa: PLC0415 - paid by who has a grammar

        started_s = thread_time()
        vocabulary, executor = self._open()
        firsts = [0, *accumulate(item.num_drafts + 1 for item, _ in drafted)]
        mask = bits.allocate_token_bitmask(firsts[-1], vocabulary.vocab_size)
        wanted = [
            (guide.matcher, first, list(item.drafts)) for (item, guide), first in zip(drafted, firsts, strict=False)
        ]
        bits.fill_next_token_bitmask_par_with_draft_tokens(executor, wanted, mask)
        for item, guide in drafted:
            self._took(guide, (thread_time() - started_s) / len(drafted), item.num_drafts + 1)
        return {
            item.sequence_id: tuple(mask[row].tobytes()[:width] for row in range(first, first + item.num_drafts + 1))
            for (item, _), first in zip(drafted, firsts, strict=False)
        }

    def _followed(self, sequence: scheduled.Sequence, row: RowResult) -> RowResult:
        request, params = sequence.request, sequence.request.params
        guide = self.guides.get((request.request_id, sequence.index))
        if guide is None:
            return RowResult(error=_grammar_error("it cannot be compiled"))
        if guide.error is not None:
            return RowResult(error=guide.error)
        is_forced = params.logprobs is None  # else every token is owed a row of its own
        chosen, started_s = row.token_ids[: guide.num_true_masks], thread_time()
        count, forced = self._followed_tokens(guide, chosen, params.stop_token_ids, is_forced=is_forced)
        guide.follow_s = thread_time() - started_s
        self._spend(guide, guide.follow_s, num_units=0)
        if guide.error is not None:
            return RowResult(error=guide.error)
        self.num_forced_tokens += len(forced)
        is_over = guide.matcher.is_stopped() or (*chosen[:count], *forced)[-1] in params.stop_token_ids
        if not is_over and not guide.grammar.is_quick:
            self._begin_mask(guide, sequence)
        return row._replace(token_ids=chosen[:count], forced=forced)

    def _followed_tokens(
        self, guide: GrammarMatcher, chosen: tuple[int, ...], stops: frozenset[int], *, is_forced: bool
    ) -> tuple[int, tuple[int, ...]]:
        """How many of the tokens chosen count, and what is forced behind them.

        Where a token forces others, those are the ones that follow, whatever was chosen in their places: a step with
        drafts comes to the same as one token after the other. What was chosen as it had to be counts as chosen.
        """
        ends = [token for token in self._open()[0].eos_tokens if token in stops]
        count = 0
        while count < len(chosen):
            token_id, count = chosen[count], count + 1
            if token_id in stops:
                break  # it ends: a matcher takes nothing behind a text that is complete
            guide.consume([token_id])
            if guide.matcher.is_error():
                break
            if not is_forced:
                continue
            forced = guide.matcher.compute_ff_tokens()
            guide.consume(forced)
            is_complete = guide.matcher.is_stopped() and bool(ends)
            forced = [*forced, *ends[:is_complete]]
            num_equal = _num_equal(forced, chosen[count:])
            count += num_equal
            if is_complete or num_equal < len(forced):
                return count, tuple(forced[num_equal:])
        return count, ()

    # -- in the thread, and taken back ---------------------------------------------------------------------------------

    def _begin_mask(self, guide: GrammarMatcher, sequence: scheduled.Sequence) -> None:
        self._put(guide, sequence, guide.make_mask, lambda piece: self._took(guide, piece.seconds))

    def _catch_up(self, guide: GrammarMatcher, sequence: scheduled.Sequence) -> None:
        """Follow what is known from before a crash. It was paid then, and is not cut: whatever the clock says now, it
        was within its budget."""
        first = sequence.num_prompt_tokens + guide.num_consumed
        tokens = sequence.tokens[first : first + CATCH_UP]
        self._put(guide, sequence, lambda: guide.consume(tokens), lambda _piece: self._look(guide))

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

    def compiled(self, text: str) -> _Grammar:
        """Compile a grammar; runs in the grammar thread."""
        matcher = matcher_of(self._open()[0], text)
        try:
            return _Grammar(text, matcher, first_mask(matcher))
        except ValueError as error:
            raise InvalidParameterError(f"the grammar cannot be used: {error}", "grammar") from None

    def _keep(self, text: str, made: list[_Grammar], piece: ThreadWork) -> None:
        self._compiling.discard(text)
        self.compile_s += piece.seconds
        self._owe(piece.tenant, piece.seconds)
        self.budget.spend(WorkAccount(piece.tenant), WorkKind.GRAMMAR_COMPILE, piece.seconds, self._now_s)
        for grammar in made:
            self.grammars[text] = grammar
            self._num_bytes += len(text)
        while self._num_bytes > KEPT_BYTES and len(self.grammars) > 1:
            self._num_bytes -= len(self.grammars.popitem(last=False)[0])
        if piece.error is not None:
            self._failures[text] = str(piece.error)
            if len(self._failures) > KEPT_FAILURES:
                self._failures.popitem(last=False)

    def _open(self) -> "tuple[LLTokenizer, LLExecutor]":
        if self._opened is None:
            from llguidance import LLExecutor  # noqa: PLC0415 - the same

            try:
                self._opened = self.read_vocabulary(), LLExecutor(num_threads=1)
            except CheckpointError as error:  # who asks for a grammar is refused; the model answers all others
                raise InvalidParameterError(f"this model does not support grammars: {error}", "grammar") from error
        return self._opened

    # -- what it costs -------------------------------------------------------------------------------------------------

    def _took(self, guide: GrammarMatcher, seconds: float, num_masks: int = 1) -> None:
        guide.grammar.took(seconds / num_masks)
        self._spend(guide, seconds, num_masks)

    def _spend(self, guide: GrammarMatcher, seconds: float, num_units: int) -> None:
        self.mask_s += seconds
        self._owe(guide.account.tenant, seconds)
        cut = self.budget.spend(guide.account, WorkKind.GRAMMAR_MASK, seconds, self._now_s, num_units)
        self._look(guide)
        if cut is not None and guide.error is None:
            guide.error = RowError(cut.error.code, f"the work budget was passed: {cut.error}")

    @staticmethod
    def _look(guide: GrammarMatcher) -> None:
        if guide.error is None and guide.matcher.is_error():
            guide.error = _grammar_error(guide.matcher.get_error())

    def _owe(self, tenant: str, seconds: float) -> None:
        self._owed_s[tenant] = self._owed_s.get(tenant, 0.0) + seconds
        if len(self._owed_s) > MAX_OWING:
            self._owed_s.popitem(last=False)

    def _charge(self, tenant: str) -> int:
        """What a row of this tenant pays, in whole tokens; the rest is owed."""
        owed_s = self._owed_s.get(tenant, 0.0)
        num_tokens = int(owed_s * SERVICE_TOKENS_PER_S)
        if num_tokens:
            self._owed_s[tenant] = owed_s - num_tokens / SERVICE_TOKENS_PER_S
        return num_tokens


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first ones are the same."""
    pairs = zip(some, others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


def _grammar_error(why: str) -> RowError:
    return RowError(GRAMMAR_FAILED, f"the grammar cannot say what may follow: {why[:300]}")
