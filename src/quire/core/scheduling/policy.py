"""The scheduler's decisions as pure functions: chunk sizes, which sequences to preempt, which requests to reject."""

from collections.abc import Callable

from quire.core.digests import Namespace
from quire.core.memory.block_table import num_blocks_for
from quire.core.request import RANK, Request
from quire.core.scheduling.sequence import Sequence
from quire.errors import InvalidParameterError, RequestTooLargeError

PROTECTED_AFTER = 3
"""A sequence preempted this often is no longer preempted for new sequences."""


def chunk_length(num_computed: int, num_known: int, budget: int, block_size: int, fork_point: int | None) -> int:
    """Return how many tokens to compute next: all known ones, or as many whole blocks as the budget allows.

    A chunk ends on a block border, at the last known token, or at the fork point. So no chunk leaves a block half
    written that other sequences may wait for. Returns 0 if the budget does not reach the next border.
    """
    end = num_known if fork_point is None or num_computed >= fork_point else fork_point
    if end - num_computed <= budget:
        return end - num_computed
    return max(0, (num_computed + budget) // block_size * block_size - num_computed)


def within_budget(counts: list[int], budget: int) -> list[int]:
    """Reduce the counts, the last ones first, until their sum is within the budget. No positive count goes below 1."""
    excess = sum(counts) - budget
    for at in range(len(counts) - 1, -1, -1):
        if excess <= 0:
            break
        cut = min(excess, max(0, counts[at] - 1))
        counts[at] -= cut
        excess -= cut
    return counts


def may_displace(newcomer: Sequence, victim: Sequence) -> bool:
    """Return whether `victim` may be preempted for `newcomer`: it has a lower class and a later key, and is not
    protected."""
    return (
        RANK[newcomer.request.priority] < RANK[victim.request.priority]
        and newcomer.key < victim.key
        and victim.num_preemptions < PROTECTED_AFTER
    )


def victims_for(
    newcomer: Sequence, running: list[Sequence], is_enough: Callable[[list[Sequence]], bool]
) -> list[Sequence] | None:
    """Choose the sequences to preempt so that a newcomer fits: latest keys first, no more than needed; None if it
    cannot fit. `running` is sorted by urgency; `is_enough(victims)` returns whether the newcomer fits without them.
    """
    chosen: list[Sequence] = []
    for victim in reversed(running):
        if is_enough(chosen):
            break
        if may_displace(newcomer, victim):
            chosen.append(victim)
    if not is_enough(chosen):
        return None
    for victim in chosen[::-1]:
        others = [one for one in chosen if one is not victim]
        if is_enough(others):
            chosen = others
    return chosen


def blocks_to_finish_alone(request: Request, max_sequence_tokens: int, block_size: int) -> int:
    """Return the largest number of blocks that a request's continuations can need together, without other requests.

    The last produced token is never computed. All continuations share the full blocks of the prompt without its last
    token; when they fork, the block from which they copy stays in use for one more step.
    """
    num_tokens = min(len(request.prompt) + request.params.max_tokens, max_sequence_tokens) - 1
    num_blocks = num_blocks_for(max(num_tokens, len(request.prompt)), block_size)
    num_shared = (len(request.prompt) - 1) // block_size
    num_sequences = len(request.continuations)
    return num_shared + num_sequences * (num_blocks - num_shared) + (num_sequences > 1)


def will_compute(sequence: Sequence, namespace: Namespace, tokens: list[int]) -> bool:
    """Return whether a running sequence starts with these tokens and has not computed all of them yet."""
    return (
        len(sequence.tokens) - sequence.num_uncomputed < len(tokens)
        and sequence.request.namespace == namespace
        and sequence.tokens[: len(tokens)] == tokens
    )


def check_request(request: Request, limit: int, max_sequences: int, block_size: int, num_usable: int) -> None:
    """Raise RequestError for a request that could not finish even alone: no prompt, more than `limit` tokens in a
    sequence, too many continuations, more than `num_usable` blocks, or an adapter that does not exist.
    """
    num_prompt, num_sequences = len(request.prompt), len(request.continuations)
    if num_prompt == 0 or num_sequences == 0:
        rule = "expected at least one prompt token and one continuation, got none"
        raise RequestTooLargeError(rule, code="empty_request")
    if num_prompt + min(request.params.max_tokens, 1) > limit:
        raise RequestTooLargeError(
            f"expected at most {limit} tokens in a sequence, the prompt alone has {num_prompt}; shorten it"
        )
    if num_sequences > max_sequences:
        rule = f"expected at most {max_sequences} continuations at once, got {num_sequences}; request fewer"
        raise RequestTooLargeError(rule, code="too_many_continuations")
    if adapter := request.namespace.adapter:
        raise InvalidParameterError(
            f"this model has no adapter named {adapter!r}, and none can be loaded yet; leave adapter out",
            "adapter",
        )
    num_blocks = blocks_to_finish_alone(request, limit, block_size)
    if num_blocks > num_usable:
        raise RequestTooLargeError(
            f"expected a request of at most {num_usable} blocks of {block_size} tokens, it may need {num_blocks}; "
            "shorten the prompt, request fewer tokens, or give the server more memory",
            code="pool_too_small",
        )
