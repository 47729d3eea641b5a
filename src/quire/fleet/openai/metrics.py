"""Parses a server's `/metrics` for the router: its load and cache size. Pure logic, no I/O.

Metric names are vLLM's. Counts of several engines behind one address are summed. Without metrics the router only uses
this gateway's own assignments. A bounded number of lines per metric is parsed and all other lines are skipped, because
the gateway's event loop parses the page every second.
"""

import re
from dataclasses import dataclass
from math import isfinite

DEFAULT_BLOCK_SIZE = 16
"""vLLM's default block size in tokens."""
MAX_COUNT = 1 << 40
MAX_SAMPLES = 256
"""Maximum samples parsed per metric name: one per engine."""
MAX_SAMPLE_BYTES = 4096
_SIZES = re.compile(rb'[{,](block_size|num_gpu_blocks)="(\d{1,13})"')


@dataclass(frozen=True, slots=True)
class OpenAIMetrics:
    """A server's metrics, summed over its engines."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Fraction of KV blocks in use, 0 to 1."""
    block_size: int | None = None
    num_blocks: int | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    mean_prompt_tokens: float = 0.0
    """Mean prompt length of all requests since the server started."""

    @property
    def num_used_blocks(self) -> int:
        """Used blocks of all engines."""
        return round(self.kv_usage * (self.num_blocks or 0))


def read_metrics(page: bytes) -> OpenAIMetrics:
    """Parse a `/metrics` page. Never raises: malformed lines are skipped."""
    usage = _values(page, b"kv_cache_usage_perc") or _values(page, b"gpu_cache_usage_perc") or [0.0]
    sizes = [size for labels, _ in _samples(page, b"cache_config_info") for size in _SIZES.findall(labels)]
    counts = [(name, min(int(number), MAX_COUNT)) for name, number in sizes]
    num_prompts = sum(_values(page, b"request_prompt_tokens_count"))
    return OpenAIMetrics(
        num_running=int(sum(_values(page, b"num_requests_running"))),
        num_waiting=int(sum(_values(page, b"num_requests_waiting"))),
        kv_usage=min(1.0, sum(usage) / len(usage)),
        block_size=max((count for name, count in counts if name == b"block_size"), default=0) or None,
        num_blocks=sum(count for name, count in counts if name == b"num_gpu_blocks") or None,
        num_computed_tokens=int(
            sum(_values(page, b"prompt_tokens_total")) + sum(_values(page, b"generation_tokens_total"))
        ),
        num_preemptions=int(sum(_values(page, b"num_preemptions_total"))),
        mean_prompt_tokens=sum(_values(page, b"request_prompt_tokens_sum")) / num_prompts if num_prompts else 0.0,
    )


def _values(page: bytes, name: bytes) -> list[float]:
    return [_number(value) for _, value in _samples(page, name)]


def _samples(page: bytes, name: bytes) -> list[tuple[bytes, bytes]]:
    """Return labels and value of each line `vllm:NAME{LABELS} VALUE` or `vllm:NAME VALUE`."""
    samples, start, position = list[tuple[bytes, bytes]](), b"vllm:" + name, 0
    while len(samples) < MAX_SAMPLES and (position := page.find(start, position)) >= 0:
        is_line_start, position = position == 0 or page[position - 1 : position] == b"\n", position + len(start)
        if is_line_start and page[position : position + 1] in (b"{", b" "):
            labels, _, value_text = page[position : position + MAX_SAMPLE_BYTES].partition(b"\n")[0].rpartition(b"}")
            samples.append((labels, value_text.strip().partition(b" ")[0]))
    return samples


def _number(text: bytes) -> float:
    """Parse a number and clamp it to [0, MAX_COUNT]; 0 if it is malformed or not finite."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), float(MAX_COUNT)) if isfinite(value) else 0.0
