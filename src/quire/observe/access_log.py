"""Logs on stderr, as JSON or plain text: one line per request, and other messages.

A JSON line is one object with all fields; a plain-text line has the same fields as `name=value` after the time.
"""

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

LogFormat = Literal["json", "plain"]
ACCESS = logging.getLogger("quire.access")


def set_up(form: LogFormat, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all logging to stderr in this format."""
    handler = OnStderr() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if form == "json" else PlainLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # quire logs requests itself, so uvicorn's own messages below WARNING are dropped.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def write_access(fields: Mapping[str, Any]) -> None:
    """Log one request."""
    ACCESS.info("request", extra={"fields": dict(fields)})


def write_routine(fields: Mapping[str, Any]) -> None:
    """Log a routine request, such as a poll or a page's file, at debug level."""
    ACCESS.debug("request", extra={"fields": dict(fields)})


class OnStderr(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line, in a single write."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # as every handler does: a logging failure must not break the caller
            self.handleError(record)


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _time(record), "level": record.levelname.lower(), "from": record.name}
        fields = getattr(record, "fields", {})
        if not fields:
            entry["message"] = record.getMessage()
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry | fields).decode()


class PlainLines(logging.Formatter):
    """Formats a record as a plain-text line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        text = " ".join(f"{name}={_plain(value)}" for name, value in fields.items()) if fields else record.getMessage()
        line = f"{_time(record)} {record.levelname.lower()} {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _plain(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)
