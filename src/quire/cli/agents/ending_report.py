"""The lines after the agent: how it ended, whether its requests were answered, and what the server did."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic, sleep

from quire.cli.shared.found_servers import FoundServer

INTERRUPTED_CODES = frozenset({-signal.SIGINT, 128 + signal.SIGINT})
SETTLE_S = 2.0
"""Longest wait for the server to notice that the agent has disconnected."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How the agent's process ended."""

    name: str
    code: int
    """The exit code; negative: the number of the signal that ended it."""
    is_interrupted: bool = False
    """Whether Ctrl-C was pressed."""

    @property
    def is_orderly(self) -> bool:
        """Whether the agent ended by itself and without an error."""
        return self.code == 0 and not self.is_interrupted

    @property
    def text(self) -> str:
        if self.is_interrupted or self.code in INTERRUPTED_CODES:
            return f"{self.name} was interrupted"
        return f"{self.name} ended" if self.code == 0 else f"{self.name} ended with code {self.code}"


@dataclass(frozen=True, slots=True)
class ServedWork:
    """What a server did between two reads of its state, about one model."""

    num_requests: int
    num_unanswered: int
    """Requests that ended early, or have not ended."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were computed, also of requests that ended early."""
    num_output_tokens: int
    prompt_s: float
    output_s: float

    @classmethod
    def between(cls, before: FoundServer, after: FoundServer, model: str) -> "ServedWork":
        """Subtract two states of a server."""
        old, new = before.served, after.served
        num_open = max(0, after.num_open_requests - before.num_open_requests)
        num_output = new.num_output_tokens - old.num_output_tokens
        computed = [entry.num_computed_tokens if (entry := state.find_model(model)) else 0 for state in (before, after)]
        return cls(
            new.num_requests - old.num_requests + num_open,
            new.num_aborted - old.num_aborted + num_open,
            after.num_prompt_tokens - before.num_prompt_tokens,
            after.num_cached_tokens - before.num_cached_tokens,
            max(0, computed[1] - computed[0] - num_output),
            num_output,
            new.prompt_s - old.prompt_s,
            new.output_s - old.output_s,
        )

    @property
    def prompt_tokens_per_s(self) -> float:
        """Speed of computing prompts; 0: unknown."""
        return self.num_computed_tokens / self.prompt_s if self.prompt_s > 0 else 0.0


def settled_state(
    read: Callable[[], FoundServer | None], num_open_before: int, clock: Callable[[], float] = monotonic
) -> FoundServer | None:
    """Read the server's state once it has noticed that the agent's connections are closed, or after two seconds."""
    deadline_s = clock() + SETTLE_S
    while (state := read()) is not None and state.num_open_requests > num_open_before and clock() < deadline_s:
        sleep(POLL_S)
    return state


def report_lines(end: AgentEnd, work: ServedWork | None) -> Iterator[str]:
    """Yield the lines of the report. The first says whether the task ended: an agent with an unanswered request
    that was interrupted, or ended with an error, was in the middle of it."""
    if work is None or not work.num_requests:
        yield end.text
        return
    line = f"{end.text}; answered {work.num_requests - work.num_unanswered:,} of {work.num_requests:,} requests"
    yield line if end.is_orderly or not work.num_unanswered else f"{line}: its task did not finish"
    if work.num_prompt_tokens:
        share = work.num_cached_tokens / work.num_prompt_tokens
        yield (
            f"{work.num_cached_tokens:,} of {work.num_prompt_tokens:,} prompt tokens were cached ({share:.0%}); "
            f"computed {work.num_computed_tokens:,}{_speed(work.num_computed_tokens, work.prompt_s)}; "
            f"output {work.num_output_tokens:,}{_speed(work.num_output_tokens, work.output_s)}"
        )


def _speed(num_tokens: int, elapsed_s: float) -> str:
    return f" at {num_tokens / elapsed_s:,.1f} tokens/s" if num_tokens and elapsed_s > 0 else ""
