"""One sequence's row of a step: what it asks the runner for, what it costs, and the events that tell of it."""

from quire.core.events import Finished, PromptLogprobs, SequenceFinished, Token
from quire.core.request import FinishReason, Sequence, table_of
from quire.core.scheduler_config import Live, SchedulerStats
from quire.core.step import RowResult, Sampling, Scoring, WorkItem
from quire.errors import InvariantError


def work_item(sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], *, reads_cache: bool) -> WorkItem:
    """The next `num_tokens` of a running sequence, and drafts behind them; a token is sampled if they are the last it
    knows and it may have another.
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
    return WorkItem(sequence.sequence_id, fed, first, blocks, sampling, scoring, (), request.namespace.adapter)


def check_row(item: WorkItem, row: RowResult) -> None:
    """Raise InvariantError unless the row answers its item: tokens where they were asked for, each but the last a draft
    that was right.
    """
    tokens, drafts = row.token_ids, item.drafts
    most = 0 if item.sampling is None else len(drafts) + 1
    if not min(1, most) <= len(tokens) <= most or tokens[:-1] != drafts[: len(tokens) - 1]:
        raise InvariantError(
            f"apply: sequence {item.sequence_id} got {len(tokens)} tokens, {tokens}; after the drafts {drafts} there "
            f"may be {most}, all but the last of them right"
        )


def count_row(
    stats: SchedulerStats, sequence: Sequence, item: WorkItem, num_computed: int, num_output_tokens: int
) -> int:
    """Add what was computed to the totals; returns how many prompt tokens were computed for the first time."""
    first, charged = item.first_position, sequence.num_charged
    end = first + num_computed
    num_new_prompt = 0
    if first < sequence.num_prompt_tokens:
        num_new_prompt = max(0, min(end, sequence.num_prompt_tokens) - max(first, charged))
    if first < charged:
        stats.num_recomputed_tokens += min(end, charged) - first
    stats.num_computed_tokens += end - first
    stats.num_output_tokens += num_output_tokens
    if num_output_tokens > 1 or num_computed < len(item.token_ids):  # drafts came, or were wrong
        num_drafts = item.num_drafts
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_computed + num_drafts - len(item.token_ids)
    sequence.num_charged = max(charged, end)
    return num_new_prompt


def prompt_report(live: Live, first: int, row: RowResult) -> list[PromptLogprobs]:
    """Scores of the prompt's tokens from position `first` on: each is reported once, however often it is computed."""
    num_known = max(0, live.num_prompt_reported - first)
    fresh = row.scores[num_known:]
    if not fresh:
        return []
    live.num_prompt_reported = first + num_known + len(fresh)
    request = live.request
    return [PromptLogprobs(request.request_id, first + num_known, fresh, epoch=request.epoch)]


def token_event(sequence: Sequence, row: RowResult, at: int) -> Token:
    """The row's token `at`, which the sequence has just taken in."""
    request, num_output = sequence.request, sequence.num_output_tokens
    logprobs = row.logprobs[at] if row.logprobs else None
    return Token(request.request_id, sequence.index, row.token_ids[at], num_output, logprobs, epoch=request.epoch)


def end_of_sequence(sequence: Sequence, live: Live, reason: FinishReason, error: str | None) -> SequenceFinished:
    """One continuation is over."""
    request, num_output = live.request, sequence.num_output_tokens
    return SequenceFinished(
        request.request_id, sequence.index, reason, num_output, error, live.retry_after_s, epoch=request.epoch
    )


def end_of_request(live: Live) -> Finished:
    """All continuations are over."""
    num_output = sum(sequence.num_output_tokens for sequence in live.sequences)
    request, num_cached = live.request, live.leader.num_cached_tokens
    return Finished(request.request_id, len(request.prompt), num_cached, num_output, epoch=request.epoch)
