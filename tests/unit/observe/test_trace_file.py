"""A trace's file is its owner's alone and bounded, and whatever happens to the disk is no business of who writes."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.observe import trace_file
from quire.observe.trace_file import TraceFile, make_trace_file
from tests.support.errors import raises_code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    make_trace_file(path)
    return path


def test_it_is_made_for_its_owner_alone_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_trace_file(tmp_path / "trace.jsonl")
    finally:
        os.umask(before)
    assert (tmp_path / "trace.jsonl").stat().st_mode & 0o777 == 0o600


def test_no_file_is_written_over(path: Path) -> None:
    with raises_code(ConfigError, "trace_exists"):
        make_trace_file(path)


def test_no_link_is_followed_to_a_file_that_is_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with raises_code(ConfigError, "trace_exists"):
        make_trace_file(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with raises_code(ConfigError, "cannot_create_trace"):
        make_trace_file(tmp_path / "none" / "trace.jsonl")


def _others_may_read(path: Path) -> None:
    path.chmod(0o644)


def _is_a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def _is_gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("changed", "code"),
    [(_others_may_read, "invalid_config"), (_is_a_link, "cannot_open_trace"), (_is_gone, "cannot_open_trace")],
)
def test_a_file_that_is_not_what_was_made_is_refused(path: Path, changed: Callable[[Path], None], code: str) -> None:
    changed(path)
    with raises_code(ConfigError, code):
        TraceFile(path, 1 << 20)


def test_lines_come_in_their_order_and_the_next_life_begins_a_line(path: Path) -> None:
    for life in range(2):
        file = TraceFile(path, 1 << 20)
        for number in range(100):
            file.put(b"%d %d\n" % (life, number))
        file.put(b"cut")
        file.close()
    lines = path.read_text().split("\n")
    assert lines[:100] == [f"0 {number}" for number in range(100)]
    assert lines[100] == "cut"
    assert lines[101:201] == [f"1 {number}" for number in range(100)]


def test_a_full_file_ends_with_a_line_that_says_so_and_never_grows_beyond_its_bound(path: Path) -> None:
    for _ in range(5):
        file = TraceFile(path, 2000)
        for _ in range(300):
            file.put(b"x" * 99 + b"\n")
        file.close()
        assert file.end_reason is not None
        assert path.stat().st_size <= 2000
    assert path.read_text().splitlines()[-1] == (
        '{"is": "ended", "why": "the file has reached its limit of 2,000 bytes; raise trace_max_bytes"}'
    )


def test_a_full_disk_ends_the_trace_and_nothing_else(path: Path) -> None:
    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = TraceFile(path, 1 << 20, full)
    file.put(b"a line\n")
    file.close()
    file.put(b"another\n")
    assert file.end_reason == "cannot write to it: No space left on device"


def test_a_disk_that_does_not_keep_up_ends_the_trace_and_nobody_waits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "MAX_PENDING_BYTES", 1000)
    goes_on = threading.Event()

    def slow(descriptor: int, data: bytes) -> int:
        goes_on.wait()
        return os.write(descriptor, data)

    file = TraceFile(path, 1 << 20, slow)
    for _ in range(200):
        file.put(b"x" * 9 + b"\n")
    goes_on.set()
    file.close()
    assert file.end_reason == "the disk is too slow"
    assert path.read_text().endswith('{"is": "ended", "why": "the disk is too slow"}\n')


def test_what_a_disk_takes_in_parts_is_written_whole(path: Path) -> None:
    file = TraceFile(path, 1 << 20, lambda descriptor, data: os.write(descriptor, data[:7]))
    file.put(b"a line of more than seven bytes\n")
    file.close()
    assert path.read_text() == "a line of more than seven bytes\n"
