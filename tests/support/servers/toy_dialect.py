"""A second API for the server, as small as one can be: lines of plain text instead of events and objects.

+ " cat"                     a piece of text; the first comes after the line `begin`, the last before `end 2 tokens`
said " cat" for 2 tokens     a whole answer
no 400 invalid_request: …    an error; within a stream its last line is `broken 503 …`
.                            a keep-alive
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from starlette.requests import Request

from quire.api.access.auth import Gate, require_key
from quire.api.app import add_route, make_app
from quire.api.asgi import RequestMiddleware
from quire.api.dialects.answering import Dialect
from quire.api.dialects.body_shapes import GenerationFields
from quire.api.dialects.error_formats import SERVER_ERRORS
from quire.api.dialects.field_names import names
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.dialects.response_writer import PieceBatch, ProgressFields, ResponseWriter
from quire.api.http.errors import ApiError, ErrorFormat, invalid
from quire.api.server_state import ServerState
from quire.client.reply.outputs import Piece, ReasoningPart, TextPart
from quire.client.reply.reply import Reply
from quire.client.request.params import SamplingParams
from quire.client.request.text_model import TextModel

PATH = "/toy"
PLAIN = b"text/plain; charset=utf-8"


def error_line(error: ApiError, word: str = "no") -> bytes:
    """An error, wherever it is met."""
    return f"{word} {error.status} {error.code}: {error.message}\n".encode()


TOY_ERRORS = ErrorFormat(PLAIN, error_line)


class ToyWriter(ResponseWriter):
    """Lines that tell of the answers to one request."""

    content_type = PLAIN
    stream_headers = ((b"content-type", PLAIN),)

    def begin(self, replies: Sequence[Reply]) -> bytes:
        return b"begin\n"

    def keep_alive(self, progress: ProgressFields | None) -> bytes:
        return b".\n" if progress is None else f". {json.dumps(progress)}\n".encode()

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        return "".join([_line(piece) for _, piece in batch if piece.delta]).encode()

    def end(self, replies: Sequence[Reply]) -> bytes:
        return f"end {_num_tokens(replies)} tokens\n".encode()

    def error(self, error: ApiError) -> bytes:
        """The last line of a stream that broke."""
        return error_line(error, "broken")

    def whole(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        return f"said {json.dumps(reply.completion().text)} for {_num_tokens(replies)} tokens\n".encode()


def _line(piece: Piece) -> str:
    match piece.part:
        case TextPart():
            return f"+ {json.dumps(piece.delta)}\n"
        case ReasoningPart():
            return f"? {json.dumps(piece.delta)}\n"
        case call:
            return f"! {call.name} {json.dumps(piece.delta)}\n"


def _num_tokens(replies: Sequence[Reply]) -> int:
    return sum(reply.num_tokens for reply in replies)


class ToyFields(GenerationFields):
    """What there is to say."""

    say: str
    count: int = 4


class Toy(Dialect):
    """Takes `{"say": text, "count": tokens, "stream": whether}`."""

    names = names("say count stream model return_progress")

    def parse(self, body: dict[str, Any]) -> ToyFields:
        """Its fields, if there is something to say."""
        if not isinstance(body.get("say"), str):
            raise invalid("say must be a text; send one", "say")
        return ToyFields.model_validate(body)

    def render(self, fields: ToyFields, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
        params = SamplingParams(max_tokens=fields.count, temperature=0.0, ignore_eos=True)
        return structs.replace(request, prompts=[text.prompt(fields.say)], params=params)

    def writer(self, fields: ToyFields, request: ResolvedRequest) -> ToyWriter:
        return ToyWriter()


def make_toy(admission: ServerState, gate: Gate) -> RequestMiddleware:
    """The server's application with one route more."""
    app, toy = make_app(admission, gate), Toy(admission)

    async def _answer(_request: Request) -> Toy:
        return toy

    add_route(app, "POST", PATH, _answer, require_key)
    return RequestMiddleware(app, errors=replace(SERVER_ERRORS, by_path={**SERVER_ERRORS.by_path, PATH: TOY_ERRORS}))
