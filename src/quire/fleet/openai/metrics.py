"""Parses a server's `/metrics` for the router: its load, and its size. Pure.

The names are vLLM's. Counts of several engines behind one address are added up. Unknown lines are skipped: without
metrics a member is chosen by this gateway's own assignments alone. Only the lines with these names are parsed,
and of each name a bounded number: the page is read every second, on the gateway's event loop.
"""

import re
from dataclasses import dataclass
from math import isfinite

DEFAULT_BLOCK_SIZE = 16
"""vLLM's default."""
MAX_COUNT = 1 << 40
MAX_SAMPLES = 256
"""Of one name: a server has that many engines at most."""
MAX_SAMPLE_BYTES = 4096
_SIZES = re.compile(rb'[{,](block_size|num_gpu_blocks)="(\d{1,13})"')


@dataclass(frozen=True, slots=True)
class OpenAIFigures:
    """A server's metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of its blocks that are in use."""
    block_size: int | None = None
    num_blocks: int | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    mean_prompt_tokens: float = 0.0
    """Of all requests so far."""

    @property
    def num_used_blocks(self) -> int:
        """Of all its engines."""
        return round(self.kv_usage * (self.num_blocks or 0))


def read_figures(page: bytes) -> OpenAIFigures:
    """The metrics of a page. Never raises: malformed lines are skipped."""
    usage = _values(page, b"kv_cache_usage_perc") or _values(page, b"gpu_cache_usage_perc") or [0.0]
    sizes = [found for labels, _ in _samples(page, b"cache_config_info") for found in _SIZES.findall(labels)]
    counts = [(name, min(int(number), MAX_COUNT)) for name, number in sizes]
    num_prompts = sum(_values(page, b"request_prompt_tokens_count"))
    return OpenAIFigures(
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
    """Labels and value of the lines with this name: `vllm:NAME{LABELS} VALUE`, labels if there are any."""
    found, start, at = list[tuple[bytes, bytes]](), b"vllm:" + name, 0
    while len(found) < MAX_SAMPLES and (at := page.find(start, at)) >= 0:
        is_first, at = at == 0 or page[at - 1 : at] == b"\n", at + len(start)
        if is_first and page[at : at + 1] in (b"{", b" "):
            labels, _, rest = page[at : at + MAX_SAMPLE_BYTES].partition(b"\n")[0].rpartition(b"}")
            found.append((labels, rest.strip().partition(b" ")[0]))
    return found


def _number(text: bytes) -> float:
    """Counts are finite and not negative."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), float(MAX_COUNT)) if isfinite(value) else 0.0
