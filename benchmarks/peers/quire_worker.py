"""quire's engine in a process of its own, asked as `openvino_worker.py` is: the same lines, so that nothing differs but
the engine."""

import json
import sys
import time
from typing import Literal

import quire


def main(model: str, memory_gb: int, dtype: Literal["float32", "bfloat16"]) -> None:
    """Load the model, say so, and answer until the pipe is closed."""
    settings = quire.ModelSettings(memory_bytes=memory_gb << 30, max_sequence_tokens=2048, dtype=dtype)
    with quire.LLM(model, settings) as llm:
        _answer({"ready": True})
        for line in sys.stdin:
            ask = json.loads(line)
            params = quire.SamplingParams(max_tokens=ask["max_tokens"], temperature=0.0, ignore_eos=True)
            started_s = time.perf_counter()
            done = llm.generate(ask["prompts"], params, show_progress=False)
            seconds = time.perf_counter() - started_s
            _answer({"seconds": seconds, "output_tokens": sum(one.num_output_tokens for one in done)})


def _answer(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "bfloat16" if sys.argv[3] == "bfloat16" else "float32")
