"""The scheduler's choices as pure functions: how many tokens, which sequence displaces which, what is never served.

No state, no side effects: each can be read, tested and argued about alone.
"""

from collections.abc import Callable
from typing import NamedTuple

from quire.core.digests import Namespace
from quire.core.memory.block_table import num_blocks_for
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.request import RANK, Request
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.sequence import Sequence
from quire.errors import InvalidParameterError, RequestTooLargeError

PROTECTED_AFTER = 3
"""A sequence preempted this often is not displaced by newcomers any more."""


def chunk_length(num_computed: int, num_known: int, budget: int, block_size: int, fork_point: int | None) -> int:
    """How many tokens to compute next: all that are known, or what the budget allows up to a border.

    A chunk ends on a block border, at the last known token, or at the fork point; so a block that others may be waiting
    for is never left half written by one that could have finished it. 0: the budget does not reach the next border.
    """
    end = num_known if fork_point is None or num_computed >= fork_point else fork_point
    if end - num_computed <= budget:
        return end - num_computed
    return max(0, (num_computed + budget) // block_size * block_size - num_computed)


def within_budget(counts: list[int], budget: int) -> list[int]:
    """The same numbers, none of them below one that was not, with a sum within the budget: the last give way first."""
    excess = sum(counts) - budget
    for at in range(len(counts) - 1, -1, -1):
        if excess <= 0:
            break
        cut = min(excess, max(0, counts[at] - 1))
        counts[at] -= cut
        excess -= cut
    return counts


def may_displace(newcomer: Sequence, victim: Sequence) -> bool:
    """Whether a waiting sequence may take a running one's place: of a lower class, with a later key, not protected."""
    return (
        RANK[newcomer.request.priority] < RANK[victim.request.priority]
        and newcomer.key < victim.key
        and victim.num_preemptions < PROTECTED_AFTER
    )


def victims_for(
    newcomer: Sequence, running: list[Sequence], is_enough: Callable[[list[Sequence]], bool]
) -> list[Sequence] | None:
    """Which sequences yield so that a newcomer fits: latest keys first, none without need; None if it cannot be done.

    `running` comes in order of urgency; `is_enough` returns whether the newcomer would fit without these.
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
    """The most blocks all continuations together can ever hold, with no other request to share with.

    The last token produced is never computed. Full blocks of the prompt, less its last token, are shared by all
    continuations; when they part, the source of the copies is held for one step more.
    """
    num_tokens = min(len(request.prompt) + request.params.max_tokens, max_sequence_tokens) - 1
    num_blocks = num_blocks_for(max(num_tokens, len(request.prompt)), block_size)
    num_shared = (len(request.prompt) - 1) // block_size
    num_sequences = len(request.continuations)
    return num_shared + num_sequences * (num_blocks - num_shared) + (num_sequences > 1)


def will_compute(sequence: Sequence, namespace: Namespace, tokens: list[int]) -> bool:
    """Whether a running sequence has these tokens and has not computed all of them yet."""
    return (
        len(sequence.tokens) - sequence.num_uncomputed < len(tokens)
        and sequence.request.namespace == namespace
        and sequence.tokens[: len(tokens)] == tokens
    )


class RequestLimits(NamedTuple):
    """What one request may be, fixed at start."""

    max_sequence_tokens: int
    max_sequences: int
    block_size: int
    num_blocks: int
    """To run in: what is kept for pins is not among them."""

    @staticmethod
    def of(config: SchedulerConfig, memory: KVMemoryConfig) -> "RequestLimits":
        """Those of a scheduler on a memory."""
        num_blocks = memory.num_blocks - memory.pin_budget_blocks
        return RequestLimits(config.max_sequence_tokens, config.max_running, memory.block_size, num_blocks)


def check_request(
    request: Request, max_sequence_tokens: int, max_sequences: int, block_size: int, num_usable: int
) -> None:
    """Refuse what could never finish within `RequestLimits`: no prompt, too long, too many continuations, too large for
    the pool, or for an adapter that is not there.
    """
    limit, num_prompt, num_sequences = max_sequence_tokens, len(request.prompt), len(request.continuations)
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
