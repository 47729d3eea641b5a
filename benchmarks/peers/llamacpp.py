"""llama.cpp beside quire, both in processes of their own on the same GGUF file and with the same number of threads.

A figure of `decode` is output tokens per second after all sequences have their first tokens; `prefill` is tokens per
second of one long prompt. Which of the two goes first changes from round to round.
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
"""Threads of the one that spoke last go to sleep; some spin for a second before they do."""
NUM_THREADS = 2
COUNTS = (1, 4, 16, 32)
"""Sequences at once."""
SHORT_PROMPT, LONG_PROMPT = 32, 512
PREFILL = "prefill"
MEMORY_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Load:
    """What both are asked for in a round."""

    counts: Sequence[int] = COUNTS
    output_tokens: int = 33
    prompt_tokens: int = LONG_PROMPT


@dataclass(frozen=True, slots=True)
class Sides:
    """Both, loaded."""

    ours: Worker
    theirs: Worker


def python(instruction_set: str = "") -> Path | None:
    """Of the peer's environment, built for this set or else for what the processor has; None: not installed."""
    name = f"llamacpp-{instruction_set}" if instruction_set else "llamacpp"
    path = cache_folder() / "peers" / name / "bin" / "python"
    return path if path.exists() and (path.parents[1] / "installed.txt").exists() else None


@contextmanager
def loaded(
    model: Path, settings: Mapping[str, Any], num_sequences: int = max(COUNTS), instruction_set: str = ""
) -> Iterator[Sides]:
    """Both on this file; `settings` are ours, `instruction_set` is what theirs was built for."""
    ours = {"memory_bytes": MEMORY_BYTES, "max_sequence_tokens": 1024, "num_threads": NUM_THREADS, **settings}
    with ExitStack() as stack:
        yield Sides(
            stack.enter_context(quire_working(model, ours)),
            stack.enter_context(their_working(model, num_sequences, instruction_set)),
        )


def their_working(model: Path, num_sequences: int, instruction_set: str = "") -> AbstractContextManager[Worker]:
    """llama.cpp alone."""
    interpreter = python(instruction_set)
    if interpreter is None:
        variable = f"SET={instruction_set} " if instruction_set else ""
        raise SystemExit(f"llamacpp is not installed; run: {variable}benchmarks/peers/install.sh llamacpp")
    script = Path(__file__).with_name("llamacpp_worker.py")
    words = (str(interpreter), str(script), str(model), str(NUM_THREADS), str(num_sequences))
    return working(words, {"PYTHONPATH": ""})


def one_round(sides: Sides, number: int, load: Load) -> Iterator[tuple[str, float, float]]:
    """Name, ours and theirs of each figure, in tokens per second."""
    order = (sides.ours, sides.theirs) if number % 2 == 0 else (sides.theirs, sides.ours)
    for count in load.counts:
        prompts = new_prompts(count, SHORT_PROMPT)
        rates = {id(side): decode_rate(side, prompts, load.output_tokens) for side in order}
        yield str(count), rates[id(sides.ours)], rates[id(sides.theirs)]
    prompts = new_prompts(1, load.prompt_tokens)
    rates = {id(side): prefill_rate(side, prompts) for side in order}
    yield PREFILL, rates[id(sides.ours)], rates[id(sides.theirs)]


def decode_rate(side: Worker, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
    """Tokens per second of all sequences after their first ones."""
    time.sleep(SETTLE_S)
    answer = side.run(prompts, output_tokens)
    if answer.first_s is None:
        raise RuntimeError("a worker that decodes must say when all had their first tokens")
    return len(prompts) * (output_tokens - 1) / max(answer.seconds - answer.first_s, 1e-6)


def prefill_rate(side: Worker, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second of prompts."""
    time.sleep(SETTLE_S)
    return sum(map(len, prompts)) / side.run(prompts, 1).seconds


def new_prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Prompts that nobody has seen."""
    writer = SpanWriter(token_hex(8))
    return [writer.ids([Span(f"own {place}", num_tokens)]) for place in range(count)]
