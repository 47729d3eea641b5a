"""The entry point of a member that another process starts (for example a gateway), and that exits with its parent.

python -m quire.fleet.member.replica_process          reads a `ReplicaOrder` from standard input
"""

import asyncio
import os
import signal
import sys
from functools import partial
from typing import BinaryIO

import msgspec
import uvloop

from quire.errors import QuireError
from quire.fleet.kv_events.relay import MemberEndpoints
from quire.fleet.member.replicas import ReplicaOrder
from quire.fleet.member.run import MemberPlan, run_member
from quire.fleet.member.status import write_status
from quire.observe.access_log import set_up
from quire.worker.parent.worker_plan import Limits, WorkerPlan

FAILED = 2


def read_order(source: BinaryIO) -> ReplicaOrder:
    """Read the parent's order. The parent keeps its end of the pipe open while it lives."""
    num_bytes = int.from_bytes(source.read(8), "big")
    return msgspec.msgpack.decode(source.read(num_bytes), type=ReplicaOrder)


def plan_of(order: ReplicaOrder) -> MemberPlan:
    """Return the plan of the ordered member."""
    worker = WorkerPlan(order.open, Limits(stuck_s=order.stuck_s))
    return MemberPlan(order.name, MemberEndpoints(order.address).resolved(), order.keys, worker, order.text_assets)


async def serve_order(plan: MemberPlan, drain_s: float, *, reports_status: bool = False) -> bool:
    """Serve until a signal, or until the parent has exited."""
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    leash = sys.stdin.fileno()

    def let_go() -> None:
        loop.remove_reader(leash)
        ending.set()

    loop.add_reader(leash, let_go)  # the parent sends nothing more, so readable means closed
    if not reports_status:
        return await run_member(plan, ending, drain_s, _print_line)
    descriptor = sys.stdout.fileno()
    os.set_blocking(descriptor, False)
    return await run_member(plan, ending, drain_s, _print_line, partial(write_status, descriptor))


def main() -> int:
    """Run the member process; return its exit code."""
    set_up("plain")
    try:
        order = read_order(sys.stdin.buffer)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_order(plan_of(order), order.drain_s, reports_status=order.reports_status))
    except (QuireError, msgspec.MsgspecError) as error:
        _print_line(f"error: {error}")
        return FAILED
    return 0


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
