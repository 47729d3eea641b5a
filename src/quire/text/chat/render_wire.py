"""What a server and the process that renders its chat templates say to each other: JSON, framed by its length.

    server    Load (a template) · Render (messages)
    process   Hello (it has started) · Loaded · Broken · Rendered · Refused

No message holds code, and none is large: texts of a client's go one way, one prompt comes back.
"""

import socket
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
LENGTH_BYTES = 4


class LoadTemplate(msgspec.Struct, frozen=True, tag=True):
    """Compile this template, and try what it shows."""

    source: str
    special_tokens: dict[str, str]
    max_output_chars: int
    max_steps: int


class Render(msgspec.Struct, frozen=True, tag=True):
    """Render the loaded template."""

    messages: list[dict[str, Any]]
    tools: Any
    documents: Any
    extra: dict[str, Any]
    add_generation_prompt: bool
    now: str
    """The time a template is told, in ISO 8601."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The process has started."""


class TemplateLoaded(msgspec.Struct, frozen=True, tag=True):
    """The template can be used."""

    wants_parts: bool
    """It shows a message's text only if it comes as a list of parts."""
    own_text: str
    """All text that stands in it."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """A prompt, and which of its characters a client wrote."""

    text: str
    client: tuple[tuple[int, int], ...]
    """Spans (start, stop), in order."""


class TemplateRefused(msgspec.Struct, frozen=True, tag=True):
    """The template refused the messages, or did too much work on them."""

    message: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The template does not compile."""

    message: str


ToProcess = LoadTemplate | Render
ToServer = Hello | TemplateLoaded | Rendered | TemplateRefused | Broken

encode_frame = msgspec.json.Encoder().encode
"""A message as it goes over the wire. Raises TypeError, ValueError or RecursionError for what JSON cannot say."""
read_to_process: Callable[[bytes], ToProcess] = msgspec.json.Decoder(ToProcess).decode
read_to_server: Callable[[bytes], ToServer] = msgspec.json.Decoder(ToServer).decode


def exchange(end: socket.socket, data: bytes, deadline_s: float) -> ToServer:
    """Say a message to the process and hear its answer by the deadline. Raises like `send` and `receive`, and
    MsgspecError for what is no answer."""
    send(end, data, deadline_s)
    return read_to_server(receive(end, deadline_s))


def send(end: socket.socket, data: bytes, deadline_s: float | None = None) -> None:
    """One frame. Raises OSError, TimeoutError if it is not taken by the deadline (of the monotonic clock)."""
    _allow(end, deadline_s)
    end.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def receive(end: socket.socket, deadline_s: float | None = None) -> bytes:
    """One frame. Raises EOFError if the other side has ended, OSError, TimeoutError."""
    size = int.from_bytes(_exactly(end, LENGTH_BYTES, deadline_s), "little")
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"a frame may have {MAX_FRAME_BYTES} bytes, {size} announced")
    return bytes(_exactly(end, size, deadline_s))


def _exactly(end: socket.socket, size: int, deadline_s: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        _allow(end, deadline_s)
        count = end.recv_into(view)
        if not count:
            raise EOFError("the other side has ended")
        view = view[count:]
    return data


def _allow(end: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is not None:
        # A timeout of zero would mean not to wait at all: what is there already is still taken.
        end.settimeout(max(0.001, deadline_s - monotonic()))
