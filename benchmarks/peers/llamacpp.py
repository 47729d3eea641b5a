"""Compares llama.cpp with quire, each in its own process, with the same GGUF file and number of threads.

A figure of `decode` is output tokens per second after all sequences have their first tokens; `prefill` is tokens per
second of one long prompt. The order of the two changes from round to round.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from benchmarks.peers.workers import Worker, quire_working, working
from quire.checkpoints import cache_folder
from quire.workload.visits import Span
from quire.workload.writing import SpanWriter

SETTLE_S = 1.5
"""The pause in which threads of the last engine go to sleep; some spin for a second before."""
NUM_THREADS = 2
COUNTS = (1, 4, 16, 32)
"""Numbers of concurrent sequences."""
SHORT_PROMPT, LONG_PROMPT = 32, 512
PREFILL = "prefill"
MEMORY_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one round."""

    counts: Sequence[int] = COUNTS
    output_tokens: int = 33
    prompt_tokens: int = LONG_PROMPT


@dataclass(frozen=True, slots=True)
class Sides:
    """Workers of both engines, with the model loaded."""

    ours: Worker
    theirs: Worker


def python(instruction_set: str = "") -> Path | None:
    """Return the Python of llama.cpp built for this set, by default for this processor; None if not installed."""
    name = f"llamacpp-{instruction_set}" if instruction_set else "llamacpp"
    path = cache_folder() / "peers" / name / "bin" / "python"
    return path if path.exists() and (path.parents[1] / "installed.txt").exists() else None


@contextmanager
def loaded(
    model: Path, settings: Mapping[str, Any], num_sequences: int = max(COUNTS), instruction_set: str = ""
) -> Iterator[Sides]:
    """Load the file in both; `settings` are quire's, `instruction_set` chooses the build of llama.cpp."""
    ours = {"memory_bytes": MEMORY_BYTES, "max_sequence_tokens": 1024, "num_threads": NUM_THREADS, **settings}
    with ExitStack() as stack:
        yield Sides(
            stack.enter_context(quire_working(model, ours)),
            stack.enter_context(llamacpp_worker(model, num_sequences, instruction_set)),
        )


def llamacpp_worker(model: Path, num_sequences: int, instruction_set: str = "") -> AbstractContextManager[Worker]:
    """Start llama.cpp alone."""
    interpreter = python(instruction_set)
    if interpreter is None:
        variable = f"SET={instruction_set} " if instruction_set else ""
        raise SystemExit(f"llamacpp is not installed; run: {variable}benchmarks/peers/install.sh llamacpp")
    script = Path(__file__).with_name("llamacpp_worker.py")
    command = (str(interpreter), str(script), str(model), str(NUM_THREADS), str(num_sequences))
    return working(command, {"PYTHONPATH": ""})


def one_round(sides: Sides, number: int, load: Load) -> Iterator[tuple[str, float, float]]:
    """Yield name, quire's and llama.cpp's value of each figure, in tokens per second."""
    order = (sides.ours, sides.theirs) if number % 2 == 0 else (sides.theirs, sides.ours)
    for count in load.counts:
        prompts = new_prompts(count, SHORT_PROMPT)
        rates = {id(side): decode_rate(side, prompts, load.output_tokens) for side in order}
        yield str(count), rates[id(sides.ours)], rates[id(sides.theirs)]
    prompts = new_prompts(1, load.prompt_tokens)
    rates = {id(side): prefill_rate(side, prompts) for side in order}
    yield PREFILL, rates[id(sides.ours)], rates[id(sides.theirs)]


def decode_rate(side: Worker, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
    """Return tokens per second of all sequences after their first tokens."""
    time.sleep(SETTLE_S)
    answer = side.run(prompts, output_tokens)
    if answer.first_s is None:
        raise RuntimeError("expected first_s, the time until all have their first tokens, in the worker's answer")
    return len(prompts) * (output_tokens - 1) / max(answer.seconds - answer.first_s, 1e-6)


def prefill_rate(side: Worker, prompts: Sequence[Sequence[int]]) -> float:
    """Return prompt tokens per second."""
    time.sleep(SETTLE_S)
    return sum(map(len, prompts)) / side.run(prompts, 1).seconds


def new_prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Return new random prompts."""
    writer = SpanWriter(token_hex(8))
    return [writer.ids([Span(f"own {number}", num_tokens)]) for number in range(count)]
