"""What an API provides: how its bodies become requests, and which bytes its clients receive.

A dialect is a folder beside this file. `answering.py` does the rest, for all of them alike: it handles pieces and ends,
submits requests and sends bytes, and never reads them. The formats of errors that come before a stream are in
`error_formats.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from quire.api.access.auth import Caller
from quire.api.dialects.field_names import FieldNames
from quire.api.http.errors import ApiError
from quire.api.http.headers import Headers
from quire.api.models.registry import ModelEntry, Models
from quire.client.prefix.reuse_log import PromptParts
from quire.client.reply.outputs import Piece
from quire.client.reply.reply import Reply
from quire.client.request.conversation import RemovedLine
from quire.client.request.params import SamplingParams
from quire.client.request.requests import RequestOptions
from quire.client.request.text_model import TextModel

PieceBatch = Sequence[tuple[int, Piece]]
"""Pieces that came together, each with the index of its prompt."""


class ResponseWriter(Protocol):
    """Writes the response to one request. There is one for each request, and it may keep state.

    `replies` has an entry for each prompt, with its answers so far. Long output is written beside the event loop, one
    call at a time.
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
        """The id of the response; empty where it has none."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """Bytes without content, sent while an open stream waits for its next piece, so that no proxy cuts it."""
        ...

    def begin(self, replies: Sequence[Reply]) -> bytes:
        """The beginning of a stream. Sent with the first piece: before that nothing is open, so that an error has a
        status of its own."""
        ...

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        """What these pieces add to a stream; may be empty. Called once for all that came together."""
        ...

    def end(self, replies: Sequence[Reply]) -> bytes:
        """The last bytes of a complete stream, with usage where it was requested."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The last bytes of a stream that broke after it was open."""
        ...

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """All answers at once, with usage."""
        ...


DEFAULT_PARAMS = SamplingParams()


class ResolvedRequest(msgspec.Struct, frozen=True):
    """A request whose model and options are known; the model may not be loaded yet. Its dialect completes it once."""

    model: ModelEntry
    options: RequestOptions
    is_streamed: bool = False
    prompts: Sequence[list[int]] = ()
    params: SamplingParams = DEFAULT_PARAMS
    parts: Sequence[PromptParts] = ()
    """Where in each prompt its client's messages and tools lie, of one that is made of such."""
    removed: Sequence[RemovedLine] = ()
    """Lines that were removed from its system texts, for a response header."""
    keep: Callable[[Sequence[Reply]], None] | None = None
    """Called beside the event loop before the last bytes: a client that has these may continue the conversation."""


class Dialect(Protocol):
    """Turns bodies into requests."""

    @property
    def names(self) -> FieldNames:
        """Those that its bodies may have."""
        ...

    def parse(self, body: dict[str, Any]) -> Any:
        """Valid fields of a body, or a refusal. Pure; may run beside the event loop."""
        ...

    def resolve(self, fields: Any, models: Models, caller: Caller, headers: Headers) -> ResolvedRequest:
        """The model, tenant and priority of these fields. Cheap: a full queue refuses the request right after."""
        ...

    def render(self, fields: Any, request: ResolvedRequest, text: TextModel) -> tuple[ResolvedRequest, ResponseWriter]:
        """The request with its prompts in tokens and their parameters, and the writer of its response. Runs beside the
        event loop, however small it is. A conversation is rendered without the lines that the operator removes."""
        ...
