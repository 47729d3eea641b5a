"""What an API brings to be served: how its bodies become requests, and which bytes tell its clients of the answers.

A dialect is a folder beside this file. `answering.py` does the rest, for all of them alike: it knows pieces and ends,
asks models and sends bytes, and never looks into them. How a dialect spells errors that come before its stream stands
in `error_formats.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from quire.api.access.auth import Caller
from quire.api.dialects.field_names import FieldNames
from quire.api.http.errors import ApiError
from quire.api.http.headers import Headers
from quire.api.models.registry import ModelEntry, Models
from quire.client.engines.client import EngineClient
from quire.client.prefix.reuse_log import PromptParts
from quire.client.reply.outputs import Piece
from quire.client.reply.reply import Reply
from quire.client.request.conversation import NOTHING_LISTED, NumberedMessages, RemovedLine, StablePrefix
from quire.client.request.params import SamplingParams
from quire.client.request.requests import RequestOptions
from quire.client.request.text_model import Messages, TextModel
from quire.core.request import PriorityClass, Request

PieceBatch = Sequence[tuple[int, Piece]]
"""Pieces that came together, each with the index of its prompt."""


class ResponseWriter(Protocol):
    """The bytes that tell of the answers to one request. There is one for each request, and it may remember.

    `replies` has an entry for each prompt: all that is known of its answers so far. What is long is written beside the
    event loop, one call at a time.
    """

    @property
    def content_type(self) -> bytes:
        """Of a whole answer."""
        ...

    @property
    def stream_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Of a stream, its content type among them."""
        ...

    @property
    def answer_id(self) -> str:
        """What the answer calls itself; empty where it has no name."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """What says nothing. Sent while an open stream waits for its next piece, so that nobody takes it for dead."""
        ...

    def begin(self, replies: Sequence[Reply]) -> bytes:
        """What stands before everything else in a stream. Sent with the first bytes there are: before them nothing is
        open, so that an error has a status of its own."""
        ...

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        """What these pieces add to a stream; empty if they show nothing. Called once for all that came together."""
        ...

    def end(self, replies: Sequence[Reply]) -> bytes:
        """The last bytes of a stream in which all was said, with what it cost where that is told."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The last bytes of a stream that broke after it was open."""
        ...

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """All answers at once, with what they cost."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """Which model is asked, by whom, how urgently. The model may not be here yet."""

    model: ModelEntry
    options: RequestOptions
    is_streamed: bool = False

    @property
    def priority(self) -> PriorityClass:
        """How urgently."""
        return PriorityClass(self.options.get("priority", PriorityClass.NORMAL))


@dataclass(frozen=True, slots=True)
class Target:
    """The same with the model itself, which is here until the answer is sent."""

    model: ModelEntry
    options: RequestOptions
    client: EngineClient
    text: TextModel
    priority: PriorityClass
    stable_prefix: StablePrefix = NOTHING_LISTED
    removed: list[RemovedLine] = field(default_factory=list)
    """Lines that were taken out of its system texts, for whoever tells them."""

    @classmethod
    def of(cls, address: Address, client: EngineClient, stable_prefix: StablePrefix) -> "Target":
        """Looked up once."""
        return cls(address.model, address.options, client, client.text, address.priority, stable_prefix)

    def stable(self, messages: Messages) -> Messages:
        """A conversation without the lines that the operator has taken out. Every dialect asks it before a template
        sees the messages."""
        cleaned = self.stable_prefix.cleaned(messages)
        self.removed.extend(cleaned.removed)
        if isinstance(messages, NumberedMessages):
            return NumberedMessages(cleaned.messages, messages.parts)
        return cleaned.messages


class GenerationRequest(msgspec.Struct, frozen=True):
    """Everything that has to be known to answer."""

    to: Target
    prompts: Sequence[list[int]]
    params: SamplingParams
    writer: ResponseWriter
    is_streamed: bool = False
    requests: Sequence[Request] = ()
    """One for each prompt, once they are made."""
    parts: Sequence[PromptParts] = ()
    """Where in each prompt its client's messages and tools lie, of one that is made of such."""
    keep: Callable[[Sequence[Reply]], None] | None = None
    """Called beside the event loop when all is said, before the last bytes: who has these may go on with it."""


class Dialect(Protocol):
    """Makes requests out of bodies."""

    @property
    def names(self) -> FieldNames:
        """Those that its bodies may have."""
        ...

    def parse(self, body: dict[str, Any]) -> Any:
        """Valid fields of a body, or a refusal. Pure; may run beside the event loop."""
        ...

    def address(self, fields: Any, models: Models, caller: Caller, headers: Headers) -> Address:
        """Whom these fields ask, and in whose name. Cheap: whoever finds the house full is told after this."""
        ...

    def generation(self, fields: Any, to: Target) -> GenerationRequest:
        """What these fields ask, in tokens. Runs beside the event loop, however small it is."""
        ...
