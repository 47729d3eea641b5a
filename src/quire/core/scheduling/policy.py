"""The scheduler's decisions as pure functions: chunk sizes, which sequences to preempt, which requests to reject."""

from collections.abc import Callable

from quire.core.digests import Namespace
from quire.core.memory.block_table import num_blocks_for
from quire.core.request import RANK, Request
from quire.core.scheduling.sequence import Sequence
from quire.errors import InvalidParameterError, RequestTooLargeError

PROTECTED_AFTER = 3
"""A sequence preempted this often is no longer preempted for new sequences."""


def chunk_length(num_computed: int, num_tokens: int, budget: int, block_size: int, fork_point: int | None) -> int:
    """Return how many of a sequence's `num_tokens` tokens to compute next: all, or whole blocks within the budget.

    Other sequences may wait for a full block, so a chunk ends inside a block only at the last known token or at
    `fork_point` (`Sequence.fork_point`). Returns 0 if the budget does not reach the next block border.
    """
    end = num_tokens if fork_point is None or num_computed >= fork_point else fork_point
    if end - num_computed <= budget:
        return end - num_computed
    return max(0, (num_computed + budget) // block_size * block_size - num_computed)


def reduce_to_budget(counts: list[int], budget: int) -> list[int]:
    """Reduce the counts in place, last ones first, until their sum fits the budget; positive counts stay at least 1."""
    excess = sum(counts) - budget
    for index in range(len(counts) - 1, -1, -1):
        if excess <= 0:
            break
        cut = min(excess, max(0, counts[index] - 1))
        counts[index] -= cut
        excess -= cut
    return counts


def may_preempt(newcomer: Sequence, victim: Sequence) -> bool:
    """Return whether `victim` may be preempted for `newcomer`: it has a lower priority class, a later `key` and fewer
    than `PROTECTED_AFTER` preemptions."""
    return (
        RANK[newcomer.request.priority] < RANK[victim.request.priority]
        and newcomer.key < victim.key
        and victim.num_preemptions < PROTECTED_AFTER
    )


def victims_for(
    newcomer: Sequence, running: list[Sequence], is_enough: Callable[[list[Sequence]], bool]
) -> list[Sequence] | None:
    """Choose the sequences to preempt so that `newcomer` fits: latest keys first, no more than needed; None if it
    cannot fit. `running` is sorted by key; `is_enough(victims)` returns whether preempting these victims is enough.
    """
    victims: list[Sequence] = []
    for victim in reversed(running):
        if is_enough(victims):
            break
        if may_preempt(newcomer, victim):
            victims.append(victim)
    if not is_enough(victims):
        return None
    for victim in victims[::-1]:
        remaining = [other for other in victims if other is not victim]
        if is_enough(remaining):
            victims = remaining
    return victims


def blocks_to_finish_alone(request: Request, max_sequence_tokens: int, block_size: int) -> int:
    """Return the largest number of blocks that all continuations of a request can need at once.

    The last output token is never fed to the model, so it needs no KV slot. All continuations share the full blocks
    among all prompt tokens but the last; when they fork, the partly filled block that they copy stays for one step.
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
    """Raise RequestError for a request that could not finish even on an idle engine: no prompt, more than `limit`
    tokens in a sequence, too many continuations, more than `num_usable` blocks, or an adapter that does not exist.
    """
    num_prompt, num_sequences = len(request.prompt), len(request.continuations)
    if num_prompt == 0 or num_sequences == 0:
        message = "expected at least one prompt token and one continuation, got none"
        raise RequestTooLargeError(message, code="empty_request")
    if num_prompt + min(request.params.max_tokens, 1) > limit:
        raise RequestTooLargeError(
            f"expected at most {limit} tokens in a sequence, got a prompt of {num_prompt} and its output; shorten it"
        )
    if num_sequences > max_sequences:
        message = f"expected at most {max_sequences} continuations at once, got {num_sequences}; request fewer"
        raise RequestTooLargeError(message, code="too_many_continuations")
    if adapter := request.namespace.adapter:
        raise InvalidParameterError(
            f"this model has no adapter named {adapter!r}, and none can be loaded yet; leave adapter out",
            "adapter",
        )
    num_blocks = blocks_to_finish_alone(request, limit, block_size)
    if num_blocks > num_usable:
        raise RequestTooLargeError(
            f"expected a request of at most {num_usable} blocks of {block_size} tokens, got one of up to {num_blocks}; "
            "shorten the prompt, request fewer tokens, or give the server more memory",
            code="pool_too_small",
        )
