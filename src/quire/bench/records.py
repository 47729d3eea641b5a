"""A run's results as a JSON record, as table rows, and as a file.

Settings and metrics have the names of `vllm bench serve`; quire adds `run_id`, `machine`, `load` and `url`.
"""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.bench.load_run import Pace
from quire.bench.measures import Objective, metrics_of
from quire.bench.outcome import Run
from quire.bench.setup import LoadSetup
from quire.config.machine import processor_name, total_memory_bytes
from quire.errors import ConfigError

Record = dict[str, Any]
MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """Metadata of a run; `extra_fields` are the operator's key=value pairs (`--metadata`)."""

    url: str
    model: str
    run_id: str
    label: str | None = None
    objective: Objective | None = None
    extra_fields: Mapping[str, str] | None = None


def record(metadata: RunMetadata, setup: LoadSetup, pace: Pace, run: Run) -> Record:
    """Return the record of a run: its settings, metrics and metadata."""
    endpoint = "openai-chat" if setup.prompt_format == "chat" else "openai"
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": endpoint,
        "backend": endpoint,
        "label": metadata.label,
        "model_id": metadata.model,
        "tokenizer_id": metadata.model,
        "num_prompts": len(run.outcomes),
        **(metadata.extra_fields or {}),
        "request_rate": "inf" if pace.arrivals_s is None else setup.rate,
        "burstiness": setup.burstiness,
        "max_concurrency": pace.concurrency,
        **_ramp(setup),
        **metrics_of(run, metadata.objective),
        "objective": None if metadata.objective is None else asdict(metadata.objective),
        "run_id": metadata.run_id,
        "url": metadata.url,
        "machine": machine(),
        "load": setup.as_record(),
    }


def machine() -> dict[str, Any]:
    """Return the description of the machine; only results with equal descriptions can be compared."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(total_memory_bytes() / 2**30, 1),
        "system": platform.system(),
    }


def per_request_data(run: Run) -> Record:
    """Return per-request data, with the names that `vllm bench serve` uses."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in run.outcomes],
        "output_lens": [outcome.output_tokens if outcome.is_ok else 0 for outcome in run.outcomes],
        "ttfts": [outcome.ttft_s if outcome.is_ok else 0.0 for outcome in run.outcomes],
        "itls": [outcome.itl_s for outcome in run.outcomes],
        "start_times": [outcome.sent_s - run.started_s for outcome in run.outcomes],
        "generated_texts": [outcome.text for outcome in run.outcomes],
        "errors": [f"{outcome.error}: {outcome.detail}" if outcome.error else "" for outcome in run.outcomes],
    }


def rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the table rows of the main metrics."""
    result = [
        ("requests", f"{metrics['completed']:,} done, {metrics['failed']:,} failed in {metrics['duration']:.1f} s"),
        ("requests/s", f"{metrics['request_throughput']:.2f}"),
        ("output tokens/s", f"{metrics['output_throughput']:,.1f}"),
        ("all tokens/s", f"{metrics['total_token_throughput']:,.1f}"),
        ("peak concurrent requests", f"{metrics['max_concurrent_requests']:,}"),
    ]
    if metrics["cached_token_share"] is not None:
        cached = f"{metrics['total_cached_tokens']:,} of {metrics['total_input_tokens']:,}"
        result.append(("prompt tokens cached", f"{cached} ({metrics['cached_token_share']:.1%})"))
    if metrics["request_goodput"] is not None:
        result.append(("goodput (requests/s)", f"{metrics['request_goodput']:.2f}"))
    result += [(f"failed: {kind}", f"{count:,}") for kind, count in metrics["error_kinds"].items()]
    return result


def latency_rows(metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one row per latency: mean, median, 90th and 99th percentile in milliseconds."""
    titles = {
        "ttft": "time to first token",
        "tpot": "time per output token",
        "itl": "inter-token latency",
        "e2el": "end-to-end latency",
    }
    columns = ("mean", "p50", "p90", "p99")
    return [(title, *(_ms(metrics[f"{column}_{name}_ms"]) for column in columns)) for name, title in titles.items()]


def kind_rows(metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one row for each kind of client in a mixed workload."""
    names = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    return [
        (kind, f"{part['completed']:,}", f"{part['output_throughput']:,.1f}", *(_ms(part[name]) for name in names))
        for kind, part in metrics["by_kind"].items()
    ]


def point_rows(points: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return one row for each point of a sweep."""
    return [
        (
            str(point["max_concurrency"]),
            f"{point['output_throughput']:,.1f}",
            _ms(point["median_ttft_ms"]),
            _ms(point["p99_ttft_ms"]),
            _ms(point["median_tpot_ms"]),
            _ms(point["p99_tpot_ms"]),
            f"{point['failed']:,}",
        )
        for point in points
    ]


def save(path: Path, content: Record) -> None:
    """Write a record to a file atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{path} cannot be written: {error.strerror}; pass another path to --save") from error


def read_record(path: Path) -> Record:
    """Read a record from a file. Raises ConfigError if the file cannot be read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"expected at most {MAX_FILE_BYTES} bytes, got more: {path}; pass another file")
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} cannot be read as a result: {error}; pass a file written by --save"
        raise ConfigError(message, code="cannot_read_result") from error
    if not isinstance(content, dict):
        raise ConfigError(f"expected a JSON object, got another value: {path}; pass a file written by --save")
    return content


def _ramp(setup: LoadSetup) -> Record:
    if setup.arrival_process != "ramp":
        return {}
    return {"ramp_up_strategy": "linear", "ramp_up_start_rps": setup.rate, "ramp_up_end_rps": setup.ramp_to}


def _ms(number: float | None) -> str:
    return "-" if number is None else f"{number:,.1f}"
