"""One HTTP request from its first byte to its last: what the log, the metrics and the admin socket show of it."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import msgspec

from quire.api.http.headers import Headers
from quire.client.reply.stream import RequestHandle
from quire.errors import DisplacedError, QuireError
from quire.observe.metrics import ModelFigures

POLLED = re.compile(
    r"/(stats|requests|watch|blocks/\d+|health|ready|metrics)|/v1/admin/(watch|blocks/\d+)"
    r"|/|/dashboard/?|/[a-z/_]+\.(css|html|js|svg)"
)
"""What machines fetch all day, and the files of pages."""


class RequestRecord(msgspec.Struct, eq=False):
    """Filled in on the way, and logged when the request ends."""

    request_id: str
    """The server's own."""
    method: str
    path: str
    headers: Headers = msgspec.field(default_factory=dict)
    started_s: float = msgspec.field(default_factory=monotonic)
    client_id: str = ""
    """The client's own id, if it is harmless."""
    tenant: str = ""
    model: str = ""
    priority: str = ""
    status: int = 0
    is_streamed: bool = False
    is_cut: bool = False
    """The client disconnected, or was cut off."""
    error: str = ""
    """The code of what went wrong."""
    ignored: tuple[str, ...] = ()
    """Names in its body that no dialect reads."""
    num_answers: int = 0
    max_tokens: int | None = None
    handles: list[RequestHandle] = msgspec.field(default_factory=list)
    has_reservation: bool = False
    """Its tenant returns at the time of a Retry-After: it is admitted whatever waits."""
    is_counted: bool = False
    """Its first token is in the history."""
    ending: QuireError | None = None
    """Why it was ended before it was done."""
    _before_engine: asyncio.Timeout | None = None

    def end(self, error: QuireError) -> None:
        """End it wherever it is, with this error for the client. A second call does nothing."""
        if self.ending is not None:
            return
        self.ending = error
        for one in self.handles:
            one.stop(error)
        if self._before_engine is not None:
            self._before_engine.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def before_engine(self) -> AsyncIterator[None]:
        """What comes before the engine. When the request is ended, this is cancelled and raises the reason."""
        self._check_goes_on()
        try:
            async with asyncio.timeout(None) as self._before_engine:
                yield
        except TimeoutError:
            self._check_goes_on()
            raise
        finally:
            self._before_engine = None
        self._check_goes_on()

    def _check_goes_on(self) -> None:
        if self.ending is not None:
            raise self.ending

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.reply.request.prompt) for one in self.handles)

    @property
    def num_cached_tokens(self) -> int:
        return sum(one.reply.num_cached_tokens for one in self.handles)

    @property
    def num_output_tokens(self) -> int:
        return sum(one.reply.num_tokens for one in self.handles)

    @property
    def is_accepted(self) -> bool:
        """An engine took all its prompts."""
        return bool(self.handles) and all(one.reply.is_queued for one in self.handles)

    @property
    def has_started(self) -> bool:
        """All its prompts have left their engine's queue."""
        return bool(self.handles) and all(one.reply.is_admitted for one in self.handles)

    @property
    def is_waiting(self) -> bool:
        """It is on its way to an engine's queue, or in it."""
        return bool(self.model) and not self.has_started

    @property
    def is_displaced(self) -> bool:
        """Its place went to another tenant's request before it began."""
        return isinstance(self.ending, DisplacedError) or any(one.reply.refusal is not None for one in self.handles)

    @property
    def is_routine(self) -> bool:
        """A poll or a page's file that was served; one that was refused is worth a line."""
        is_answered = self.status < 400 or self.status == 503  # not ready, which is a valid response
        return self.method in ("GET", "HEAD") and is_answered and POLLED.fullmatch(self.path) is not None

    @property
    def state(self) -> str:
        if not self.handles:
            return "entering"
        return "running" if any(one.reply.is_admitted for one in self.handles) else "waiting"

    def line(self) -> dict[str, Any]:
        """The access line."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": 499 if self.is_cut else self.status,
            "tenant": self.tenant,
            "total_s": round(monotonic() - self.started_s, 4),
        }
        if self.client_id:
            fields["client_id"] = self.client_id
        if self.error:
            fields["error"] = self.error
        if self.model:
            fields |= {"model": self.model, "class": self.priority, "stream": self.is_streamed}
        return fields | self._costs() if self.handles else fields

    def _costs(self) -> dict[str, Any]:
        replies, now_s = [one.reply for one in self.handles], monotonic()
        timings = [reply.timings_at(now_s) for reply in replies]
        begun = [reply.timings_at(now_s) for reply in replies if reply.num_tokens]
        after_first_s = max((one.total_s - one.first_token_s for one in begun), default=0.0)
        num_later = max(0, self.num_output_tokens - self.num_answers)
        return {
            "queue_s": round(max(one.wait_s for one in timings), 4),
            "ttft_s": round(min(one.first_token_s for one in begun), 4) if begun else None,
            "tokens_per_s": round(num_later / after_first_s, 1) if after_first_s > 0 else 0.0,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "preemptions": sum(reply.num_preemptions for reply in replies),
            "replays": sum(reply.num_replays for reply in replies),
        }


def figures_of(record: RequestRecord) -> ModelFigures:
    """The metrics' figures of a request that was admitted."""
    replies, now_s = [one.reply for one in record.handles], monotonic()
    timings = [reply.timings_at(now_s) for reply in replies]
    firsts = [one.first_token_s for reply, one in zip(replies, timings, strict=True) if reply.num_tokens]
    return ModelFigures(
        model=record.model,
        reason=_reason(record),
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.num_output_tokens,
        num_longest_answer=max((reply.num_longest for reply in replies), default=0),
        num_answers=record.num_answers,
        max_tokens=record.max_tokens,
        num_preemptions=sum(reply.num_preemptions for reply in replies),
        queue_s=max((one.wait_s for one in timings), default=0.0),
        first_token_s=min(firsts, default=None),
        total_s=now_s - record.started_s,
    )


def _reason(record: RequestRecord) -> str:
    if not record.handles or not all(one.reply.is_answered for one in record.handles):
        return "abort"
    last = {piece.finish_reason for one in record.handles for piece in one.reply.pieces if piece.finish_reason}
    if "error" in last:
        return "error"
    return "length" if last <= {"length", "deadline"} else "stop"
