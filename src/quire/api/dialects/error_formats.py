"""Which API spells an error by the path it was met at: a client understands one shape, wherever its request went wrong.

An unknown key, a foreign web page and a path that leads nowhere are found before a route, and hence a dialect, is. Here
stands who owns which paths; the OpenAI API has all the rest, the operator's socket and what is no HTTP among it.
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
        """How an error is spelled to whoever asked at this path."""
        owners = (one for owned, one in self.by_path.items() if path == owned or path.startswith(f"{owned}/"))
        return next(owners, self.default)


SERVER_ERRORS = ErrorFormats(OPENAI_ERRORS, {"/v1/messages": ANTHROPIC_ERRORS})
