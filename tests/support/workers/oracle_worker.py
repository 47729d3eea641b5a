"""A worker without a model: the oracle in a real process, so that counts are exact and a life begins in half a second.

python -m tests.support.workers.oracle_worker SOCKET PAGE LEASH PARENT
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.backends.protocol import Capacity
from quire.checkpoints import Progress
from quire.config import ModelSettings
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.step_cost import StepCost
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.engine.engine import Engine, ModelIdentity
from quire.engine.guides import GrammarMatchers
from quire.engine.trace_recorder import TraceSettings
from quire.errors import CheckpointError
from quire.worker.child.process import Emit, run_worker
from quire.worker.kv_event_settings import KVEventSettings
from quire.worker.messages import Open
from quire.worker.parent.worker_plan import Limits, WorkerPlan
from tests.support.machine.timed import PacedRunner, TimedRunner
from tests.support.workers.broken_runner import ORACLE_FAULTS, broken
from tests.support.workers.recording import DIARY, RecordingRunner

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ROOT = Path(__file__).parents[3]
ORACLE = (sys.executable, "-m", "tests.support.workers.oracle_worker")
STEP_S = "ORACLE_STEP_S"
PACE = "ORACLE_TOKEN_S"
"""How long a token takes, of a step that is made layer by layer."""
LOAD_S = "ORACLE_LOAD_S"
"""How long it takes to load."""
GUESSES = "ORACLE_GUESSES"
CHEAP_GUESSES = StepCost(((1, 1.0), (64, 1.001)))
"""By which nearly every guess pays."""
NEEDS = "ORACLE_NEEDS"
"""A file that must be there to load."""
SETTINGS = ModelSettings(memory_bytes=512, block_size=4, max_step_tokens=256, max_running=64, max_sequence_tokens=512)
"""`memory_bytes` counts blocks here, and the model's name is the size of its vocabulary."""


def open_oracle(command: Open, _progress: Progress, emit: Emit | None) -> Engine:
    settings = command.settings
    assert settings.memory_bytes is not None
    assert settings.max_sequence_tokens is not None
    longest = settings.max_sequence_tokens
    capacity = Capacity(
        settings.memory_bytes,
        settings.block_size,
        longest,
        settings.max_step_tokens,
        int(command.model),
        8 * settings.block_size,
    )
    cost = CHEAP_GUESSES if os.environ.get(GUESSES) else None
    config = SchedulerConfig(
        settings.max_step_tokens, settings.max_running, longest, queue=command.queue, step_cost=cost
    )
    time.sleep(float(os.environ.get(LOAD_S, "0")))
    if (needed := os.environ.get(NEEDS)) and not Path(needed).exists():
        raise CheckpointError(f"{needed} is gone; put it back", code="weights_are_gone")
    diary = os.environ.get(DIARY)
    kind = RecordingRunner if diary else TimedRunner
    token_s = float(os.environ.get(PACE, "0"))
    runner = PacedRunner(capacity, token_s) if token_s else kind(capacity, float(os.environ.get(STEP_S, "0")))
    engine = Engine(
        runner, config, ModelIdentity("oracle", "slots"), command.key, emit, GrammarMatchers(_read_vocabulary)
    )
    engine.info = replace(engine.info, line="an oracle", exactness="oracle")
    if diary and isinstance(runner, RecordingRunner):
        runner.scheduler = engine.scheduler
        runner.keep(Path(diary))
    return broken(engine)


def _read_vocabulary() -> "LLTokenizer":
    from tests.support.core.grammars import small_vocabulary  # noqa: PLC0415 - a worker loads nothing of text without need

    return small_vocabulary()


def oracle_plan(
    vocabulary_size: int,
    settings: ModelSettings = SETTINGS,
    *,
    faults: str = "",
    limits: Limits | None = None,
    queue: QueueConfig | None = None,
    kv_events: KVEventSettings | None = None,
    step_s: float = 0.0,
    command: tuple[str, ...] = ORACLE,
    trace: TraceSettings | None = None,
) -> WorkerPlan:
    """What a supervisor needs to run oracles."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    return WorkerPlan(
        Open(str(vocabulary_size), settings, queue or QueueConfig(), bytes(32), kv_events, trace=trace),
        limits or Limits(),
        command,
        {ORACLE_FAULTS: faults, STEP_S: str(step_s), "PYTHONPATH": path},
    )


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:], open_oracle))
