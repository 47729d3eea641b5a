"""Images in conversations. The models read only text; the operator decides whether images are refused or dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.http.errors import unsupported

LEFT_OUT = "[image left out]"


CHAT_PICTURES = ("image_url", "input_image", "image")


@dataclass(frozen=True, slots=True)
class Images:
    """The policy for images."""

    are_dropped: bool = False
    """A placeholder text replaces each image; otherwise a request with an image is refused."""

    def text_for(self, kind: str) -> str:
        """Return the placeholder for an image. Raises ApiError if images are refused."""
        if not self.are_dropped:
            raise unsupported(kind, "the models here accept only text; start the server with --drop-images to drop it")
        return LEFT_OUT


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return chat messages with the placeholder text in place of each image."""
    return [{**message, "content": _content(message.get("content"))} for message in messages]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": LEFT_OUT} if _is_picture(part) else part for part in content]


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in CHAT_PICTURES
