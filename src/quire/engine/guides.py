"""What grammars allow and force, sequence by sequence: the one room that knows what is in a request's grammar.

    plan ─► masks: which tokens may stand at each place ─► runner ─► chosen tokens ─► forced: what must follow them

A grammar and the tokens produced so far are all there is to know. So a matcher here is a shortcut and never the truth:
after a crash, a preemption, or for one of several answers, one is made anew of the grammar and fed the tokens that the
sequence has. One pristine matcher for each grammar is kept, for it has done what the first mask costs; sequences get
copies of it.

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
from quire.core.step import GRAMMAR_FAILED, NO_MASKS, Masks, RowResult, StepPlan, StepResult, WorkItem
from quire.errors import CheckpointError, InvalidParameterError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT_GRAMMARS = 256
"""Grammars whose pristine matchers are kept, the latest used."""
COUNTS_TOKENS = "[max_tokens="
"""In a grammar with a rule that may have so many tokens: of such the library takes nothing back."""


class _Guide:
    """One answer on its way through its grammar."""

    __slots__ = ("counts_tokens", "matcher", "num_consumed")

    def __init__(self, matcher: "LLMatcher", counts_tokens: bool) -> None:
        self.matcher = matcher
        self.counts_tokens = counts_tokens
        self.num_consumed = 0
        """Tokens of the answer that the matcher has seen."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Follow these; if that cannot be, the matcher says so from now on."""
        self.matcher.consume_tokens(list(tokens))
        self.num_consumed += len(tokens)

    def masks_of_drafts(self, drafts: Sequence[int], width: int) -> tuple[bytes, ...]:
        """For the place of every draft and for what follows the last, on a copy: nothing has to be taken back. Behind a
        draft that cannot be, nothing will count, and anything is allowed."""
        matcher, made = self.matcher.deep_copy(), list[bytes]()
        for draft in (*drafts, None):
            made.append(matcher.compute_bitmask()[:width])
            if draft is None or not matcher.consume_token(draft):
                break
        return (*made, *[b"\xff" * width] * (len(drafts) + 1 - len(made)))


class Guides:
    """The grammars of one engine's requests."""

    def __init__(self, read_vocabulary: Callable[[], "LLTokenizer"]) -> None:
        self._read_vocabulary = read_vocabulary
        self._opened: tuple[LLTokenizer, LLExecutor] | None = None
        self._pristine: OrderedDict[str, LLMatcher] = OrderedDict()
        self._guides: dict[tuple[str, int], _Guide] = {}
        """By request and answer."""
        self._errors: dict[int, str] = {}
        """Of the step in flight, by sequence: whose grammar could not say what may follow."""
        self.num_forced_tokens = 0
        self.compile_s = 0.0
        self.mask_s = 0.0
        """Processor time of masks, and of following the tokens chosen."""

    def check(self, grammar: str) -> None:
        """Raise InvalidParameterError if this is no grammar. What is compiled for it is kept."""
        self._pristine_of(grammar)

    def masks(self, plan: StepPlan, planned: Sequence[core.Sequence]) -> Masks:
        """What may be chosen, for every guided item of a plan that samples; `planned` are its sequences."""
        rows = [
            (item, sequence)
            for item, sequence in zip(plan.items, planned, strict=True)
            if sequence.request.grammar is not None and item.sampling is not None
        ]
        if not rows:
            return NO_MASKS
        started_s = thread_time()
        masks = self._masks_of(rows)
        self.mask_s += thread_time() - started_s
        return masks

    def guided(self, plan: StepPlan, planned: Sequence[core.Sequence], result: StepResult) -> StepResult:
        """The same result with what is forced behind the tokens chosen, and with the errors of grammars."""
        found: dict[int, RowResult] = {}
        started_s = thread_time()
        for item, sequence in zip(plan.items, planned, strict=True):
            row = result.rows[item.sequence_id]
            if sequence.request.grammar is not None and row.token_ids and row.error is None:
                found[item.sequence_id] = self._followed(item, sequence, row)
        if not found:
            return result
        self.mask_s += thread_time() - started_s
        return StepResult(result.step, result.rows | found)

    def forget(self, events: Iterable[RequestEvent]) -> None:
        """Let go of the answers that have ended."""
        for event in events:
            if isinstance(event, SequenceFinished):
                self._guides.pop((event.request_id, event.sequence_index), None)

    def _masks_of(self, rows: Sequence[tuple[WorkItem, core.Sequence]]) -> Masks:
        self._errors = {}
        width = -(-self._open()[0].vocab_size // 8)
        guides = [self._guide_of(sequence) for _, sequence in rows]
        # One by one and here: a thread of the library's would have to be woken, and finds nothing in its caches.
        made = {
            item.sequence_id: (guide.matcher.compute_bitmask()[:width],)
            for (item, _), guide in zip(rows, guides, strict=True)
            if not item.num_drafts
        }
        drafted = [(item, guide) for (item, _), guide in zip(rows, guides, strict=True) if item.num_drafts]
        copied = {
            item.sequence_id: guide.masks_of_drafts(item.drafts, width)
            for item, guide in drafted
            if guide.counts_tokens
        }
        at_once = [(item, guide) for item, guide in drafted if not guide.counts_tokens]
        masks = {**made, **copied, **self._masks_of_drafts(at_once, width)}
        for (item, _), guide in zip(rows, guides, strict=True):
            if guide.matcher.is_error():
                self._errors[item.sequence_id] = guide.matcher.get_error()
                del masks[item.sequence_id]
        return masks

    def _masks_of_drafts(self, drafted: Sequence[tuple[WorkItem, _Guide]], width: int) -> dict[int, tuple[bytes, ...]]:
        """Of each item one for the place of every draft, and one for what follows the last."""
        if not drafted:
            return {}
        import llguidance.numpy as bits  # noqa: PLC0415 - paid by who has a grammar

        vocabulary, executor = self._open()
        firsts = [0, *accumulate(item.num_drafts + 1 for item, _ in drafted)]
        mask = bits.allocate_token_bitmask(firsts[-1], vocabulary.vocab_size)
        asked = [
            (guide.matcher, first, list(item.drafts)) for (item, guide), first in zip(drafted, firsts, strict=False)
        ]
        bits.fill_next_token_bitmask_par_with_draft_tokens(executor, asked, mask)
        return {
            item.sequence_id: tuple(mask[row].tobytes()[:width] for row in range(first, first + item.num_drafts + 1))
            for (item, _), first in zip(drafted, firsts, strict=False)
        }

    def _followed(self, item: WorkItem, sequence: core.Sequence, row: RowResult) -> RowResult:
        guide, params = self._guide_of(sequence), sequence.request.params
        if (error := self._errors.pop(item.sequence_id, None)) is not None:
            return RowResult(error=_sentence(error))
        is_forced = params.logprobs is None  # else every token is owed a row of its own
        count, forced = self._followed_tokens(guide, row.token_ids, params.stop_token_ids, is_forced=is_forced)
        if guide.matcher.is_error():
            return RowResult(error=_sentence(guide.matcher.get_error()))
        self.num_forced_tokens += len(forced)
        return row._replace(token_ids=row.token_ids[:count], forced=forced)

    def _followed_tokens(
        self, guide: _Guide, chosen: tuple[int, ...], stops: frozenset[int], *, is_forced: bool
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

    def _guide_of(self, sequence: core.Sequence) -> _Guide:
        """The guide of a sequence, which has seen every token that the sequence has produced."""
        key = sequence.request.request_id, sequence.index
        guide = self._guides.get(key)
        if guide is None:
            grammar = sequence.request.grammar or ""
            guide = self._guides[key] = _Guide(self._pristine_of(grammar).deep_copy(), COUNTS_TOKENS in grammar)
        if guide.num_consumed < sequence.num_output_tokens:
            guide.consume(sequence.tokens[sequence.num_prompt_tokens + guide.num_consumed :])
        return guide

    def _pristine_of(self, grammar: str) -> "LLMatcher":
        found = self._pristine.get(grammar)
        if found is None:
            started_s = thread_time()
            found = matcher_of(self._open()[0], grammar)
            if (error := first_mask(found)) is not None:
                raise InvalidParameterError(f"the grammar cannot be used: {error}", "grammar")
            self.compile_s += thread_time() - started_s
            self._pristine[grammar] = found
            if len(self._pristine) > KEPT_GRAMMARS:
                self._pristine.popitem(last=False)
        self._pristine.move_to_end(grammar)
        return found

    def _open(self) -> "tuple[LLTokenizer, LLExecutor]":
        if self._opened is None:
            from llguidance import LLExecutor  # noqa: PLC0415 - the same

            try:
                self._opened = self._read_vocabulary(), LLExecutor(num_threads=1)
            except CheckpointError as error:  # who asks for a grammar is refused; the model answers all others
                raise InvalidParameterError(f"this model follows no grammars: {error}", "grammar") from error
        return self._opened


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first ones are the same."""
    pairs = zip(some, others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


def _sentence(error: str) -> str:
    return f"{GRAMMAR_FAILED}: {error[:300]}"
