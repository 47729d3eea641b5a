"""Logs for machines or for people, on stderr: one line for each request, and whatever else has to be said.

JSON has every field by its name; plain text has the same fields as `name=value` behind the time.
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
    """Everything that logs, logs to stderr in this form."""
    handler = OnStderr() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if form == "json" else PlainLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # What the server library says of its own doing is said by us already, or by nobody.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def write_access(fields: Mapping[str, Any]) -> None:
    """One request's line."""
    ACCESS.info("request", extra={"fields": dict(fields)})


def write_routine(fields: Mapping[str, Any]) -> None:
    """The line of a request that is no news: a poll, a page's file."""
    ACCESS.debug("request", extra={"fields": dict(fields)})


def end_typed_line() -> None:
    """A terminal shows a typed ^C where the cursor was: what is written next begins on a line of its own."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")


class OnStderr(logging.Handler):
    """Writes to whatever sys.stderr is at that moment: while a bar is drawn, the console that draws it."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line, in one piece."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # as every handler does: what cannot be logged must not end what logs
            self.handleError(record)


class JsonLines(logging.Formatter):
    """One JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told = {"time": _time(record), "level": record.levelname.lower(), "from": record.name}
        fields = getattr(record, "fields", {})
        if not fields:
            told["message"] = record.getMessage()
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told | fields).decode()


class PlainLines(logging.Formatter):
    """A line a person can read."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = getattr(record, "fields", None)
        said = " ".join(f"{name}={_plain(value)}" for name, value in fields.items()) if fields else record.getMessage()
        line = f"{_time(record)} {record.levelname.lower()} {said}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _plain(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)
