"""Prometheus metrics under vLLM's names, for existing dashboards, gateways and autoscalers.

The API updates counters and histograms: output tokens as they arrive, the rest with one `RequestMetrics` per request.
Gauges, and the engine's counters where available, are read at each scrape from a `ModelSnapshot` of each model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.observe.served_totals import ServedTotals

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
LABELS = ("model_name", "engine")
ENGINE = "0"
MAX_TOKENS = 1 << 20

FIRST_TOKEN_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
                 2560)  # fmt: skip
GAP_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
PHASE_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
ANSWERS = (1, 2, 5, 10, 20)


def one_two_five(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `limit`."""
    steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)


TOKENS = one_two_five(MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Metrics of one finished request."""

    model: str
    reason: str
    """Why the request finished: `stop`, `length`, `abort` or `error`."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_longest_answer: int
    num_answers: int
    max_tokens: int | None
    num_preemptions: int
    queue_s: float
    first_token_s: float | None
    """Time to first token, since submission; None if no token was produced."""
    total_s: float


ENGINE_TOTALS: Mapping[str, tuple[str, str]] = {
    "num_computed_tokens": ("quire:computed_tokens", "Tokens computed; of the step in flight by layers done."),
    "num_draft_tokens": ("{prefix}:spec_decode_num_draft_tokens", "Draft tokens verified."),
    "num_accepted_tokens": ("{prefix}:spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "num_forced_tokens": ("quire:forced_tokens", "Tokens forced by a grammar."),
    "num_pins_yielded": ("quire:pins_yielded", "Kept prefixes that lost blocks before their time."),
    "grammar_compile_s": ("quire:grammar_compile_seconds", "Processor time spent compiling grammars."),
    "grammar_mask_s": ("quire:grammar_mask_seconds", "Processor time spent computing grammar masks."),
}
"""An engine's counters since its worker started: metric name and help."""
Meter = Callable[[float], None]
TokenMeters = tuple[Meter, Meter]
"""Two callbacks: one gets the seconds between two tokens, the other the number of new tokens. Both are called during
the response, so that rates are current."""


def _noop(_value: float) -> None: ...


UNMETERED: TokenMeters = (_noop, _noop)


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """The state of a model at the time of a scrape. None: not available in this process."""

    model: str
    num_running: int
    num_waiting: int
    kv_usage: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    num_restarts: int | None = None
    step_sizes: Sequence[tuple[str, int]] = ()
    """Cumulative histogram of steps by tokens computed; the last bound is `+Inf`."""
    num_step_tokens: int = 0
    """Sum of the tokens of all steps in `step_sizes`."""
    totals: Sequence[tuple[str, float]] = ()
    """Values of `ENGINE_TOTALS` since the worker started."""


class Metrics:
    """Metrics with their own registry, so that no other metrics of the process are exported."""

    def __init__(self, prefix: str = "vllm") -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._prefix = prefix
        self._snapshots = _SnapshotCollector(prefix)
        self.registry.register(self._snapshots)
        self._make_counters()
        self._make_histograms()
        self.num_prompt_tokens = self.num_cached_tokens = 0
        """Totals over all finished requests."""
        self.served = ServedTotals()

    def set_sources(
        self, snapshots: Callable[[], Iterable[ModelSnapshot]], work_cut: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """Set the functions that return the snapshots, and how often work was stopped at its budget, by kind."""
        self._snapshots.source, self._snapshots.work_cut = snapshots, work_cut

    def token_meters(self, model: str) -> TokenMeters:
        """Return the token meters of one model."""
        return self._gap.labels(model, ENGINE).observe, self._generated.labels(model, ENGINE).inc

    def page(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def observe(self, metrics: RequestMetrics) -> None:
        """Record a finished request."""
        labels = (metrics.model, ENGINE)
        num_computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self.num_cached_tokens += metrics.num_cached_tokens
        self._add_served(metrics)
        self._success.labels(*labels, metrics.reason).inc()
        self._prompt.labels(*labels).inc(metrics.num_prompt_tokens)
        self._by_source.labels(*labels, "local_compute").inc(num_computed)
        self._by_source.labels(*labels, "local_cache_hit").inc(metrics.num_cached_tokens)
        self._cached.labels(*labels).inc(metrics.num_cached_tokens)
        self._queries.labels(*labels).inc(metrics.num_prompt_tokens)
        self._hits.labels(*labels).inc(metrics.num_cached_tokens)
        self._preemptions.labels(*labels).inc(metrics.num_preemptions)
        self._prompt_size.labels(*labels).observe(metrics.num_prompt_tokens)
        self._computed_size.labels(*labels).observe(num_computed)
        self._answer_size.labels(*labels).observe(metrics.num_output_tokens)
        self._longest.labels(*labels).observe(metrics.num_longest_answer)
        self._n.labels(*labels).observe(metrics.num_answers)
        if metrics.max_tokens is not None:
            self._max_tokens.labels(*labels).observe(metrics.max_tokens)
        self._observe_times(metrics, labels)

    def _add_served(self, metrics: RequestMetrics) -> None:
        first_s = metrics.total_s if metrics.first_token_s is None else metrics.first_token_s
        self.served.num_requests += 1
        self.served.num_aborted += metrics.reason == "abort"
        self.served.num_output_tokens += metrics.num_output_tokens
        self.served.prompt_s += max(0.0, first_s - metrics.queue_s)
        self.served.output_s += max(0.0, metrics.total_s - first_s)

    def observe_reuse(self, model: str, reason: str, num_lost_tokens: int) -> None:
        """Record the reason for a prompt's first cache miss, and the tokens that were computed because of it."""
        self._misses.labels(model, ENGINE, reason).inc()
        self._lost.labels(model, ENGINE, reason).inc(num_lost_tokens)

    def count_guarded(self, model: str, num_lost_tokens: int) -> None:
        """Record prompt tokens computed again because of changing lines, after the client was warned about them."""
        self._guarded.labels(model, ENGINE).inc(num_lost_tokens)

    def _observe_times(self, metrics: RequestMetrics, labels: tuple[str, str]) -> None:
        self._total_s.labels(*labels).observe(metrics.total_s)
        self._queue_s.labels(*labels).observe(metrics.queue_s)
        if metrics.first_token_s is None:
            return
        decode_s = max(0.0, metrics.total_s - metrics.first_token_s)
        self._first_s.labels(*labels).observe(metrics.first_token_s)
        self._prefill_s.labels(*labels).observe(max(0.0, metrics.first_token_s - metrics.queue_s))
        self._decode_s.labels(*labels).observe(decode_s)
        self._inference_s.labels(*labels).observe(max(0.0, metrics.total_s - metrics.queue_s))
        if metrics.num_longest_answer > 1:
            self._per_token_s.labels(*labels).observe(decode_s / (metrics.num_longest_answer - 1))

    def _make_counters(self) -> None:
        self._success = self._counter("request_success", "Finished requests, by reason.", "finished_reason")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.")
        self._by_source = self._counter("prompt_tokens_by_source", "Prompt tokens, by source.", "source")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens that were not computed.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        self._misses = self._own_counter(
            "prefix_misses", "Prompts that ran, by the reason for their first cache miss.", "reason"
        )
        self._lost = self._own_counter(
            "prefix_tokens_lost", "Computed prompt tokens that the cache could have held, by reason.", "reason"
        )
        self._guarded = self._own_counter(
            "prefix_guard_tokens_lost", "Prompt tokens computed because of lines that change with every request."
        )
        self._preemptions = self._counter("num_preemptions", "Preemptions of running sequences.")

    def _make_histograms(self) -> None:
        make = self._histogram
        self._first_s = make("time_to_first_token_seconds", "From submission to the first token.", FIRST_TOKEN_S)
        self._gap = make("inter_token_latency_seconds", "From one token to the next.", GAP_S)
        self._per_token_s = make("request_time_per_output_token_seconds", "Mean time for a token after the first.",
                                 GAP_S)  # fmt: skip
        self._total_s = make("e2e_request_latency_seconds", "From the first byte to the last.", PHASE_S)
        self._queue_s = make("request_queue_time_seconds", "Time in the queue.", PHASE_S)
        self._inference_s = make("request_inference_time_seconds", "Running.", PHASE_S)
        self._prefill_s = make("request_prefill_time_seconds", "Time from the queue to the first token.", PHASE_S)
        self._decode_s = make("request_decode_time_seconds", "Time from the first token to the last.", PHASE_S)
        self._prompt_size = make("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._computed_size = make("request_prefill_kv_computed_tokens", "Computed prompt tokens of a request.", TOKENS)
        self._answer_size = make("request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self._longest = make("request_max_num_generation_tokens", "Generated tokens of the longest choice.", TOKENS)
        self._max_tokens = make("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self._n = make("request_params_n", "Number of choices of a request.", ANSWERS)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", help_text, (*LABELS, *labels), registry=self.registry)

    def _own_counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """Make a counter without an equivalent in vLLM."""
        return Counter(f"quire:{name}", help_text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{self._prefix}:{name}", help_text, LABELS, buckets=buckets, registry=self.registry)


class _SnapshotCollector(Collector):
    """Yields gauges and engine counters, built from snapshots at each scrape."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.source: Callable[[], Iterable[ModelSnapshot]] = tuple
        self.work_cut: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, without values that a model does not have."""
        snapshots = list(self.source())
        running = self._gauge("num_requests_running", "Running requests.")
        waiting = self._gauge("num_requests_waiting", "Waiting requests.")
        reasons = self._gauge("num_requests_waiting_by_reason", "Waiting requests, by reason.", "reason")
        usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        config = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "Sizes of the KV cache.",
                                   labels=("block_size", "num_gpu_blocks", *LABELS))  # fmt: skip
        restarts = CounterMetricFamily("quire:worker_restarts", "Times the worker was replaced.", labels=LABELS)
        steps = HistogramMetricFamily(f"{self._prefix}:iteration_tokens_total", "Tokens computed per step.",
                                      labels=LABELS)  # fmt: skip
        for snapshot in snapshots:
            labels = (snapshot.model, ENGINE)
            running.add_metric(labels, snapshot.num_running)
            waiting.add_metric(labels, snapshot.num_waiting)
            reasons.add_metric((*labels, "capacity"), snapshot.num_waiting)
            reasons.add_metric((*labels, "deferred"), 0)
            if snapshot.kv_usage is not None:
                usage.add_metric(labels, snapshot.kv_usage)
            if snapshot.num_blocks is not None:
                config.add_metric((str(snapshot.block_size), str(snapshot.num_blocks), *labels), 1)
            if snapshot.num_restarts is not None:
                restarts.add_metric(labels, snapshot.num_restarts)
            if snapshot.step_sizes:
                steps.add_metric(labels, snapshot.step_sizes, snapshot.num_step_tokens)
        yield from (running, waiting, reasons, usage, config, restarts, steps, *self._totals(snapshots))

    def _totals(self, snapshots: Sequence[ModelSnapshot]) -> list[CounterMetricFamily]:
        families = {
            name: CounterMetricFamily(metric.format(prefix=self._prefix), help_text, labels=LABELS)
            for name, (metric, help_text) in ENGINE_TOTALS.items()
        }
        for snapshot in snapshots:
            for name, total in snapshot.totals:
                families[name].add_metric((snapshot.model, ENGINE), total)
        work_cuts = CounterMetricFamily("quire:work_cut", "Work stopped at its budget, by kind.", labels=("kind",))
        for kind, count in self.work_cut().items():
            work_cuts.add_metric((kind,), count)
        return [*families.values(), work_cuts]

    def _gauge(self, name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}:{name}", help_text, labels=(*LABELS, *labels))
