"""The worker's end of its socket."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.config import ModelSettings
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.engine import commands
from quire.errors import InvariantError
from quire.worker import messages
from quire.worker.child import process as worker
from quire.worker.child.process import Channel, Worker
from quire.worker.messages import Failed, Open
from tests.support.errors import raises_code
from tests.support.servers.talkers import talker


class Pair:
    """A worker's channel and a parent that reads when it likes."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self.parent, own = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for end in (self.parent, own):
            end.setsockopt(zmq.SNDHWM, 1)
            end.setsockopt(zmq.RCVHWM, 1)
        self.parent.bind(f"ipc://{folder / 'socket'}")
        own.connect(f"ipc://{folder / 'socket'}")
        self.channel = Channel(own)

    def read(self) -> str:
        self.channel.flush()
        while not self.parent.poll(1):
            self.channel.flush()
        told = messages.decode_to_parent(self.parent.recv())
        assert isinstance(told, Failed)
        return told.message

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one = Pair(tmp_path)
    yield one
    one.close()


def test_a_parent_that_reads_nothing_does_not_hold_up_the_worker_and_misses_nothing(pair: Pair) -> None:
    names = [f"r{at} {'x' * 500}" for at in range(2_000)]
    for name in names:
        pair.channel.send(Failed("", name))  # with a socket that waits for its reader this would never return
    assert [pair.read() for _ in names] == names


def test_a_parent_that_will_never_read_is_not_served_for_ever(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_BACKLOG_BYTES", 10_000)

    def talk() -> None:
        for _ in range(1_000_000):
            pair.channel.send(Failed("", "x" * 1_000))

    with raises_code(InvariantError, "invariant_broken"):
        talk()


def test_what_is_not_there_is_not_waited_for(pair: Pair) -> None:
    assert pair.channel.receive(0.0) is None
    pair.parent.send(messages.encode_message(commands.Cancel("r1")))
    assert pair.channel.receive(60.0) == commands.Cancel("r1")


class Named:
    """A status that can be looked at."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def record_request_ids(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids

    def clear_in_flight(self) -> None:
        self.request_ids = []

    def record_heartbeat(self) -> None:
        """It lives."""


def test_a_request_that_was_let_in_is_not_blamed_for_the_next_command(pair: Pair) -> None:
    status: Any = Named()
    host = Worker(talker().engine, pair.channel, status, None)
    host.note_requests(["r1"])
    assert status.request_ids == ["r1"]
    assert host.next_command(waits=False) is None
    assert status.request_ids == []


def test_a_worker_sets_aside_what_it_loaded_before_it_is_ready(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(worker, "freeze_startup_objects", lambda: told.append("set aside"))
    monkeypatch.setattr(pair.channel, "send", lambda message: told.append(type(message).__name__))
    pair.parent.send(messages.encode_message(commands.Close()))
    status: Any = Named()
    command = Open("64", ModelSettings(), QueueConfig(), b"key")
    assert worker._serve(command, lambda *_: talker().engine, pair.channel, status) == 0
    assert told == ["set aside", "Ready"]
