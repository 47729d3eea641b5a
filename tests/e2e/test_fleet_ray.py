"""A fleet on a real Ray, with oracles for members: it answers, a killed member is replaced, and it leaves nothing."""

import os
import signal
from pathlib import Path

import ray  # type: ignore[import-not-found,unused-ignore]  # noqa: F401 - where it is not installed, nothing here can run
from ray import serve  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

from proofs.fleet.ray import member_process, ray_fleet, ray_python, scaling
from proofs.framework.proof import Proof


def test_a_killed_member_of_a_fleet_on_ray_loses_no_stream_and_is_replaced(tmp_path: Path) -> None:
    python = ray_python()
    assert python is not None
    with ray_fleet(Proof("test", "quick", tmp_path), python) as fleet:
        fleet.up(scaling(2, 2))
        expected = [one.text for one in fleet.ask_all([1, 2, 3, 4])]
        victim, replica_pid = next(iter(fleet.replicas().items()))
        member_pid = member_process(replica_pid)
        found = fleet.ask_all([1, 2, 3, 4], lambda: os.kill(member_pid, signal.SIGKILL))
        assert [(one.text, one.problem) for one in found] == [(text, "") for text in expected]
        fleet.until_replaced(victim, 2)
        before = fleet.running()
        fleet.up(scaling(1, 1))
        fleet.until(lambda: len(fleet.running()) == 1, "one member")
        assert fleet.running() < before
