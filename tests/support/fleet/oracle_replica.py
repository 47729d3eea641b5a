"""A replica without a model: what `quire.fleet.member.replica_process` is, with an oracle in its worker.

python -m tests.support.fleet.oracle_replica
"""

import asyncio
import sys
from dataclasses import replace

from quire.errors import QuireError
from quire.fleet.member.replica_process import plan_of, read_spec, serve_member
from tests.support.workers.oracle_worker import oracle_plan

COMMAND = (sys.executable, "-m", "tests.support.fleet.oracle_replica")


def main() -> int:
    order = read_spec(sys.stdin.buffer)
    worker = oracle_plan(int(order.open_message.model), order.open_message.settings, step_s=0.01)
    plan = replace(plan_of(order), worker=replace(worker, open_message=order.open_message))
    try:
        asyncio.run(serve_member(plan, order.drain_s, reports_status=order.reports_status))
    except QuireError:
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
