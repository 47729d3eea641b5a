"""An oracle that keeps a diary of the prompts it computes, and dies when it is told to.

The diary is what a worker's counts are held against: it is written by the runner from the rows it was given, knows
nothing of caches, and outlives its writer. Each line is a step that was done: when, by which process, whom it let go of
before it, and every row that fed a prompt position.

It dies at the beginning of a step, a moment after it was told to: what it said of the steps before has been heard, and
of the one it was about to do nothing was. So what the parent knows at that moment is what the diary says.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from tests.support.machine.timed import TimedRunner

DIARY = "ORACLE_DIARY"
"""Where to write it."""
HEARD_S = 0.05
"""What was said before has been heard after this long."""


def death_of(diary: Path) -> Path:
    """Whose file stands there is told to die."""
    return diary.with_suffix(".death")


class RecordingRunner(TimedRunner):
    """Writes down every row that feeds a prompt, after the step."""

    scheduler: Scheduler
    """For the names of those it computes; handed in once there is one."""

    def keep(self, diary: Path) -> None:
        self._running: dict[int, int] = {}
        """Who ran in the last step, and how often each had been preempted."""
        self._death = death_of(diary)
        self._diary = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        if self._death.exists():
            time.sleep(HEARD_S)
            self._death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().run(plan, masks)
        names = {one.sequence_id: one for one in self.scheduler.running}
        dropped = self._dropped({key: one.num_preemptions for key, one in names.items()})
        rows = [
            (item.sequence_id, names[item.sequence_id].request.seed, item.first_position, len(item.token_ids),
             names[item.sequence_id].num_prompt_tokens, item.sampling is not None)
            for item in plan.items if item.first_position < names[item.sequence_id].num_prompt_tokens
        ]  # fmt: skip
        if rows or dropped:
            line = json.dumps([time.monotonic(), os.getpid(), dropped, rows]) + "\n"
            os.write(self._diary, line.encode())
        return result

    def _dropped(self, running: dict[int, int]) -> list[int]:
        """Whom the scheduler let go of since the step before: who has ended, or was preempted and is or is not back."""
        before, self._running = self._running, running
        return [
            *(key for key, count in before.items() if running.get(key) != count),
            *(key for key, count in running.items() if count and key not in before),
        ]


@dataclass
class Pass:
    """One time a request was begun by a worker, until it was let go of for the first time."""

    seed: int
    num_prompt: int
    first_position: int
    """What it found before it computed anything."""
    fed: set[int]
    last_s: float = 0.0
    """When it was computed last."""
    ended_s: float | None = None
    has_token: bool = False
    was_interrupted: bool = False
    """It was preempted after it computed something and before its first token."""
    was_let_go_unseen: bool = False
    """It was preempted before it computed anything: what it had found cannot be seen from its rows."""

    @property
    def num_found(self) -> int:
        """Prompt tokens before the last one computed that nobody computed for it."""
        return max(self.fed) + 1 - len(self.fed)


def passes_in(diary: Path) -> Iterator[Pass]:
    """All of them, in the order they began. What comes after a preemption belongs to none: it was not the first."""
    found: dict[tuple[int, int], Pass] = {}
    unseen: set[tuple[int, int]] = set()
    for line in diary.read_text().splitlines():
        at_s, pid, dropped, rows = json.loads(line)
        for one in dropped:
            if (pid, one) in found:
                found[pid, one].ended_s = at_s
                found[pid, one].was_interrupted |= not found[pid, one].has_token
            else:
                unseen.add((pid, one))
        for sequence_id, seed, first, count, num_prompt, has_token in rows:
            own = found.setdefault((pid, sequence_id), Pass(seed, num_prompt, first, set()))
            own.last_s, own.was_let_go_unseen = at_s, (pid, sequence_id) in unseen
            if own.ended_s is None:
                own.fed.update(range(first, min(first + count, num_prompt)))
            own.has_token = own.has_token or has_token
    yield from found.values()
