"""Validated settings of a load test (`quire bench serve`). Its flags are generated from them, and every result contains
them, so that a measurement can be repeated. A visit is the conversation of one client, turn by turn.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any, get_args

from quire.bench.calls import PROMPT_FORMATS, PromptFormat
from quire.bench.load_run import Pace
from quire.errors import ConfigError
from quire.workload import arrivals
from quire.workload.mixes import MIXES, MixSizes, sample_visits
from quire.workload.traces import TraceError, read_trace
from quire.workload.visits import Visit

ARRIVALS = ("closed", "poisson", "bursts", "ramp", "trace")
CONCURRENCY = 8
REQUESTS = 64


def _flag(default: Any, help_text: str, *names: str) -> Any:
    return field(default=default, metadata={"help": help_text, "names": names})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSetup:
    """The requests to send, and when to send them."""

    workload: str = _flag("distinct", f"Requests to send: {', '.join(MIXES)}.")
    trace: str | None = _flag(
        None, "Replay this trace instead: JSONL of Mooncake, ShareGPT or quire, or Azure CSV; also .gz."
    )
    prompts: str = _flag("text", f"Format of prompts: {', '.join(PROMPT_FORMATS)}; only tokens gives exact lengths.")
    requests: int | None = _flag(
        None, f"Number of requests; default {REQUESTS}, or the whole trace.", "--requests", "--num-prompts"
    )
    prompt_tokens: int | None = _flag(None, "Tokens that each turn adds; default: the workload's own.")
    output_tokens: int | None = _flag(None, "Tokens of an answer.")
    shared_tokens: int | None = _flag(None, "Tokens of the prompt prefix that a group of requests shares.")
    groups: int | None = _flag(None, "Number of groups, each with its own shared prefix.")
    turns: int | None = _flag(None, "Turns of a conversation.")
    concurrency: int | None = _flag(
        None,
        f"Closed loop: number of clients, default {CONCURRENCY}. Open loop: maximum open requests, default no limit.",
        "--concurrency",
        "--max-concurrency",
    )
    arrivals: str | None = _flag(
        None,
        f"When conversations start: {', '.join(ARRIVALS)}. Default: trace with --trace, poisson with --rate or closed.",
    )
    rate: float | None = _flag(None, "Conversations per second of an open loop.", "--rate", "--request-rate")
    burstiness: float = _flag(1.0, "Poisson: gamma shape of the arrival gaps; below 1 is burstier.")
    burst_size: float = _flag(8.0, "Bursts: average number of conversations in one.")
    ramp_to: float | None = _flag(None, "Ramp: final rate.")
    ramp_seconds: float = _flag(60.0, "Ramp: duration in seconds.")
    speedup: float = _flag(1.0, "Trace: replay speed as a multiple of the recorded one.")
    context: int | None = _flag(None, "Trace: maximum length after scaling; default: what the server reports.")
    seed: str = _flag("", "The same seed gives the same prompts; default: a new one, which is reported.")

    def __post_init__(self) -> None:
        self._check_choice("prompts", self.prompts, get_args(PromptFormat))
        if self.trace is None:
            self._check_choice("workload", self.workload, tuple(MIXES))
        self._check_choice("arrivals", self.arrival_process, ARRIVALS)
        for name in ("requests", "prompt_tokens", "output_tokens", "groups", "turns", "concurrency", "context"):
            self._check_min(name, 1)
        self._check_min("shared_tokens", 0)
        for name in ("rate", "burstiness", "burst_size", "ramp_to", "ramp_seconds", "speedup"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ConfigError(f"expected {_flag_name(name)} above 0, got {value:g}", (name,), code="too_low")
        self._check_arrivals()
        self._check_trace()

    @property
    def arrival_process(self) -> str:
        """The arrival process, with its default filled in."""
        if self.arrivals is not None:
            return self.arrivals
        return "trace" if self.trace is not None else "poisson" if self.rate is not None else "closed"

    @property
    def prompt_format(self) -> PromptFormat:
        return next(prompt_format for prompt_format in PROMPT_FORMATS if prompt_format == self.prompts)

    def visits(self, seed: str, max_model_tokens: int | None = None) -> list[Visit]:
        """Return the visits. `max_model_tokens` is the longest sequence that the server reports."""
        if self.trace is None:
            mix = MIXES[self.workload]
            return sample_visits(mix, self._sizes(mix.sizes), seed, self.requests or REQUESTS)
        try:
            trace = read_trace(Path(self.trace))
        except TraceError as error:
            raise ConfigError(str(error), code="invalid_trace_file") from error
        max_tokens = self.context or max_model_tokens
        if self.requests is not None:
            trace = trace.head(self.requests)
        return list((trace.fitted(max_tokens) if max_tokens else trace).visits(self.speedup))

    def pace(self, visits: Sequence[Visit], seed: str) -> Pace:
        """Return when visits start: their start times, the maximum number of open requests, or both."""
        random, rate = Random(f"arrivals {seed}"), self.rate or 1.0
        match self.arrival_process:
            case "closed":
                return Pace(concurrency=self.concurrency or CONCURRENCY)
            case "trace":
                return Pace(self.concurrency, tuple(visit.arrival_s or 0.0 for visit in visits))
            case "poisson":
                times = arrivals.gamma(random, rate, self.burstiness)
            case "bursts":
                times = arrivals.bursts(random, rate, self.burst_size)
            case _:
                times = arrivals.ramp(random, rate, self.ramp_to or rate, self.ramp_seconds)
        return Pace(self.concurrency, tuple(islice(times, len(visits))))

    def with_concurrency(self, concurrency: int) -> "LoadSetup":
        """Return the same load with another number of clients, and as many requests per client."""
        per_client = max(1, round((self.requests or REQUESTS) / (self.concurrency or CONCURRENCY)))
        return replace(self, concurrency=concurrency, requests=max(concurrency * per_client, concurrency))

    def as_record(self) -> dict[str, Any]:
        """Return the settings for a result: those that are set or have a default, and the arrival process."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        if self.trace is not None:
            del fields["workload"]
        return fields | {"arrivals": self.arrival_process}

    def _sizes(self, defaults: MixSizes) -> MixSizes:
        sizes = {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "shared_tokens": self.shared_tokens,
            "num_groups": self.groups,
            "num_turns": self.turns,
        }
        return replace(defaults, **{name: value for name, value in sizes.items() if value is not None})

    def _check_choice(self, name: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            message = f"expected {_flag_name(name)} to be one of {', '.join(choices)}, got {value!r}"
            raise ConfigError(message, (name,), code="unknown_choice")

    def _check_min(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            raise ConfigError(f"expected {_flag_name(name)} of at least {low}, got {value}", (name,), code="too_low")

    def _check_arrivals(self) -> None:
        for processes, name, noun, example in (
            (("trace",), "trace", "a trace", "FILE"),
            (("poisson", "bursts", "ramp"), "rate", "a rate", "PER_SECOND"),
            (("ramp",), "ramp_to", "a final rate", "PER_SECOND"),
        ):
            if self.arrival_process in processes and getattr(self, name) is None:
                message = f"--arrivals {self.arrival_process} needs {noun}; pass it with {_flag_name(name)} {example}"
                raise ConfigError(message, (name,), code="flag_is_missing")

    def _check_trace(self) -> None:
        """Raise ConfigError if --trace is combined with a flag of sizes, because a trace has its own."""
        sizes = ("prompt_tokens", "output_tokens", "shared_tokens", "groups", "turns")
        unused = [name for name in sizes if getattr(self, name) is not None]
        if self.trace is not None and unused:
            message = f"{_flag_name(unused[0])} applies to workloads only, but a trace has its own lengths; omit it"
            raise ConfigError(message, (unused[0],), code="flag_without_effect")


def _flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"
