"""Runs OpenVINO GenAI in a separate process and environment: one JSON line on stdin, one on stdout.

in    {"prompts": [[token ids], ...], "max_tokens": 64}
out   {"seconds": 1.2, "output_tokens": 512}
"""

import json
import sys
import time
from typing import Any


def main(model: str, cache_gb: int) -> None:
    """Load the GGUF file, report it, and answer until the pipe is closed."""
    import numpy as np  # noqa: PLC0415 - only in the peer's environment
    import openvino as ov  # type: ignore[import-not-found] # noqa: PLC0415
    import openvino_genai as genai  # type: ignore[import-not-found] # noqa: PLC0415

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache_gb
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    pipeline: Any = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    _answer({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        config = genai.GenerationConfig()
        config.max_new_tokens = ask["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        prompts = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in ask["prompts"]]
        started_s = time.perf_counter()
        results = pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - started_s
        _answer({"seconds": seconds, "output_tokens": sum(len(one.m_generation_ids[0]) for one in results)})


def _answer(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
