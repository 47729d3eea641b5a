"""Loading models in child processes: of files that may be damaged, and within a memory budget."""

import json
import sys
from pathlib import Path

from quire.backends import memory_plan
from quire.backends.load import load_backend
from quire.checkpoints import Checkpoint, resolve
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, StepPlan, WorkItem
from quire.errors import ConfigError
from tests.support.models.models import Ask, Machine

SMALL = ModelSettings(memory_bytes=3 << 30, block_size=8, max_step_tokens=32, max_running=4, max_sequence_tokens=32)


def load_and_step(checkpoint: Checkpoint) -> None:
    """A model that was let in must also load and take a step, or be refused in words."""
    runner = load_backend(checkpoint, SMALL).runner
    sampling = Sampling(ResolvedSampling(), 1, 0, 2, 1, None)
    item = WorkItem(1, (0, 0), 0, (1,), sampling)
    runner.start(StepPlan(1, (), (item,))).wait()
    runner.close()


def fill(directory: Path, memory_bytes: int) -> dict[str, object]:
    """Load within the budget, use every block of the pool, and tell the most that was ever resident."""
    settings = ModelSettings(memory_bytes=memory_bytes, max_running=16)
    try:
        loaded = load_backend(resolve(str(directory)), settings)
    except ConfigError as error:
        return {"is_started": False, "sentence": str(error), "peak_bytes": memory_plan.peak_bytes(), "is_full": False}
    machine = Machine(loaded.runner, max_running=16)
    # A request must fit three quarters of the pool; the heaviest steps are among them: all prompt logprobs, and a
    # flat distribution whose top-p needs the whole vocabulary sorted.
    length = min(1500, loaded.memory_plan.num_blocks * loaded.memory_plan.block_size * 3 // 5) - 24
    params = ResolvedSampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=20, logprobs=5)
    heavy = ResolvedSampling(temperature=50.0, top_p=0.99, max_tokens=4, prompt_logprobs=5, logprobs=20)
    machine.alone(Ask([i % 49_000 for i in range(length)], heavy))
    asked = 0
    # The first eviction says that every block has been used.
    while machine.engine.memory.stats().num_evictions == 0 and asked < 200:
        asks = [Ask([(at * 7919 + i) % 49_000 for i in range(length)], params) for at in range(asked, asked + 4)]
        machine.run(asks)
        asked += 4
    is_full = machine.engine.memory.stats().num_evictions > 0
    peak = max(loaded.load_peak_bytes, memory_plan.peak_bytes())
    return {"is_started": True, "sentence": loaded.memory_plan.summary, "peak_bytes": peak, "is_full": is_full}


if __name__ == "__main__":
    print(json.dumps(fill(Path(sys.argv[1]), int(sys.argv[2]))))
