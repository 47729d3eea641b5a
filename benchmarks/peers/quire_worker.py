"""Runs quire's engine in a separate process, with the same JSON lines as `openvino_worker.py`, so that only the engine
differs. Settings are fields of ModelSettings, as JSON."""

import json
import sys
import time
from typing import Any

import quire


def main(model: str, settings: dict[str, Any]) -> None:
    """Load the model, report it, and answer until the pipe is closed."""
    with quire.LLM(model, quire.ModelSettings(**settings)) as llm:
        _answer({"ready": True})
        for line in sys.stdin:
            ask = json.loads(line)
            params = quire.SamplingParams(max_tokens=ask["max_tokens"], temperature=0.0, ignore_eos=True)
            started_s = time.perf_counter()
            completions = llm.generate(ask["prompts"], params, show_progress=False)
            seconds = time.perf_counter() - started_s
            first_s = max(one.timings.first_token_s for one in completions)
            num_tokens = sum(one.num_output_tokens for one in completions)
            _answer({"seconds": seconds, "first_s": first_s, "output_tokens": num_tokens})


def _answer(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
