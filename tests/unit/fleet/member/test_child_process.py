"""A member that somebody looks after: heard each second, replaced when it is gone or silent, drained at its end."""

import os
import signal
import sys
from pathlib import Path
from time import monotonic

import pytest

from quire.core.scheduling.waiting_queue import QueueConfig
from quire.errors import ConfigError, EngineDeadError, MessageError
from quire.fleet.member.child_process import MAX_SILENT_S, WatchedMember
from quire.fleet.member.replicas import ReplicaSpec
from quire.fleet.member.status import MemberStatus, decode_status, encode_status, write_status, write_status_file
from quire.fleet.protocol.keys import make_keys, read_member_keys
from quire.worker.messages import Open
from tests.support.errors import raises_code
from tests.support.fleet.oracle_replica import COMMAND
from tests.support.fleet.small_fleets import LOCAL, oracle_words
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import SETTINGS


def order(folder: Path, model: str = "") -> ReplicaSpec:
    size = talker(template=TEMPLATE).text.vocabulary_size
    opened = Open(model or str(size), SETTINGS, QueueConfig(), bytes(32))
    keys = read_member_keys(make_keys(folder / "keys")[0])
    return ReplicaSpec("oracle", LOCAL, opened, oracle_words(), 30.0, 30.0, keys)


def test_a_member_says_where_it_is_and_how_busy_until_it_is_let_go(tmp_path: Path) -> None:
    member = WatchedMember(order(tmp_path), COMMAND)
    assert member.problem() == "it was not started"
    status = member.start()
    try:
        assert status.address.startswith("tcp://127.0.0.1:")
        assert not status.address.endswith("*")
        assert (status.state, status.num_running, status.num_uncomputed_tokens) == ("ready", 0, 0)
        assert member.problem() == ""
        assert "got none for" in member.problem(monotonic() + MAX_SILENT_S + 1)
    finally:
        member.end()
    assert member.problem() == "it exited with code 0"
    member.end()


def test_a_member_that_was_killed_is_a_problem(tmp_path: Path) -> None:
    member = WatchedMember(order(tmp_path), COMMAND)
    member.start()
    assert member.pid is not None
    os.kill(member.pid, signal.SIGKILL)
    until_s = monotonic() + PATIENCE_S
    while not member.problem():
        assert monotonic() < until_s
    assert "code -9" in member.problem()
    member.end()


def test_a_member_that_cannot_load_is_told_when_it_ends(tmp_path: Path) -> None:
    with raises_code(EngineDeadError, "engine_dead"):
        WatchedMember(order(tmp_path, model="no number"), COMMAND).start()


def test_whatever_else_a_member_prints_is_no_status(tmp_path: Path) -> None:
    told = encode_status(MemberStatus("tcp://127.0.0.1:1", "ready", 1, 2, 3)).decode().strip()
    script = f"import sys; sys.stdin.buffer.read(8); print('hello'); print({told!r}, flush=True); sys.stdin.read()"
    member = WatchedMember(order(tmp_path), (sys.executable, "-c", script))
    assert member.start() == MemberStatus("tcp://127.0.0.1:1", "ready", 1, 2, 3)
    member.end()


def test_a_status_is_written_at_once_or_not_at_all() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    status = MemberStatus("tcp://127.0.0.1:1", "ready")
    for _ in range(10_000):
        write_status(writing, status)
    lines = os.read(reading, 1 << 20).splitlines()
    assert {decode_status(line) for line in lines} == {status}
    os.close(reading)
    write_status(writing, status)
    os.close(writing)
    with raises_code(MessageError, "malformed_message"):
        write_status(-1, MemberStatus("a" * 5000, "ready"))


def test_a_status_file_always_holds_one_whole_status(tmp_path: Path) -> None:
    for number in range(3):
        write_status_file(tmp_path / "status", MemberStatus("tcp://127.0.0.1:1", "ready", number))
        assert decode_status((tmp_path / "status").read_bytes()).num_running == number
    assert [file.name for file in tmp_path.iterdir()] == ["status"]
    with raises_code(ConfigError, "invalid_config"):
        write_status_file(tmp_path / "nowhere" / "status", MemberStatus("tcp://127.0.0.1:1", "ready"))


@pytest.mark.parametrize(
    "line", [b"", b"hello", b'{"address": 1}', b'{"address": "a", "state": "b", "num_running": -1}']
)
def test_what_is_no_status_is_refused(line: bytes) -> None:
    with raises_code(MessageError, "malformed_message"):
        decode_status(line)
