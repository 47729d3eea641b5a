"""Warnings about lines that cause prefix cache misses: as response headers, and as the response of a route."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from starlette.responses import Response

from quire.api.http.sse import json_response
from quire.client.prefix.prefix_guard import PrefixWarning
from quire.client.request.conversation import RemovedLine

WARNING_HEADER, REMOVED_HEADER = b"x-quire-prefix-warning", b"x-quire-stable-prefix"
MAX_LINE_CHARS = 80
"""Maximum length of a line in a header."""
MAX_LINES = 4
"""Maximum number of lines in a header; the count in the header includes all."""


def warning_headers(warnings: Sequence[PrefixWarning]) -> list[tuple[bytes, bytes]]:
    """Return the response header about lines that made this request miss the cache."""
    if not warnings:
        return []
    worst = max(warnings, key=lambda warning: warning.num_lost_tokens)
    more = f"; more={len(warnings) - 1}" if len(warnings) > 1 else ""
    summary = f"kind={worst.kind}; tokens={worst.num_lost_tokens}; requests={worst.num_requests}{more}"
    return [(WARNING_HEADER, f"{summary}; line={_quote(worst.line or '')}".encode("ascii"))]


def removed_headers(lines: Sequence[RemovedLine]) -> list[tuple[bytes, bytes]]:
    """Return the response header about lines that were removed from the system text."""
    if not lines:
        return []
    texts = ", ".join(_quote(line.text.strip()) for line in lines[:MAX_LINES])
    return [(REMOVED_HEADER, f"removed={len(lines)}; lines={texts}".encode("ascii"))]


def _quote(text: str) -> str:
    """Return the text as a short quoted ASCII string: headers allow no other characters."""
    short = text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 3] + "..."
    plain = short.replace("\\", "\\\\").replace('"', '\\"').encode("ascii", "backslashreplace").decode()
    return '"' + "".join(char if char.isprintable() else " " for char in plain) + '"'


def warnings_response(warnings: Iterable[PrefixWarning]) -> Response:
    """Return the response with all warnings."""
    bodies = [{"object": "cache.warning", **asdict(warning), "explanation": warning.sentence} for warning in warnings]
    return json_response({"object": "list", "data": bodies})
