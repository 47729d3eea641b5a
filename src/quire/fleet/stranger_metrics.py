"""A server's `/metrics`, read for what a router wants to know: how busy it is, and how large. Pure.

The names are vLLM's. Of several engines behind one address the counts are added up. What is not understood is left out:
without figures a member is chosen by what this gateway gave it alone.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from math import isfinite

DEFAULT_BLOCK_SIZE = 16
"""vLLM's own where it says nothing else."""
MAX_COUNT = 1 << 40
_SAMPLE = re.compile(r"vllm:(\w+)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?\s*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class StrangerFigures:
    """What a server says of itself."""

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


def read_figures(text: str) -> StrangerFigures:
    """What these lines say. Never raises: a line that says nothing is none."""
    values: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, list[int]] = defaultdict(list)
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        if name == "cache_config_info":
            for label, told in _LABEL.findall(labels or ""):
                if told.isascii() and told.isdecimal() and 0 < int(told[:20]) <= MAX_COUNT:
                    sizes[label].append(int(told))
        else:
            values[name].append(_number(value))
    usage = values["kv_cache_usage_perc"] or values["gpu_cache_usage_perc"] or [0.0]
    num_prompts = sum(values["request_prompt_tokens_count"])
    return StrangerFigures(
        num_running=int(sum(values["num_requests_running"])),
        num_waiting=int(sum(values["num_requests_waiting"])),
        kv_usage=min(1.0, sum(usage) / len(usage)),
        block_size=max(sizes["block_size"], default=None),
        num_blocks=sum(sizes["num_gpu_blocks"]) or None,
        num_computed_tokens=int(sum(values["prompt_tokens_total"]) + sum(values["generation_tokens_total"])),
        num_preemptions=int(sum(values["num_preemptions_total"])),
        mean_prompt_tokens=sum(values["request_prompt_tokens_sum"]) / num_prompts if num_prompts else 0.0,
    )


def _number(text: str) -> float:
    """Counts are not negative, and not endless."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), float(MAX_COUNT)) if isfinite(value) else 0.0
