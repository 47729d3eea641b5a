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
from quire.bench.measures import Objective, measured
from quire.bench.outcome import Run
from quire.bench.setup import LoadSetup
from quire.config.machine import processor_name, total_memory_bytes
from quire.errors import ConfigError

Record = dict[str, Any]
MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of a run."""

    url: str
    model: str
    run_id: str
    label: str | None = None
    objective: Objective | None = None
    metadata: Mapping[str, str] | None = None


def record(about: About, setup: LoadSetup, pace: Pace, run: Run) -> Record:
    """Return the record of a run: its settings, metrics and metadata."""
    endpoint = "openai-chat" if setup.form == "chat" else "openai"
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": endpoint,
        "backend": endpoint,
        "label": about.label,
        "model_id": about.model,
        "tokenizer_id": about.model,
        "num_prompts": len(run.outcomes),
        **(about.metadata or {}),
        "request_rate": "inf" if pace.moments_s is None else setup.rate,
        "burstiness": setup.burstiness,
        "max_concurrency": pace.concurrency,
        **_ramp(setup),
        **measured(run, about.objective),
        "objective": None if about.objective is None else asdict(about.objective),
        "run_id": about.run_id,
        "url": about.url,
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


def detailed(run: Run) -> Record:
    """Return per-request data, with the names that `vllm bench serve` uses."""
    return {
        "input_lens": [one.prompt_tokens for one in run.outcomes],
        "output_lens": [one.output_tokens if one.is_ok else 0 for one in run.outcomes],
        "ttfts": [one.ttft_s if one.is_ok else 0.0 for one in run.outcomes],
        "itls": [one.itl_s for one in run.outcomes],
        "start_times": [one.sent_s - run.started_s for one in run.outcomes],
        "generated_texts": [one.text for one in run.outcomes],
        "errors": [f"{one.error}: {one.detail}" if one.error else "" for one in run.outcomes],
    }


def rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the table rows of the main metrics."""
    result = [
        ("requests", f"{figures['completed']:,} done, {figures['failed']:,} failed in {figures['duration']:.1f} s"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:,.1f}"),
        ("all tokens/s", f"{figures['total_token_throughput']:,.1f}"),
        ("most concurrent", f"{figures['max_concurrent_requests']:,}"),
    ]
    if figures["cached_token_share"] is not None:
        cached = f"{figures['total_cached_tokens']:,} of {figures['total_input_tokens']:,}"
        result.append(("prompt tokens cached", f"{cached} ({figures['cached_token_share']:.1%})"))
    if figures["request_goodput"] is not None:
        result.append(("good requests/s", f"{figures['request_goodput']:.2f}"))
    result += [(f"failed: {kind}", f"{count:,}") for kind, count in figures["error_kinds"].items()]
    return result


def latency_rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one row per latency: mean, median, 90th and 99th percentile in milliseconds."""
    names = {
        "ttft": "until the first token",
        "tpot": "per token after it",
        "itl": "between two events",
        "e2el": "until the end",
    }
    kinds = ("mean", "p50", "p90", "p99")
    return [(title, *(_ms(figures[f"{kind}_{name}_ms"]) for kind in kinds)) for name, title in names.items()]


def kind_rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one row for each kind of client in a mixed workload."""
    names = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    return [
        (kind, f"{one['completed']:,}", f"{one['output_throughput']:,.1f}", *(_ms(one[name]) for name in names))
        for kind, one in figures["by_kind"].items()
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
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another path to --save") from error


def read_record(path: Path) -> Record:
    """Read a record from a file. Raises ConfigError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"expected a result of at most {MAX_FILE_BYTES} bytes, {path} has more")
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        rule = f"{path} cannot be read as a result: {error}; give a file written by --save"
        raise ConfigError(rule, code="cannot_read_result") from error
    if not isinstance(content, dict):
        raise ConfigError(f"expected a result of one JSON object, {path} is not; give a file written by --save")
    return content


def _ramp(setup: LoadSetup) -> Record:
    if setup.comes != "ramp":
        return {}
    return {"ramp_up_strategy": "linear", "ramp_up_start_rps": setup.rate, "ramp_up_end_rps": setup.ramp_to}


def _ms(number: float | None) -> str:
    return "-" if number is None else f"{number:,.1f}"
