"""One sequence's row of a step: what it requests of the runner, what it takes of it, its cost, and its events."""

from collections.abc import Collection

from msgspec.structs import replace

from quire.core.events import Admitted, Finished, PromptLogprobs, RequestEvent, SequenceFinished, Token
from quire.core.request import FinishReason, ResolvedSampling
from quire.core.scheduling.acceptance_rates import UNKNOWN
from quire.core.scheduling.scheduler_config import ActiveRequest
from quire.core.scheduling.sequence import Sequence, table_of
from quire.core.step import RowError, RowResult, Sampling, Scoring, TokenLogprobs, WorkItem
from quire.errors import InvariantError


def work_item(sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], *, reads_cache: bool) -> WorkItem:
    """The next `num_tokens` of a running sequence, and drafts behind them; a token is sampled if they are the last it
    has and it may have another.
    """
    table, tokens, request = table_of(sequence), sequence.tokens, sequence.request
    first, params = table.num_computed, request.params
    end = first + num_tokens
    sampling: Sampling | None = None
    if end == len(tokens) and params.max_tokens:
        known = tuple(tokens) if params.needs_known_tokens else None
        sampling = Sampling(params, request.seed, sequence.index, end, sequence.num_prompt_tokens, known)
    scoring: Scoring | None = None
    if not reads_cache and (targets := request.prompt[first + 1 : end + 1]):
        scoring = Scoring(first + 1, targets, params.prompt_logprobs or 0)
    fed, blocks = tuple(tokens[first:end]) + drafts, tuple(table.blocks)
    adapter, state_slot = request.namespace.adapter, table.state_slot or 0
    return WorkItem(sequence.sequence_id, fed, first, blocks, sampling, scoring, (), adapter, state_slot)


def taken_tokens(
    params: ResolvedSampling, token_ids: Collection[int], num_before: int, room: int
) -> tuple[int, FinishReason | None]:
    """How many of these tokens a sequence takes in, chosen one after the other, and why the last of them ends it.

    The first that ends the sequence is the last it takes. `num_before` tokens were produced before them, counted from
    the client's prompt, whatever happened since; there is room for so many more.
    """
    count = 0
    for token_id in token_ids:
        count += 1
        if token_id in params.stop_token_ids and num_before + count > params.min_tokens:
            return count, FinishReason.STOP
        if num_before + count >= params.max_tokens or count >= room:
            return count, FinishReason.LENGTH
    return count, None


def take_row(
    sequence: Sequence, item: WorkItem, tokens: tuple[int, ...], forced: tuple[int, ...], max_sequence_tokens: int
) -> tuple[int, FinishReason | None]:
    """How many of a row's tokens the sequence takes in, chosen ones and then forced ones, and why the last ends it.

    Raises InvariantError unless they match the item: tokens where they were requested, each but the last a draft that
    was right, and forced ones behind chosen ones alone.
    """
    if len(tokens) != (item.sampling is not None):
        drafts = item.drafts
        most = 0 if item.sampling is None else len(drafts) + 1
        if not min(1, most) <= len(tokens) <= most or tokens[:-1] != drafts[: len(tokens) - 1]:
            raise InvariantError(
                f"apply: sequence {item.sequence_id} got {len(tokens)} tokens, {tokens}; after the drafts {drafts} "
                f"expected at most {most}, all but the last equal to them",
                code="tokens_not_explained",
            )
    if forced:
        if not tokens:
            raise InvariantError(f"apply: sequence {item.sequence_id} got forced tokens, {forced}, and chose none")
        tokens += forced
    num_known = len(sequence.tokens)
    num_before, room = num_known - sequence.num_prompt_tokens, max_sequence_tokens - num_known
    return taken_tokens(sequence.request.params, tokens, num_before, room)


def charged_tokens(sequence: Sequence, first: int, num_computed: int) -> tuple[int, int]:
    """The tokens from `first` on were computed: how many of them are of the prompt and were for the first time, and how
    many of them were not.
    """
    end, charged, num_new_prompt, num_again = first + num_computed, sequence.num_charged, 0, 0
    if first < sequence.num_prompt_tokens:
        num_new_prompt = max(0, min(end, sequence.num_prompt_tokens) - max(first, charged))
    if charged > first:
        num_again = min(end, charged) - first
    if end > charged:
        sequence.num_charged = end
    return num_new_prompt, num_again


def num_right_drafts(sequence: Sequence, item: WorkItem, num_computed: int) -> int:
    """How many of an item's drafts came true, which its sequence learns from."""
    num_drafts, acceptance_rates, source = item.num_drafts, sequence.acceptance_rates, sequence.guess_source
    num_right = num_computed + num_drafts - len(item.token_ids)
    acceptance_rates[source] = acceptance_rates.get(source, UNKNOWN).after(num_drafts, num_right, len(sequence.tokens))
    return num_right


def prompt_report(live: ActiveRequest, first: int, row: RowResult) -> list[PromptLogprobs]:
    """Scores of the prompt's tokens from position `first` on: each is reported once, however often it is computed."""
    num_known = max(0, live.num_prompt_reported - first)
    fresh = row.scores[num_known:]
    if not fresh:
        return []
    live.num_prompt_reported = first + num_known + len(fresh)
    request = live.request
    return [PromptLogprobs(request.request_id, first + num_known, fresh, epoch=request.epoch)]


def token_event(sequence: Sequence, logprobs: TokenLogprobs | None) -> Token:
    """The token that a sequence has just taken in."""
    request, number = sequence.request, len(sequence.tokens) - sequence.num_prompt_tokens
    return Token(request.request_id, sequence.index, sequence.tokens[-1], number, logprobs, epoch=request.epoch)


def end_of_sequence(
    sequence: Sequence, live: ActiveRequest, reason: FinishReason, error: RowError | None
) -> SequenceFinished:
    """One continuation is over."""
    request, num_output = live.request, sequence.num_output_tokens
    code, message = error or (None, None)
    return SequenceFinished(
        request.request_id, sequence.index, reason, num_output, message, live.retry_after_s, code, epoch=request.epoch
    )


def end_of_request(live: ActiveRequest) -> Finished:
    """All continuations are over."""
    num_output = sum(sequence.num_output_tokens for sequence in live.sequences)
    request, num_cached = live.request, live.leader.num_cached_tokens
    return Finished(request.request_id, len(request.prompt), num_cached, num_output, epoch=request.epoch)


def backdate_admissions(events: list[RequestEvent], step_s: float) -> None:
    """Admissions with a step are reported when the step is over: this sets how long ago they were."""
    for at, event in enumerate(events):
        if isinstance(event, Admitted):
            events[at] = replace(event, age_s=step_s)
