"""Logs on stderr, as JSON or plain text: one line per request, and other messages.

A JSON line is an object with all fields; a plain-text line has the same fields as `name=value` after time and level.
"""

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

LogFormat = Literal["json", "plain"]
ACCESS = logging.getLogger("quire.access")


def configure_logging(log_format: LogFormat, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all log messages to `stream` (None: stderr) in this format."""
    handler = StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if log_format == "json" else PlainLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # quire logs requests itself, so uvicorn's own messages below WARNING are dropped.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def write_access(fields: Mapping[str, Any]) -> None:
    """Log one request."""
    ACCESS.info("request", extra={"fields": dict(fields)})


def write_routine(fields: Mapping[str, Any]) -> None:
    """Log a routine request, such as a poll or a file of a web page, at debug level."""
    ACCESS.debug("request", extra={"fields": dict(fields)})


class StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line, in a single write."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # as in every logging handler: a failure must not break the caller
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
        text = " ".join(f"{name}={_quote(value)}" for name, value in fields.items()) if fields else record.getMessage()
        line = f"{_time(record)} {record.levelname.lower()} {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _quote(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)
