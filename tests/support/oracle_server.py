"""`quire serve` with an oracle behind it, as a process of its own: everything but the model is real.

    python -m tests.support.oracle_server --port 0 --step-s 0.01 …

Takes the settings of `quire serve` as `--name value`; says the same lines on stderr.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from quire.api.serving import Plan, run
from quire.backends.oracle import OracleRunner
from quire.cli.front import InProcess
from quire.config import Settings, load_settings
from quire.core.step import StepPlan, StepResult
from quire.engine.async_engine import AsyncEngine
from quire.observe.access_log import set_up
from tests.support.talkers import talker


class TimedRunner(OracleRunner):
    """An oracle whose steps take some time, during which others may run."""

    step_s = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        if self.step_s:
            time.sleep(self.step_s)
        return super().run(plan)


@asynccontextmanager
async def opened(_name: str, _settings: Settings) -> AsyncIterator[tuple[AsyncEngine, InProcess]]:
    model = talker(num_blocks=4096, max_running=64, max_step_tokens=256)
    model.engine.runner = TimedRunner(model.engine.runner.capacity)
    async with AsyncEngine(model) as front:
        yield front, InProcess(model.engine, front)


def main(words: list[str]) -> int:
    given = dict(zip(words[::2], words[1::2], strict=True))
    TimedRunner.step_s = float(given.pop("--step-s", "0"))
    flags = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    settings = load_settings(dict(flags), environ={})
    set_up("json" if settings.doors.log_format == "json" else "plain")
    plan = Plan({"oracle": "oracle"}, settings)

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        num_ended = runner.run(run(plan, say, opened))
    say(f"ended {num_ended}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
