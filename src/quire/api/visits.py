"""One HTTP request from its first byte to its last: what the log, the metrics and the admin socket know of it."""

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from quire.engine.front import Asked
from quire.observe.metrics import Figures


@dataclass(slots=True)
class Visit:
    """Filled in on the way; whatever is known when it ends is written down."""

    request_id: str
    """Ours."""
    method: str
    path: str
    started_s: float = field(default_factory=monotonic)
    client_id: str = ""
    """The client's own name for it, if it is harmless."""
    tenant: str = ""
    model: str = ""
    priority: str = ""
    status: int = 0
    is_streamed: bool = False
    is_cut: bool = False
    """The client went away, or was cut off."""
    error: str = ""
    """The code of what went wrong."""
    num_answers: int = 0
    max_tokens: int | None = None
    asked: list[Asked] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all its prompts."""
        return sum(len(one.reply.request.prompt) for one in self.asked)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(one.reply.num_cached_tokens for one in self.asked)

    @property
    def num_output_tokens(self) -> int:
        """Of all its answers so far."""
        return sum(one.reply.num_tokens for one in self.asked)

    @property
    def is_waiting(self) -> bool:
        """It is on its way to an engine's queue, or in it."""
        return bool(self.model) and not (self.asked and all(one.reply.is_admitted for one in self.asked))

    @property
    def state(self) -> str:
        """Where it is."""
        if not self.asked:
            return "entering"
        return "running" if any(one.reply.is_admitted for one in self.asked) else "waiting"

    def line(self) -> dict[str, Any]:
        """The access line."""
        told: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": 499 if self.is_cut else self.status,
            "tenant": self.tenant,
            "total_s": round(monotonic() - self.started_s, 4),
        }
        if self.client_id:
            told["client_id"] = self.client_id
        if self.error:
            told["error"] = self.error
        if self.model:
            told |= {"model": self.model, "class": self.priority, "stream": self.is_streamed}
        return told | self._costs() if self.asked else told

    def _costs(self) -> dict[str, Any]:
        replies = [one.reply for one in self.asked]
        timings = [reply.timings for reply in replies]
        after_first_s = max(one.total_s - one.first_token_s for one in timings)
        num_later = max(0, self.num_output_tokens - self.num_answers)
        return {
            "queue_s": round(max(one.wait_s for one in timings), 4),
            "ttft_s": round(min(one.first_token_s for one in timings), 4),
            "tokens_per_s": round(num_later / after_first_s, 1) if after_first_s > 0 else 0.0,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "preemptions": sum(reply.num_preemptions for reply in replies),
            "replays": sum(reply.num_replays for reply in replies),
        }


def figures_of(visit: Visit) -> Figures:
    """What the metrics want of a request that was let in."""
    replies = [one.reply for one in visit.asked]
    timings = [reply.timings for reply in replies]
    has_tokens = visit.num_output_tokens > 0
    return Figures(
        model=visit.model,
        reason=_reason(visit),
        num_prompt_tokens=visit.num_prompt_tokens,
        num_cached_tokens=visit.num_cached_tokens,
        num_output_tokens=visit.num_output_tokens,
        num_longest_answer=max((reply.num_tokens for reply in replies), default=0),
        num_answers=visit.num_answers,
        max_tokens=visit.max_tokens,
        num_preemptions=sum(reply.num_preemptions for reply in replies),
        queue_s=max((one.wait_s for one in timings), default=0.0),
        first_token_s=min((one.first_token_s for one in timings), default=0.0) if has_tokens else None,
        total_s=monotonic() - visit.started_s,
    )


def _reason(visit: Visit) -> str:
    """As the field's metric labels it."""
    if not visit.asked or not all(one.reply.is_answered for one in visit.asked):
        return "abort"
    last = {piece.finish_reason for one in visit.asked for piece in one.reply.pieces if piece.finish_reason}
    if "error" in last:
        return "error"
    return "length" if last <= {"length", "deadline"} else "stop"
