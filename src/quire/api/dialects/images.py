"""Pictures in conversations: this server reads text. A screenshot need not end an agent's run all the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.http.errors import unsupported

LEFT_OUT = "[image left out]"


CHAT_PICTURES = ("image_url", "input_image", "image")


@dataclass(frozen=True, slots=True)
class Images:
    """What is done with pictures."""

    are_dropped: bool = False
    """A text stands where one was; otherwise a request with one is refused."""

    def text_for(self, kind: str) -> str:
        """What stands in a picture's place."""
        if not self.are_dropped:
            raise unsupported(kind, "the models here accept only text; start the server with --drop-images to drop it")
        return LEFT_OUT


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat with a text where each picture was."""
    return [{**message, "content": _content(message.get("content"))} for message in messages]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": LEFT_OUT} if _is_picture(part) else part for part in content]


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in CHAT_PICTURES
