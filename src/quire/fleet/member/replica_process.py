"""The entry point of a member that another process starts (for example a gateway), and that exits with its parent.

python -m quire.fleet.member.replica_process          reads a `ReplicaSpec` from standard input
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
from quire.fleet.member.replicas import ReplicaSpec
from quire.fleet.member.run import MemberPlan, run_member
from quire.fleet.member.status import write_status
from quire.observe.access_log import configure_logging
from quire.worker.parent.worker_plan import Limits, WorkerPlan

FAILED = 2


def read_spec(source: BinaryIO) -> ReplicaSpec:
    """Read the spec that the parent sends. The parent keeps its end of the pipe open until it exits."""
    num_bytes = int.from_bytes(source.read(8), "big")
    return msgspec.msgpack.decode(source.read(num_bytes), type=ReplicaSpec)


def plan_of(spec: ReplicaSpec) -> MemberPlan:
    """Return the plan for the member of this spec."""
    worker = WorkerPlan(spec.open_message, Limits(stuck_s=spec.stuck_s))
    return MemberPlan(spec.name, MemberEndpoints(spec.address).resolved(), spec.keys, worker, spec.text_assets)


async def serve_member(plan: MemberPlan, drain_s: float, *, reports_status: bool = False) -> bool:
    """Serve until a signal or the parent's exit. Return false if requests were aborted."""
    loop, stop_event = asyncio.get_running_loop(), asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stop_event.set)
    stdin_fd = sys.stdin.fileno()

    def on_parent_exit() -> None:
        loop.remove_reader(stdin_fd)
        stop_event.set()

    loop.add_reader(stdin_fd, on_parent_exit)  # the parent sends nothing more, so it is readable only when closed
    if not reports_status:
        return await run_member(plan, stop_event, drain_s, _print_line)
    stdout_fd = sys.stdout.fileno()
    os.set_blocking(stdout_fd, False)
    return await run_member(plan, stop_event, drain_s, _print_line, partial(write_status, stdout_fd))


def main() -> int:
    """Run the member process; return its exit code."""
    configure_logging("plain")
    try:
        spec = read_spec(sys.stdin.buffer)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_member(plan_of(spec), spec.drain_s, reports_status=spec.reports_status))
    except (QuireError, msgspec.MsgspecError) as error:
        _print_line(f"error: {error}")
        return FAILED
    return 0


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
