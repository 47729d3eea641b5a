"""The loop a measurement runs on."""

import asyncio

from quire.bench.runs import run_async


def test_work_is_run_to_its_end() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    assert run_async(work()) == "done"
