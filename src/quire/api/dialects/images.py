"""Images in conversations. The models read only text; the operator decides whether images are refused or dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.http.errors import unsupported

IMAGE_PLACEHOLDER = "[image left out]"
IMAGE_PART_TYPES = ("image_url", "input_image", "image")
"""Types of content parts that hold an image, in chat messages."""


@dataclass(frozen=True, slots=True)
class ImagePolicy:
    """Whether requests with images are served."""

    are_dropped: bool = False
    """Whether a placeholder text replaces each image; otherwise a request with an image is refused."""

    def placeholder(self, part_type: str) -> str:
        """Return the placeholder for a part of this type. Raises ApiError if images are refused."""
        if not self.are_dropped:
            raise unsupported(part_type, "the models here read only text, and the server runs without --drop-images")
        return IMAGE_PLACEHOLDER


def without_images(messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return chat messages with the placeholder text in place of each image."""
    return [{**message, "content": _content(message.get("content"))} for message in messages]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": IMAGE_PLACEHOLDER} if _is_image(part) else part for part in content]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PART_TYPES
