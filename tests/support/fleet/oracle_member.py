"""A member without a model, in a process of its own, so that it can be stopped and killed.

python -m tests.support.fleet.oracle_member ADDRESS STEP_S [KEYS [EVENTS REPLAY]]
"""

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quire.fleet.kv_events.relay import MemberEndpoints
from quire.fleet.member.run import MemberPlan, run_member
from quire.fleet.protocol.keys import read_member_keys
from tests.support.fleet.small_fleets import LOCAL, oracle_words
from tests.support.machine.spawned import MEMBER_AT, Spawned, in_checkout, spawned
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import SETTINGS, oracle_plan

ROOMY = replace(SETTINGS, memory_bytes=4096, block_size=16)
"""As `oracle_server` has it: what the two cost is compared."""


@dataclass
class MemberProcess(Spawned):
    """One that listens."""

    address: str

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextmanager
def member_process(address: str = LOCAL, step_s: float = 0.0) -> Iterator[MemberProcess]:
    words = [sys.executable, "-m", "tests.support.fleet.oracle_member", address, str(step_s)]
    with spawned(words, None, in_checkout(), stops_s=0) as one:
        yield MemberProcess(one.process, one.log, one.wait_for(MEMBER_AT))


def main(address: str, step_s: str, keys: str = "", events: str = "", replay: str = "") -> int:
    async def run() -> bool:
        ending = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
        size = talker(template=TEMPLATE).text.vocabulary_size
        plan = MemberPlan(
            "oracle",
            MemberEndpoints(address, events, replay).resolved(),
            read_member_keys(Path(keys)) if keys else None,
            oracle_plan(size, ROOMY, step_s=float(step_s)),
            oracle_words(),
        )
        return await run_member(plan, ending, 60.0, _say)

    return 0 if asyncio.run(run()) else 1


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
