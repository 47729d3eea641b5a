"""A request that has been read and found valid: which model, which prompts, how to choose tokens, how to word answers.

A dialect (`openai/chat.py`, `openai/completions.py`) makes questions out of bodies and wordings out of questions; what
happens in between, in `answering.py`, is the same for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.api.access.auth import Caller
from quire.api.models import ModelEntry, Models
from quire.client.outputs import Piece
from quire.client.params import SamplingParams
from quire.client.reply import Reply
from quire.client.requests import RequestOptions
from quire.core.request import PriorityClass, Request


class ResponseWriter(Protocol):
    """How one API words the answers to one question."""

    @property
    def id_prefix(self) -> str:
        """What the answer's id begins with."""
        ...

    @property
    def object_name(self) -> str:
        """What a whole answer calls itself."""
        ...

    @property
    def chunk_name(self) -> str:
        """What a chunk calls itself."""
        ...

    def opening(self, prompt_index: int, reply: Reply) -> Sequence[dict[str, Any]]:
        """Choices that come before a prompt's first piece."""
        ...

    def choice(self, prompt_index: int, piece: Piece) -> dict[str, Any] | None:
        """A piece as a choice of a chunk; None if it shows nothing."""
        ...

    def whole(self, prompt_index: int, reply: Reply) -> Sequence[dict[str, Any]]:
        """A prompt's answers as choices."""
        ...

    def extras(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        """What else stands in the whole answer, beside choices and usage."""
        ...


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Whether and how to stream."""

    is_on: bool = False
    with_usage: bool = False
    with_usage_always: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """Which model is asked, by whom, how urgently."""

    model: ModelEntry
    options: RequestOptions

    @property
    def priority(self) -> PriorityClass:
        """Its class."""
        return PriorityClass(self.options.get("priority", PriorityClass.NORMAL))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything that has to be known to answer."""

    to: Target
    prompts: Sequence[list[int]]
    params: SamplingParams
    stream: StreamOptions
    writer: ResponseWriter
    requests: Sequence[Request] = ()
    """One for each prompt, once they are made."""
    shows_answers: bool = True
    """False: only the prompt is asked about; the one token that must be computed is neither shown nor counted."""


class Dialect(Protocol):
    """Makes questions out of bodies."""

    def parse(self, body: dict[str, Any]) -> Any:
        """Valid fields of a body, or a refusal. Pure; may run beside the event loop."""
        ...

    def target(self, fields: Any, models: Models, caller: Caller, headers: Mapping[bytes, bytes]) -> Target:
        """Whom these fields ask, and in whose name. Cheap: whoever finds the house full is told after this."""
        ...

    def generation(self, fields: Any, to: Target) -> GenerationRequest:
        """What these fields ask, in tokens. Runs beside the event loop, however small it is."""
        ...


def usage(replies: Sequence[Reply], *, shows_answers: bool = True) -> dict[str, Any]:
    """What it cost so far."""
    num_prompt = sum(len(reply.request.prompt) for reply in replies)
    num_output = sum(reply.num_tokens for reply in replies) if shows_answers else 0
    details: dict[str, Any] = {"cached_tokens": sum(reply.num_cached_tokens for reply in replies)}
    if any(reply.request.is_explained for reply in replies):
        details["cache_misses"] = [cache_miss(reply) for reply in replies]
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": details,
    }


def cache_miss(reply: Reply) -> dict[str, Any] | None:
    """Why the next token was not found when the request was admitted; None before that."""
    found = reply.explanation
    if found is None:
        return None
    return {"cached_tokens": found.num_cached_tokens, "reason": found.reason, "position": found.position}
