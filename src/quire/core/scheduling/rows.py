"""One sequence's row of a step: its work item, the tokens it accepts from the result, its cost, and its events."""

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
    """Make the work item for the next `num_tokens` of a running sequence, followed by drafts. It samples a token if
    these are the last known tokens and the request wants output.
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
    """Return how many of these new tokens a sequence accepts, and the reason if the last accepted token ends it.

    Tokens after one that ends the sequence are dropped. `num_before` tokens were produced earlier, also before a crash;
    the sequence can grow by `room` more.
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
    """Return how many of a row's tokens (sampled, then forced) a sequence accepts, and the reason if the last ends it.

    Raises InvariantError if the tokens do not match the item: there must be sampled tokens only if requested, all but
    the last equal to drafts, and forced tokens only after sampled ones.
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
    """Account for `num_computed` tokens from position `first` on: return how many are prompt tokens computed for the
    first time, and how many were computed before.
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
    """Return how many of an item's drafts were accepted, and update the sequence's acceptance rate."""
    num_drafts, acceptance_rates, source = item.num_drafts, sequence.acceptance_rates, sequence.guess_source
    num_right = num_computed + num_drafts - len(item.token_ids)
    acceptance_rates[source] = acceptance_rates.get(source, UNKNOWN).after(num_drafts, num_right, len(sequence.tokens))
    return num_right


def prompt_report(live: ActiveRequest, first: int, row: RowResult) -> list[PromptLogprobs]:
    """Make the events for prompt log-probabilities from position `first` on; each is reported once, even if a
    preempted sequence computes it again."""
    num_known = max(0, live.num_prompt_reported - first)
    fresh = row.scores[num_known:]
    if not fresh:
        return []
    live.num_prompt_reported = first + num_known + len(fresh)
    request = live.request
    return [PromptLogprobs(request.request_id, first + num_known, fresh, epoch=request.epoch)]


def token_event(sequence: Sequence, logprobs: TokenLogprobs | None) -> Token:
    """Make the event of a sequence's newest token."""
    request, number = sequence.request, len(sequence.tokens) - sequence.num_prompt_tokens
    return Token(request.request_id, sequence.index, sequence.tokens[-1], number, logprobs, epoch=request.epoch)


def end_of_sequence(
    sequence: Sequence, live: ActiveRequest, reason: FinishReason, error: RowError | None
) -> SequenceFinished:
    """Make the event of a finished continuation."""
    request, num_output = live.request, sequence.num_output_tokens
    code, message = error or (None, None)
    return SequenceFinished(
        request.request_id, sequence.index, reason, num_output, message, live.retry_after_s, code, epoch=request.epoch
    )


def end_of_request(live: ActiveRequest) -> Finished:
    """Make the event of a finished request."""
    num_output = sum(sequence.num_output_tokens for sequence in live.sequences)
    request, num_cached = live.request, live.leader.num_cached_tokens
    return Finished(request.request_id, len(request.prompt), num_cached, num_output, epoch=request.epoch)


def backdate_admissions(events: list[RequestEvent], step_s: float) -> None:
    """Set the age of admissions: they happen when a step is planned and are reported when it has returned."""
    for at, event in enumerate(events):
        if isinstance(event, Admitted):
            events[at] = replace(event, age_s=step_s)
