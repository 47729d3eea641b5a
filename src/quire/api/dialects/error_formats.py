"""The error format of each path: a client gets errors in its own API's format, wherever its request failed.

An unknown key, a foreign web page and an unknown path are found before a route, and hence a dialect, is. So formats are
chosen by path; the OpenAI format is for all the rest, the operator's socket and invalid HTTP included.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.api.dialects.anthropic.error_body import ANTHROPIC_ERRORS
from quire.api.dialects.openai.error_body import OPENAI_ERRORS
from quire.api.http.errors import ErrorFormat


@dataclass(frozen=True, slots=True)
class ErrorFormats:
    """The formats of one server."""

    default: ErrorFormat
    by_path: Mapping[str, ErrorFormat] = field(default_factory=dict)
    """Of APIs that own a path and all below it."""

    def at(self, path: str) -> ErrorFormat:
        """The error format for requests to this path."""
        owners = (one for owned, one in self.by_path.items() if path == owned or path.startswith(f"{owned}/"))
        return next(owners, self.default)


SERVER_ERRORS = ErrorFormats(OPENAI_ERRORS, {"/v1/messages": ANTHROPIC_ERRORS})
