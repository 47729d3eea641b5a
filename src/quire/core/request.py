"""What a client requested, checked. Plain data; decides nothing.

A **request** is for one or more continuations of a prompt. Each becomes a **sequence** (`scheduling/sequence.py`).
"""

from enum import Enum

import msgspec

from quire.core.digests import Namespace


class PriorityClass(Enum):
    """How urgent a request is. Worth a head start in the queue, never more: see `waiting_queue`."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


RANK = {priority: rank for rank, priority in enumerate(PriorityClass)}
"""The most urgent class is first."""


class FinishReason(Enum):
    """Why a sequence, or a whole request, ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    DISPLACED = "displaced"
    """It waited, and its place went to a tenant that was below its share."""


class ResolvedSampling(msgspec.Struct, frozen=True):
    """How tokens are chosen. Every value is valid: it was checked when the request was parsed."""

    max_tokens: int = 16
    """How many tokens may be produced, counted from the end of the client's prompt. 0: it ends when its prompt is
    computed.
    """
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Stop tokens cannot be chosen before this many tokens have been produced."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence; the model's own end-of-text tokens are among them unless `ignore_eos` was set."""
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Such a request reads no cached block: it needs every row computed."""

    @property
    def needs_known_tokens(self) -> bool:
        """Whether choosing a token needs the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Continuation(msgspec.Struct, frozen=True):
    """One of the answers of a request; after a crash, or from elsewhere, with the tokens it had already."""

    index: int = 0
    produced: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """What a client requested, checked."""

    request_id: str
    prompt: tuple[int, ...]
    namespace: Namespace
    arrival_s: float
    """On its process's own clock, as its deadline: between processes it is an age (`engine.commands`)."""
    params: ResolvedSampling = ResolvedSampling()
    seed: int = 0
    """Drawn at admission if the client gave none, so that a crash changes nothing."""
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.NORMAL
    continuations: tuple[Continuation, ...] = (Continuation(),)
    """One for each answer that is still to come."""
    deadline_s: float | None = None
    is_explained: bool = False
    """Whether its admission is to have the reason why the next token was not found in the cache."""
    has_reservation: bool = False
    """Its tenant was promised a place at this time, or it was let in before: it is let in whatever waits."""
    epoch: int = 0
    """Which assignment to an engine this is, larger than all before it; counted by the process that assigns, and sent
    with every event."""
    grammar: str | None = None
    """What every answer must match, from its first token to its last; opaque here."""
    has_stop_texts: bool = False
    """Whether texts may end its answers: they are found where tokens become text, and here there are only tokens."""
    work_tokens: int = 0
    """What its text has cost before it came here, in computed prompt tokens (`work_budget`)."""

    @property
    def adapter(self) -> str:
        """The LoRA it is computed with, which is part of what its blocks are named by; empty is the model itself."""
        return self.namespace.adapter

    @property
    def has_begun(self) -> bool:
        """An engine before this one produced tokens of it."""
        return any(one.produced for one in self.continuations)
