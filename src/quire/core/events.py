"""What happened, as plain frozen messages. The engine emits them; streams, observers and publishers read them.

A request's events are, in order:

    Refused                                                       it was not let in, and that was all
    Queued ─► Admitted ─► FirstToken ─► Token … ─► SequenceFinished, one for each answer ─► Finished

`Preempted` and `Replayed` may come in between, and `PromptLogprobs` before the first token. One that ends in the queue
has no more than its first and its last two kinds. They cross between processes as they are: arrays that begin with
their own name. None has the time: clocks differ. The receiver dates an event; one about
something before has its age.

The KV events carry everything the field's wire format needs (block hashes in chain order, the parent, the
tokens, the block size, and the adapter and cache group that entered the hash). A block's `BlockStored` always
comes before those of its children and before its own `BlockRemoved`.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.core.divergence import Divergence
from quire.core.request import FinishReason
from quire.core.step import TokenLogprobs
from quire.errors import (
    DrainingError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidParameterError,
    MessageError,
    QueueFullError,
    QuireError,
    RequestError,
    RequestTooLargeError,
    TenantShareError,
)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of full blocks became hittable, each under the one before it."""

    digests: tuple[bytes, ...]
    parent_digest: bytes | None
    """The block before the first of this run; None when the run begins a prompt."""
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str
    cache_group: str
    """Must be announced: else a router counts one tenant's blocks as hits for another."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be hit. Leaves come before their parents."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be hit any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Assigned(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True, gc=False, kw_only=True
):
    """Hundreds are made in a step: they hold plain values, and nothing that could lead back to them."""

    epoch: int = 0
    """Which assignment it is of: `Request.epoch`. Last on the wire."""


class _Event(_Assigned, frozen=True):
    request_id: str


class Queued(_Event, frozen=True):
    """A request was let in."""


class Refused(_Event, frozen=True):
    """A request was not let in, or no worker is there to run it: the only event of its id, or the last."""

    kind: str
    """Name of the error."""
    details: tuple[str | int | None, ...]

    @classmethod
    def of(cls, request_id: str, error: QuireError, epoch: int = 0) -> "Refused":
        """This error as an event."""
        return cls(request_id, *error_parts(error), epoch=epoch)

    @property
    def error(self) -> QuireError:
        """The same error, wherever it is read. Raises MessageError for one that could not have been sent."""
        return error_from(self.kind, self.details)


_DETAILS: dict[type[QuireError], tuple[str, ...]] = {
    DuplicateRequestError: ("request_id",),
    InvalidParameterError: ("message", "parameter"),
    QueueFullError: ("num_waiting", "limit", "retry_after_s"),
    TenantShareError: ("tenant", "num_waiting", "limit", "retry_after_s", "state"),
}
_REFUSALS: dict[str, type[QuireError]] = {
    kind.__name__: kind
    for kind in (
        *_DETAILS,
        DrainingError,
        EngineDeadError,
        RequestError,
        RequestTooLargeError,
    )
}


def error_parts(error: QuireError) -> tuple[str, tuple[str | int | None, ...]]:
    """An error as it is sent: its kind and its details."""
    names = _DETAILS.get(type(error))
    return type(error).__name__, (str(error),) if names is None else tuple(getattr(error, name) for name in names)


def error_from(kind: str, details: tuple[str | int | None, ...]) -> QuireError:
    """The error that was sent. Raises MessageError for one that could not have been."""
    refusal: Any = _REFUSALS.get(kind)
    if refusal is None:
        raise MessageError(f"expected a rejection by one of {', '.join(_REFUSALS)}, got {kind!r}")
    try:
        return refusal(*details)  # type: ignore[no-any-return]
    except TypeError as error:
        raise MessageError(f"{kind} has {len(details)} details, which do not fit it: {error}") from error


class Admitted(_Event, frozen=True):
    """A request began to run for the first time."""

    age_s: float
    """How long before the event is sent that was: the step it began with may take long."""
    wait_s: float
    """How long it had waited, as measured by this engine."""
    num_cached_tokens: int
    miss: Divergence | None = None
    """Why the next token was not found in the cache at this moment, where the request is explained."""


class FirstToken(_Event, frozen=True):
    """The prompt is computed: the request's first token comes next."""

    num_cached_tokens: int
    """Prompt tokens that were not computed."""


class Token(_Event, frozen=True):
    """One more token of one continuation."""

    sequence_index: int
    token_id: int
    num_output_tokens: int
    """Counted from the client's prompt, this token included: 1 is the first token."""
    logprobs: TokenLogprobs | None


class PromptLogprobs(_Event, frozen=True):
    """Log-probabilities of a run of prompt tokens, in order; the prompt's first token has none."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


class Preempted(_Event, frozen=True):
    """A sequence gave up its place; it comes back with the tokens it has."""

    sequence_index: int


class SequenceFinished(_Event, frozen=True):
    """One continuation ended."""

    sequence_index: int
    reason: FinishReason
    num_output_tokens: int
    error: str | None
    retry_after_s: int | None = None
    """When to retry, of one that was displaced."""
    code: str | None = None
    """Of the error."""


class Finished(_Event, frozen=True):
    """The request ended: the last event of its id, and the only one of this kind."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Replayed(_Event, frozen=True):
    """The worker that ran it is gone and another goes on with it. Sent by supervisors and gateways, not by the core."""

    is_exact: bool = True
    """False: sent once more, because the new worker may choose other tokens than the one before would have."""


RequestEvent = (
    Queued
    | Refused
    | Admitted
    | FirstToken
    | Token
    | PromptLogprobs
    | Preempted
    | Replayed
    | SequenceFinished
    | Finished
)
Event = KVEvent | RequestEvent
