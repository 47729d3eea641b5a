"""Warnings of what keeps prompts out of the cache: in headers, and in the response of a route."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from quire.client.prefix.prefix_guard import PrefixWarning
from quire.client.request.conversation import RemovedLine

WARNING_HEADER, REMOVED_HEADER = b"x-quire-prefix-warning", b"x-quire-stable-prefix"
MAX_LINE_CHARS = 80
"""Of a line in a header."""
MAX_LINES = 4
"""Lines in a header; it counts all."""


def warning_headers(found: Sequence[PrefixWarning]) -> list[tuple[bytes, bytes]]:
    """A response's header on lines by which this request missed the cache."""
    if not found:
        return []
    worst = max(found, key=lambda one: one.num_lost_tokens)
    more = f"; more={len(found) - 1}" if len(found) > 1 else ""
    summary = f"kind={worst.kind}; tokens={worst.num_lost_tokens}; requests={worst.num_requests}{more}"
    return [(WARNING_HEADER, f"{summary}; line={quoted(worst.line or '')}".encode("ascii"))]


def removed_headers(removed: Sequence[RemovedLine]) -> list[tuple[bytes, bytes]]:
    """A response's header on lines that were removed from the system text."""
    if not removed:
        return []
    lines = ", ".join(quoted(one.text.strip()) for one in removed[:MAX_LINES])
    return [(REMOVED_HEADER, f"removed={len(removed)}; lines={lines}".encode("ascii"))]


def quoted(text: str) -> str:
    """Plain characters in quotes, and not many: a header has no others."""
    shown = text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 3] + "..."
    plain = shown.replace("\\", "\\\\").replace('"', '\\"').encode("ascii", "backslashreplace").decode()
    return '"' + "".join(char if char.isprintable() else " " for char in plain) + '"'


def warnings_response(found: Iterable[PrefixWarning]) -> Response:
    """All of them, as the API sends them."""
    return Response(
        msgspec.json.encode({"object": "list", "data": [_body(one) for one in found]}), media_type="application/json"
    )


def _body(one: PrefixWarning) -> dict[str, Any]:
    return {
        "object": "cache.warning",
        "tenant": one.tenant,
        "model": one.model,
        "kind": one.kind,
        "line": one.line,
        "num_lost_tokens": one.num_lost_tokens,
        "num_requests": one.num_requests,
        "explanation": one.sentence,
    }
