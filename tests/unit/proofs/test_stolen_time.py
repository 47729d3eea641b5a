"""Bystanders tell what their processor lost, also while it is being lost."""

import os
import signal
import time
from collections.abc import Callable

from proofs.framework.stolen_time import PERIOD_S, watch_stolen_time
from tests.support.machine.patience import PATIENCE_S


def _wait(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s


def test_there_is_a_bystander_on_every_processor_and_each_looks_at_the_clock() -> None:
    with watch_stolen_time() as stolen:
        assert len(stolen.bystanders) == len(os.sched_getaffinity(0))
        assert all(one.has_begun for one in stolen.bystanders)


def test_time_that_a_processor_is_losing_is_told_before_it_comes_back() -> None:
    with watch_stolen_time() as stolen:
        before, held = stolen.now(), stolen.bystanders[0]
        held.process.send_signal(signal.SIGSTOP)
        _wait(lambda: stolen.since(before) > 20 * PERIOD_S)
        told = bytes(held.record)
        _wait(lambda: held.lost_s() - before[0] > 40 * PERIOD_S)
        assert bytes(held.record) == told


def test_time_that_a_processor_has_lost_is_not_forgotten_when_it_comes_back() -> None:
    with watch_stolen_time() as stolen:
        before, held = stolen.now(), stolen.bystanders[0]
        held.process.send_signal(signal.SIGSTOP)
        _wait(lambda: stolen.now()[0] - before[0] > 20 * PERIOD_S)
        lost_s = stolen.now()[0] - before[0]
        held.process.send_signal(signal.SIGCONT)
        last_told = bytes(held.record)
        _wait(lambda: bytes(held.record) != last_told)
        assert stolen.now()[0] - before[0] >= lost_s


def test_bystanders_end_with_the_block() -> None:
    with watch_stolen_time() as stolen:
        processes = [one.process for one in stolen.bystanders]
    assert all(process.returncode is not None for process in processes)
