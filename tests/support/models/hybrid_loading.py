"""Loading a hybrid in a child process, within a memory budget, and using every slot that it says it has."""

import json
import sys
from pathlib import Path

from quire.backends import memory_plan
from quire.backends.load import load_backend
from quire.checkpoints import resolve
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.errors import ConfigError
from tests.support.models.models import Ask, Machine

VOCABULARY = 4096
MOST_ROUNDS = 60


def fill_slots(directory: Path, memory_bytes: int, max_running: int) -> dict[str, object]:
    """Load within the budget, run until states had to make room for others, and tell the most that was resident."""
    settings = ModelSettings(
        memory_bytes=memory_bytes, max_running=max_running, max_step_tokens=256, max_sequence_tokens=1024
    )
    try:
        loaded = load_backend(resolve(str(directory)), settings)
    except ConfigError as error:
        return {"is_started": False, "sentence": str(error), "peak_bytes": memory_plan.peak_bytes()}
    plan, machine = loaded.memory_plan, Machine(loaded.runner, max_running=loaded.memory_plan.max_running)
    params, memory = ResolvedSampling(temperature=0.9, top_p=0.9, max_tokens=8), machine.engine.memory
    for number in range(MOST_ROUNDS):
        if memory.stats().num_slot_evictions:
            break
        first = number * plan.max_running
        machine.run([_ask(at, params) for at in range(first, first + plan.max_running)])
    stats = memory.stats()
    return {
        "is_started": True,
        "is_full": stats.num_slot_evictions > 0 and stats.num_slots == plan.num_slots,
        "is_lowered": plan.max_running < max_running,
        "is_told": (plan.max_running < max_running) == any("state slots" in note for note in loaded.notes),
        "num_slots": stats.num_slots,
        "peak_bytes": max(loaded.load_peak_bytes, memory_plan.peak_bytes()),
        "sentence": plan.summary,
    }


def _ask(at: int, params: ResolvedSampling) -> Ask:
    return Ask([(at * 7919 + i * (at % 7 + 1)) % VOCABULARY for i in range(70 + at % 50)], params)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(fill_slots(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))) + "\n")
