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
"""Maximum number of lines in a header; its count includes all."""


def warning_headers(found: Sequence[PrefixWarning]) -> list[tuple[bytes, bytes]]:
    """Return the response header about lines that made this request miss the cache."""
    if not found:
        return []
    worst = max(found, key=lambda one: one.num_lost_tokens)
    more = f"; more={len(found) - 1}" if len(found) > 1 else ""
    summary = f"kind={worst.kind}; tokens={worst.num_lost_tokens}; requests={worst.num_requests}{more}"
    return [(WARNING_HEADER, f"{summary}; line={quoted(worst.line or '')}".encode("ascii"))]


def removed_headers(removed: Sequence[RemovedLine]) -> list[tuple[bytes, bytes]]:
    """Return the response header about lines that were removed from the system text."""
    if not removed:
        return []
    lines = ", ".join(quoted(one.text.strip()) for one in removed[:MAX_LINES])
    return [(REMOVED_HEADER, f"removed={len(removed)}; lines={lines}".encode("ascii"))]


def quoted(text: str) -> str:
    """Return the text as a short quoted ASCII string, because headers allow no other characters."""
    shown = text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 3] + "..."
    plain = shown.replace("\\", "\\\\").replace('"', '\\"').encode("ascii", "backslashreplace").decode()
    return '"' + "".join(char if char.isprintable() else " " for char in plain) + '"'


def warnings_response(found: Iterable[PrefixWarning]) -> Response:
    """Return the response with all warnings."""
    bodies = [{"object": "cache.warning", **asdict(one), "explanation": one.sentence} for one in found]
    return json_response({"object": "list", "data": bodies})
