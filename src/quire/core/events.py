"""Events of requests and of KV blocks, as immutable messages. The engine emits them to streams, metrics and publishers.

The events of a request, in order:

    Refused                                                       the request was rejected; no other event follows
    Queued ─► Admitted ─► FirstToken ─► Token … ─► SequenceFinished, one for each continuation ─► Finished

`Preempted` and `Replayed` may come in between, `PromptProgress` and `PromptLogprobs` before the first token. A request
that ends in the queue has only `Queued`, `SequenceFinished` and `Finished`. Between processes, an event is sent as an
array that starts with its class name. Events have no timestamps, because clocks differ between processes: the receiver
timestamps them, and an event about an earlier time has its age.

The KV events have all fields of the usual wire format (block hashes in chain order, parent, tokens, block size) and
the adapter and cache group that are part of the hash. The `BlockStored` of a block always precedes the `BlockStored` of
its children and its own `BlockRemoved`.
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
    """A run of full blocks was added to the prefix cache; each block is the parent of the next."""

    digests: tuple[bytes, ...]
    parent_digest: bytes | None
    """Digest of the block before the run; None if the run starts a prompt."""
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str
    cache_group: str
    """Published because a router must not count one tenant's blocks as hits for another tenant."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks were removed from the prefix cache. Children precede their parents."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All blocks were removed from the prefix cache."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _EpochMessage(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True, gc=False, kw_only=True
):
    """`gc=False` makes events cheap, hundreds per step; safe because they contain only plain values and no cycles."""

    epoch: int = 0
    """`Request.epoch`: the assignment of the request to an engine. The last field on the wire."""


class _Event(_EpochMessage, frozen=True):
    request_id: str


class Queued(_Event, frozen=True):
    """The request was accepted."""


class Refused(_Event, frozen=True):
    """The request was rejected (the only event of its id), or no worker is left to run it (the last event)."""

    kind: str
    """Class name of the error."""
    details: tuple[str | int | None, ...]

    @classmethod
    def of(cls, request_id: str, error: QuireError, epoch: int = 0) -> "Refused":
        """Make the event of a request that failed with this error."""
        return cls(request_id, *error_parts(error), epoch=epoch)

    @property
    def error(self) -> QuireError:
        """The error, rebuilt by the receiver. Raises MessageError if kind and details do not describe an error."""
        return error_from(self.kind, self.details)


_DETAILS: dict[type[QuireError], tuple[str, ...]] = {
    DuplicateRequestError: ("request_id",),
    InvalidParameterError: ("message", "parameter"),
    QueueFullError: ("num_waiting", "limit", "retry_after_s"),
    TenantShareError: ("tenant", "num_requests", "limit", "retry_after_s", "state"),
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
    """Return the class name and details of an error, from which `error_from` rebuilds it in another process."""
    names = _DETAILS.get(type(error))
    return type(error).__name__, (str(error),) if names is None else tuple(getattr(error, name) for name in names)


def error_from(kind: str, details: tuple[str | int | None, ...]) -> QuireError:
    """Rebuild an error that was sent. Raises MessageError if kind and details do not describe an error."""
    refusal: Any = _REFUSALS.get(kind)
    if refusal is None:
        raise MessageError(f"expected a rejection by one of {', '.join(_REFUSALS)}, got {kind!r}")
    try:
        return refusal(*details)  # type: ignore[no-any-return]
    except TypeError as error:
        raise MessageError(f"expected the details of a {kind}, got {len(details)} details: {error}") from error


class Admitted(_Event, frozen=True):
    """The request started to run for the first time."""

    age_s: float
    """Time from the start of the request to the sending of this event, which waits for the end of the step."""
    wait_s: float
    """Time the request spent in the queue, measured by this engine."""
    num_cached_tokens: int
    miss: Divergence | None = None
    """The reason for the first cache miss at admission; only if the request has `is_explained`."""


class PromptProgress(_Event, frozen=True):
    """More of the prompt was computed or found in the cache. Sent only if the request has `reports_progress`."""

    num_computed_tokens: int
    """Prompt tokens computed now, cached ones included; after a preemption or a crash it may be less than before."""
    num_cached_tokens: int


class FirstToken(_Event, frozen=True):
    """The prompt has been computed; the request's first token follows."""

    num_cached_tokens: int
    """Prompt tokens that came from the cache."""
    num_written_tokens: int | None = None
    """Prompt tokens that the request added to the cache; None: the engine does not report it."""
    num_pinned_tokens: int = 0
    """Prompt tokens that the request's pins hold."""


class Token(_Event, frozen=True):
    """A new token of one continuation."""

    sequence_index: int
    token_id: int
    num_output_tokens: int
    """Number of output tokens so far, this one included."""
    logprobs: TokenLogprobs | None
    is_forced: bool = False
    """Whether a grammar allowed no other token."""


class PromptLogprobs(_Event, frozen=True):
    """Log-probabilities of consecutive prompt tokens; the prompt's first token has none."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


class Preempted(_Event, frozen=True):
    """A sequence was preempted; it will resume with its known tokens."""

    sequence_index: int


class SequenceFinished(_Event, frozen=True):
    """A continuation ended."""

    sequence_index: int
    reason: FinishReason
    num_output_tokens: int
    error: str | None
    retry_after_s: int | None = None
    """Delay before a retry, if the sequence was displaced."""
    code: str | None = None
    """The error's code."""


class Finished(_Event, frozen=True):
    """The request ended. This is the last event of its id."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Replayed(_Event, frozen=True):
    """Another worker continues the request, because its worker is gone. Sent by supervisors and gateways only."""

    is_exact: bool = True
    """False: the new worker may choose different tokens than the old worker would have."""


RequestEvent = (
    Queued
    | Refused
    | Admitted
    | PromptProgress
    | FirstToken
    | Token
    | PromptLogprobs
    | Preempted
    | Replayed
    | SequenceFinished
    | Finished
)
Event = KVEvent | RequestEvent
