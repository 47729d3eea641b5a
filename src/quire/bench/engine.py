"""Measure the engine in this process: single requests, batches, prefill, prefix cache hits and misses, roofline.

The only module of the benchmark that imports the engine. Every round measures all batch sizes, because the machine's
speed drifts; the results are medians over rounds. Every round has new prompts, so only intended prefixes are cached.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from secrets import token_hex
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from quire.backends.cpu.measured_roof import CpuRoof, RoofPoint
from quire.bench.records import machine
from quire.checkpoints import Progress, resolve
from quire.client.engines.llm import LLM
from quire.client.engines.opening import OpenedModel, open_model
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.config import Settings
from quire.core.request import Request
from quire.engine.profiling import measure_steps
from quire.engine.step_fit import TimedStep, fit_profile
from quire.engine.step_profile import StepProfile
from quire.errors import ConfigError
from quire.workload.visits import Span
from quire.workload.writing import TOKEN_IDS, SpanWriter

QUESTION_TOKENS = 32
"""Length of the part of a prompt that follows a shared prefix."""
PROFILE_TOKENS = 4096
"""Longest sequence whose steps are timed for a profile; durations for longer sequences are extrapolated linearly."""
ROOF_STEPS = 5
"""Number of steps per round that are compared with the roofline."""

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The settings of a measurement."""

    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int
    num_rounds: int
    has_roof: bool


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """The results for one batch size."""

    batch: int
    output_tokens_per_s: float
    """Throughput over the whole run of a batch, including prefill."""
    speedup: float
    """Throughput, divided by the throughput per request of the smallest batch."""
    decode_tokens_per_s: float
    step_ms: float | None = None
    """Duration of a step in which all requests decode; the fields below are its roofline (`RoofPoint`)."""
    roof_ms: float | None = None
    bare_ms: float | None = None
    gb_per_s: float | None = None
    roof_tokens_per_s: float | None = None
    roof_share: float | None = None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """All results of a measurement."""

    model: str
    load: EngineLoad
    batches: tuple[BatchPoint, ...]
    prefill_tokens_per_s: float
    miss_ttft_ms: float | None
    hit_ttft_ms: float | None
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return the results as a record for a file."""
        return {**asdict(self), "prefix_ttft_ratio": self.prefix_ttft_ratio, "machine": machine()}

    @property
    def prefix_ttft_ratio(self) -> float | None:
        """Ratio of the TTFT without a cached prefix to the TTFT with it."""
        if self.miss_ttft_ms is None or self.hit_ttft_ms is None:
            return None
        return self.miss_ttft_ms / self.hit_ttft_ms

    def batch_rows(self) -> list[tuple[str, ...]]:
        """Return one table row per batch size."""
        return [
            (
                str(point.batch),
                f"{point.output_tokens_per_s:,.1f}",
                f"{point.speedup:.2f}",
                _number(point.step_ms, ".1f"),
                _number(point.roof_ms, ".1f"),
                _number(point.roof_share, ".0%"),
            )
            for point in self.batches
        ]

    def rows(self) -> list[tuple[str, str]]:
        """Return the table rows of the other results."""
        rows = [("prefill tokens/s", f"{self.prefill_tokens_per_s:,.0f}")]
        if self.prefix_ttft_ratio is not None:
            rows += [
                (f"TTFT, {self.load.prefix_tokens:,} shared tokens not cached", f"{self.miss_ttft_ms:,.1f} ms"),
                ("TTFT, cached", f"{self.hit_ttft_ms:,.1f} ms ({self.prefix_ttft_ratio:.1f} times sooner)"),
            ]
        return rows


class EngineBench:
    """Measures one model. Close it, or use it as a context manager."""

    def __init__(self, opened: OpenedModel, load: EngineLoad, roof: CpuRoof | None, name: str) -> None:
        max_tokens = opened.text.max_sequence_tokens
        for noun, num_tokens in (
            ("a prompt and its answer", load.prompt_tokens + load.output_tokens),
            ("a shared prefix and a question", load.prefix_tokens + QUESTION_TOKENS + 1),
        ):
            if num_tokens > max_tokens:
                limits = f"expected {noun} of at most {max_tokens} tokens, got {num_tokens}"
                raise ConfigError(f"{limits}; request fewer tokens, or raise --memory", code="sequence_too_long")
        max_running = opened.engine.scheduler.config.max_running
        if max(load.batches) > max_running:
            message = f"expected at most {max_running} sequences at once, got {max(load.batches)}; raise --max-running"
            raise ConfigError(message, code="too_many_sequences")
        self._opened, self._load, self._roof, self._name = opened, load, roof, name
        self._llm = LLM(opened)
        self._num_prompts = 0
        size = opened.text.vocabulary_size
        ids = TOKEN_IDS if size >= TOKEN_IDS.stop else range(1, size)
        self._writer = SpanWriter(token_hex(4), ids)

    @classmethod
    def open(cls, model: str, settings: Settings, load: EngineLoad, progress: Progress) -> "EngineBench":
        """Load the model and return its benchmark."""
        opened = open_model(model, settings.model, serving=settings.serving, progress=progress)
        roof = None
        if load.has_roof:
            checkpoint = resolve(model, progress=progress)
            roof = CpuRoof.of(checkpoint.config, settings.model, checkpoint.matrix_types)
        return cls(opened, load, roof, Path(model).name)

    def __enter__(self) -> "EngineBench":
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def run(self, announce: Announce) -> EngineResult:
        """Run all measurements, one after the other."""
        self._generate([self._prompt()])  # warm-up
        announce("batches, interleaved ...")
        rates, decodes = self._batches()
        prefill, miss, hit = self._prefix() if self._load.prefix_tokens else (self._prefill(), None, None)
        notes: tuple[str, ...] = self._opened.text.notes
        roofs: dict[int, RoofPoint] = {}
        if self._roof is not None and self._roof.reason:
            notes += (f"no roofline: {self._roof.reason}",)
        elif self._roof is not None:
            announce("the machine's roofline ...")
            roofs = {batch: self._measure_roof(batch) for batch in self._load.batches}
        single = rates[min(rates)] / min(rates)
        points = tuple(
            _point(batch, rates[batch], rates[batch] / single, decodes[batch], roofs.get(batch))
            for batch in self._load.batches
        )
        return EngineResult(self._name, self._load, points, prefill, miss, hit, notes)

    def profile(self, name: str) -> StepProfile:
        """Return a profile of step durations under varied loads, for the simulator."""
        self.steps(name, 1)  # warm-up: the first steps of a process are slow
        return fit_profile(name, self.steps(name, self._load.num_rounds))

    def steps(self, name: str, num_rounds: int) -> list[TimedStep]:
        """Time steps for a profile; the name seeds the random loads."""
        limit = min(self._opened.text.max_sequence_tokens, PROFILE_TOKENS)
        return measure_steps(self._opened.engine, self._request, num_rounds, longest_tokens=limit, random=Random(name))

    def _request(self, prompt_tokens: int, output_tokens: int) -> Request:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        return make_request(self._opened.text, self._writer.ids([self._span(prompt_tokens)]), params)

    def _batches(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return output tokens per second by batch size: of the whole run, and after the first tokens (decode)."""
        overall: dict[int, list[float]] = {batch: [] for batch in self._load.batches}
        decode: dict[int, list[float]] = {batch: [] for batch in self._load.batches}
        for _ in range(self._load.num_rounds):
            for batch in self._load.batches:
                prompts = [self._prompt() for _ in range(batch)]
                started_s = perf_counter()
                timings = self._generate(prompts)
                duration_s = perf_counter() - started_s
                overall[batch].append(batch * self._load.output_tokens / duration_s)
                decode_s = max(total_s - first_s for first_s, total_s in timings)
                decode[batch].append(batch * (self._load.output_tokens - 1) / decode_s)
        return {batch: median(overall[batch]) for batch in overall}, {batch: median(decode[batch]) for batch in decode}

    def _prefill(self) -> float:
        """Return prompt tokens per second of a single prompt."""
        ttfts_s = [self._generate([self._prompt()], max_tokens=1)[0][0] for _ in range(self._load.num_rounds)]
        return self._load.prompt_tokens / median(ttfts_s)

    def _prefix(self) -> tuple[float, float, float]:
        """Return prefill tokens per second, and the TTFT in ms without and with the prefix cached."""
        cold: list[float] = []
        warm: list[float] = []
        for _ in range(self._load.num_rounds):
            prefix = self._writer.ids([self._span(self._load.prefix_tokens)])
            for ttfts_s in (cold, warm):
                prompt = [*prefix, *self._writer.ids([self._span(QUESTION_TOKENS)])]
                ttfts_s.append(self._generate([prompt], max_tokens=1)[0][0])
        num_tokens = self._load.prefix_tokens + QUESTION_TOKENS
        return num_tokens / median(cold), median(cold) * 1e3, median(warm) * 1e3

    def _generate(self, prompts: list[list[int]], max_tokens: int | None = None) -> list[tuple[float, float]]:
        """Return the seconds to each prompt's first token and to its end."""
        count = max_tokens or self._load.output_tokens
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        completions = self._llm.generate(prompts, params, show_progress=False)
        unfinished = [answer for answer in completions if answer.num_output_tokens != count]
        if unfinished:
            raise ConfigError(
                f"expected {count} tokens in every answer, got {unfinished[0].num_output_tokens} "
                f"({unfinished[0].finish_reason}); raise --memory or request shorter answers"
            )
        return [(answer.timings.first_token_s, answer.timings.total_s) for answer in completions]

    def _measure_roof(self, batch: int) -> RoofPoint:
        """Time decode steps of a batch, interleaved with the bare matrix products and a memory read (see `CpuRoof`)."""
        engine, roof = self._opened.engine, self._roof
        if roof is None:
            raise ConfigError("no roofline was requested")
        num_steps = self._load.num_rounds * ROOF_STEPS
        # The first sequences decode while the last are in prefill; they must not end before all steps are measured.
        num_prefill = batch * (2 + self._load.prompt_tokens // max(1, engine.runner.capacity.max_step_tokens - batch))
        max_output = self._opened.text.max_sequence_tokens - self._load.prompt_tokens
        count = min(max_output, num_prefill + num_steps + 2)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        requests = [make_request(self._opened.text, self._prompt(), params) for _ in range(batch)]
        for request in requests:
            engine.submit(request)
        running = engine.scheduler.running
        while engine.has_work and (len(running) < batch or any(sequence.num_uncomputed > 1 for sequence in running)):
            engine.step(monotonic)
        if len(running) < batch:
            raise ConfigError(
                f"expected {batch} concurrent requests, got {len(running)}; raise --memory, or "
                "choose smaller batches or shorter prompts",
                code="batch_ended_early",
            )
        # All sequences decode now. The average context is estimated for the middle of the measured steps.
        capacity = engine.runner.capacity
        context = sum(len(sequence.tokens) for sequence in running) / batch + num_steps / 2
        kv_bytes = batch * context * capacity.num_kv_bytes / capacity.block_size
        point = roof.measure(lambda: engine.step(monotonic), batch, kv_bytes, num_steps)
        for request in requests:
            engine.cancel(request.request_id)
        while engine.has_work:
            engine.step(monotonic)
        return point

    def _prompt(self) -> list[int]:
        return self._writer.ids([self._span(self._load.prompt_tokens)])

    def _span(self, num_tokens: int) -> Span:
        """Return a span with new content."""
        self._num_prompts += 1
        return Span(f"prompt {self._num_prompts}", num_tokens)


def _point(batch: int, rate: float, speedup: float, decode: float, roof: RoofPoint | None) -> BatchPoint:
    if roof is None:
        return BatchPoint(batch, rate, speedup, decode)
    return BatchPoint(
        batch,
        rate,
        speedup,
        batch / roof.step_s,
        roof.step_s * 1e3,
        roof.roof_s * 1e3,
        roof.bare_s * 1e3,
        roof.bytes_per_s / 1e9,
        batch / roof.roof_s,
        roof.roof_s / roof.step_s,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
