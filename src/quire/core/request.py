"""A client's validated request, as plain data.

A **request** is for one or more continuations of a prompt. Each becomes a **sequence** (`scheduling/sequence.py`).
"""

from enum import Enum

import msgspec

from quire.core.digests import Namespace


class PriorityClass(Enum):
    """The urgency of a request. It gives a head start of some seconds in the queue, no strict priority."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


RANK = {priority: rank for rank, priority in enumerate(PriorityClass)}
"""Priority class -> rank; the most urgent class has 0."""


class FinishReason(Enum):
    """The reason why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    DISPLACED = "displaced"
    """Its place in the queue went to a tenant below its fair share."""


class ResolvedSampling(msgspec.Struct, frozen=True):
    """Validated sampling parameters, with all defaults applied."""

    max_tokens: int = 16
    """Maximum number of output tokens. 0: the sequence ends when its prompt is computed."""
    temperature: float = 1.0
    """0 is greedy sampling."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Stop tokens cannot be sampled before this many output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence, including the model's end-of-text tokens unless `ignore_eos` was set."""
    logprobs: int | None = None
    """Number of alternatives to report in addition to the chosen token; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each prompt token. The cache is then not read, because every prompt row must be computed."""

    @property
    def needs_known_tokens(self) -> bool:
        """Whether sampling needs all earlier tokens, for penalties."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Continuation(msgspec.Struct, frozen=True):
    """One continuation of a prompt. After a crash or a move to another server, it already has `produced` tokens."""

    index: int = 0
    produced: tuple[int, ...] = ()


class PromptPin(msgspec.Struct, frozen=True):
    """A prefix of a prompt that stays cached for a time after the prompt is computed."""

    num_tokens: int
    """Length of the prefix; its full blocks are pinned."""
    keep_s: float


class Request(msgspec.Struct, frozen=True):
    """A client's validated request."""

    request_id: str
    prompt: tuple[int, ...]
    namespace: Namespace
    arrival_s: float
    """Time of arrival on this process's clock, like `deadline_s`. `engine.commands` converts both between processes."""
    params: ResolvedSampling = ResolvedSampling()
    seed: int = 0
    """If the client sends no seed, the server draws one, so that a replay after a crash gives the same tokens."""
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.NORMAL
    continuations: tuple[Continuation, ...] = (Continuation(),)
    """The continuations that have not finished."""
    deadline_s: float | None = None
    is_explained: bool = False
    """Whether the `Admitted` event includes the reason for the first cache miss."""
    reports_progress: bool = False
    """Whether `PromptProgress` events are sent while the prompt is computed."""
    has_reservation: bool = False
    """Accept the request even if the queue is full: it was accepted before, or is a retry at its Retry-After time."""
    epoch: int = 0
    """The assigning process increases it with each assignment of the request to an engine. Every event has it."""
    grammar: str | None = None
    """The text of a grammar that each complete continuation must match. The core does not read it."""
    has_stop_texts: bool = False
    """Whether the request has stop strings. They are matched after detokenization; the core sees only tokens."""
    work_tokens: int = 0
    """Processor time already spent on the request's text, converted to computed prompt tokens (`work_budget`)."""
    pins: tuple[PromptPin, ...] = ()

    @property
    def adapter(self) -> str:
        """The LoRA adapter, which is part of the block digests; empty for the base model."""
        return self.namespace.adapter

    @property
    def has_begun(self) -> bool:
        """Whether an earlier engine already produced tokens."""
        return any(continuation.produced for continuation in self.continuations)
