"""One sequence's part (*row*) of a step: its work item, the tokens it accepts from the result, its cost, its events."""

from collections.abc import Collection

from msgspec.structs import replace

from quire.core.events import (
    Admitted,
    Finished,
    FirstToken,
    PromptLogprobs,
    PromptProgress,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.request import FinishReason, ResolvedSampling
from quire.core.scheduling.acceptance_rates import UNKNOWN
from quire.core.scheduling.scheduler_config import ActiveRequest
from quire.core.scheduling.sequence import Sequence, table_of
from quire.core.step import RowError, RowResult, Sampling, Scoring, WorkItem
from quire.errors import InvariantError


def work_item(sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], *, reads_cache: bool) -> WorkItem:
    """Make the work item for the next `num_tokens` of a running sequence, followed by `drafts`. It samples a token if
    these are the last known tokens and the request allows output.
    """
    table, tokens, request = table_of(sequence), sequence.tokens, sequence.request
    start, params = table.num_computed, request.params
    end = start + num_tokens
    sampling: Sampling | None = None
    if end == len(tokens) and params.max_tokens:
        known_tokens = tuple(tokens) if params.needs_known_tokens else None
        sampling = Sampling(params, request.seed, sequence.index, end, sequence.num_prompt_tokens, known_tokens)
    scoring: Scoring | None = None
    if not reads_cache and (scored_tokens := request.prompt[start + 1 : end + 1]):
        scoring = Scoring(start + 1, scored_tokens, params.prompt_logprobs or 0)
    token_ids, block_ids = tuple(tokens[start:end]) + drafts, tuple(table.blocks)
    adapter, state_slot = request.namespace.adapter, table.state_slot or 0
    return WorkItem(sequence.sequence_id, token_ids, start, block_ids, sampling, scoring, (), adapter, state_slot)


def token_acceptance(
    params: ResolvedSampling, token_ids: Collection[int], num_before: int, max_new_tokens: int
) -> tuple[int, FinishReason | None]:
    """Return how many of these new tokens a sequence accepts, and the reason if the last accepted token ends it.

    Tokens after one that ends the sequence are dropped. `num_before` counts the output tokens so far, including those
    from before a crash; the sequence can grow by `max_new_tokens`.
    """
    count = 0
    for token_id in token_ids:
        count += 1
        if token_id in params.stop_token_ids and num_before + count > params.min_tokens:
            return count, FinishReason.STOP
        if num_before + count >= params.max_tokens or count >= max_new_tokens:
            return count, FinishReason.LENGTH
    return count, None


def row_acceptance(
    sequence: Sequence, item: WorkItem, tokens: tuple[int, ...], forced: tuple[int, ...], max_sequence_tokens: int
) -> tuple[int, FinishReason | None]:
    """Return how many of a row's tokens (sampled, then forced) a sequence accepts, and the reason if the last ends it.

    Raises InvariantError if the tokens do not match the item: sampled tokens are allowed only if the item samples, all
    but the last must equal the drafts, and forced tokens may only follow sampled ones.
    """
    if len(tokens) != (item.sampling is not None):
        drafts = item.drafts
        max_tokens = 0 if item.sampling is None else len(drafts) + 1
        if not min(1, max_tokens) <= len(tokens) <= max_tokens or tokens[:-1] != drafts[: len(tokens) - 1]:
            raise InvariantError(
                f"apply: expected at most {max_tokens} tokens for sequence {item.sequence_id}, all but the last "
                f"equal to the drafts {drafts}, got {tokens}",
                code="tokens_not_explained",
            )
    if forced:
        if not tokens:
            raise InvariantError(f"apply: sequence {item.sequence_id} has forced tokens {forced}, but no sampled one")
        tokens += forced
    num_tokens = len(sequence.tokens)
    num_before, max_new = num_tokens - sequence.num_prompt_tokens, max_sequence_tokens - num_tokens
    return token_acceptance(sequence.request.params, tokens, num_before, max_new)


def charge_tokens(sequence: Sequence, start: int, num_computed: int) -> tuple[int, int]:
    """Record that `num_computed` tokens from position `start` on were computed. Return how many of them are prompt
    tokens computed for the first time, and how many were computed before, which are not charged again.
    """
    end, num_charged, num_new_prompt, num_recomputed = start + num_computed, sequence.num_charged, 0, 0
    if start < sequence.num_prompt_tokens:
        num_new_prompt = max(0, min(end, sequence.num_prompt_tokens) - max(start, num_charged))
    if num_charged > start:
        num_recomputed = min(end, num_charged) - start
    if end > num_charged:
        sequence.num_charged = end
    return num_new_prompt, num_recomputed


def update_acceptance_rate(sequence: Sequence, item: WorkItem, num_computed: int) -> int:
    """Update the acceptance rate of the item's draft source; return how many of its drafts were accepted."""
    num_drafts, rates, source = item.num_drafts, sequence.acceptance_rates, sequence.draft_source
    num_accepted = num_computed + num_drafts - len(item.token_ids)
    rates[source] = rates.get(source, UNKNOWN).with_result(num_drafts, num_accepted, len(sequence.tokens))
    return num_accepted


def prompt_logprob_events(record: ActiveRequest, first: int, row: RowResult) -> list[PromptLogprobs]:
    """Make the events for prompt log-probabilities from position `first` on. Each position is reported once, even if a
    preempted sequence computes it again."""
    num_reported = max(0, record.num_prompt_reported - first)
    new_scores = row.scores[num_reported:]
    if not new_scores:
        return []
    record.num_prompt_reported = first + num_reported + len(new_scores)
    request = record.request
    return [PromptLogprobs(request.request_id, first + num_reported, new_scores, epoch=request.epoch)]


def progress_events(sequence: Sequence, num_before: int) -> list[PromptProgress]:
    """Make the event of a sequence that has computed or found tokens after the first `num_before`, if its request
    reports progress and these are prompt tokens."""
    request = sequence.request
    if not request.reports_progress or num_before >= sequence.num_prompt_tokens:
        return []
    num_computed = min(table_of(sequence).num_computed, sequence.num_prompt_tokens)
    return [PromptProgress(request.request_id, num_computed, sequence.num_cached_tokens, epoch=request.epoch)]


def first_token_event(record: ActiveRequest, block_size: int, num_pinned: int) -> FirstToken:
    """Make the event of a request's first token. Only now are the numbers of cached and written prompt tokens final,
    because each chunk may find more cached blocks. Blocks that were written again after a preemption count once."""
    request, num_cached = record.request, record.leader.num_cached_tokens
    num_written = min(record.num_written_blocks * block_size, len(request.prompt) - num_cached)
    return FirstToken(request.request_id, num_cached, num_written, num_pinned, epoch=request.epoch)


def token_event(sequence: Sequence, row: RowResult, index: int) -> Token:
    """Make the event of a sequence's newest token, which is the token at `index` of its row."""
    request, num_output = sequence.request, len(sequence.tokens) - sequence.num_prompt_tokens
    logprobs, is_forced = row.logprobs[index] if row.logprobs else None, row.is_forced(index)
    token_id, epoch = sequence.tokens[-1], request.epoch
    return Token(request.request_id, sequence.index, token_id, num_output, logprobs, is_forced, epoch=epoch)


def sequence_finished_event(
    sequence: Sequence, record: ActiveRequest, reason: FinishReason, error: RowError | None
) -> SequenceFinished:
    """Make the event of a finished continuation."""
    request, num_output = record.request, sequence.num_output_tokens
    code, message = error or (None, None)
    return SequenceFinished(
        request.request_id, sequence.index, reason, num_output, message, record.retry_after_s, code, epoch=request.epoch
    )


def request_finished_event(record: ActiveRequest) -> Finished:
    """Make the event of a finished request."""
    num_output = sum(sequence.num_output_tokens for sequence in record.sequences)
    request, num_cached = record.request, record.leader.num_cached_tokens
    return Finished(request.request_id, len(request.prompt), num_cached, num_output, epoch=request.epoch)


def backdate_admissions(events: list[RequestEvent], step_s: float) -> None:
    """Set the age of `Admitted` events: admission happens when a step is planned, the event is sent after the step."""
    for index, event in enumerate(events):
        if isinstance(event, Admitted):
            events[index] = replace(event, age_s=step_s)
