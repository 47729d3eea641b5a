"""What a server and the process that renders its chat templates send to each other.

    server    LoadTemplate · Render
    process   TemplateLoaded · Broken · Rendered · TemplateRefused

No message holds code, and none is large: texts of a client's go one way, one prompt comes back.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.errors import TemplateError

TOO_DEEP = (
    "messages or tools are nested too deep for a chat template: expected at most some hundred lists and objects inside "
    "one another; send arguments and schemas with fewer levels"
)
"""What a client gets whose messages no side can write, or no template can walk through."""


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
    sources: tuple[tuple[int, int, str], ...] = ()
    """Spans (start, stop, label) of what comes from one message (`m` and its index) or tool (`t`), in order."""
    spent_s: float = 0.0
    """Of processor time."""


class TemplateRefused(msgspec.Struct, frozen=True, tag=True):
    """The template refused the messages, or did too much work on them."""

    message: str
    spent_s: float = 0.0
    code: str = TemplateError.code


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The template does not compile."""

    message: str


ToProcess = LoadTemplate | Render
ToServer = TemplateLoaded | Rendered | TemplateRefused | Broken

read_to_process: Callable[[bytes], ToProcess] = msgspec.json.Decoder(ToProcess).decode
read_to_server: Callable[[bytes], ToServer] = msgspec.json.Decoder(ToServer).decode
