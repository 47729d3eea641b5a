"""The error format of each path: a client gets errors in its own API's format, wherever its request failed.

A request with an unknown key, a foreign Origin or an unknown path fails before its route, and therefore its dialect, is
known. So the path determines the format. Other paths, the admin socket and invalid HTTP use the OpenAI format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.api.dialects.anthropic.error_body import ANTHROPIC_ERRORS
from quire.api.dialects.openai.error_body import OPENAI_ERRORS
from quire.api.http.errors import ErrorFormat


@dataclass(frozen=True, slots=True)
class ErrorFormats:
    """The error formats of one server."""

    default: ErrorFormat
    by_path: Mapping[str, ErrorFormat] = field(default_factory=dict)
    """By path: the error format for this path and all paths below it."""

    def of_path(self, path: str) -> ErrorFormat:
        """Return the error format for requests to this path."""
        matches = (value for owned, value in self.by_path.items() if path == owned or path.startswith(f"{owned}/"))
        return next(matches, self.default)


SERVER_ERRORS = ErrorFormats(OPENAI_ERRORS, {"/v1/messages": ANTHROPIC_ERRORS})
