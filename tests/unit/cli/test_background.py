"""Work that nobody waits for when the process ends, and signals in its first moment."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from quire.cli.shared.background import in_background, leave_background

ROOT = Path(__file__).parents[3]

_CONVERTING = """
import sys, threading
from pathlib import Path
from quire.checkpoints.cache import put_in_place
from quire.cli.shared.background import in_background, leave_background

begun = threading.Event()

def convert(tell):
    with put_in_place(Path(sys.argv[1]) / "converted" / "model") as folder:
        (folder / "half").write_text("half")
        begun.set()
        while True:
            tell("converting", 1, 2)

in_background(convert, lambda *_: None)
begun.wait()
print("leaving", end="")
leave_background(7)
print("not reached")
"""

_HANGING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from quire.cli.shared.background import in_background, leave_background

begun = threading.Event()

def hang(_tell):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (begun.set(), threading.Event().wait())).result()

in_background(hang, lambda *_: None)
begun.wait()
leave_background(3)
"""

_SIGTERM_WHILE_IMPORTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)
        return None

sys.meta_path.insert(0, Finder())
"""


def python(*words: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT / 'src'}"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120)


def test_a_result_and_an_error_reach_who_waits() -> None:
    told: list[tuple[str, int, int]] = []

    def work(tell: object) -> int:
        tell("x", 1, 2)  # type: ignore[operator]
        return 5

    broken = ValueError("broken")

    def fail(_tell: object) -> int:
        raise broken

    assert in_background(work, lambda *what: told.append(what)).result(60) == 5
    assert told == [("x", 1, 2)]
    assert in_background(fail, lambda *_: None).exception(60) is broken
    for thread in threading.enumerate():
        if thread.name == "quire-background":
            thread.join(60)
    leave_background(1)  # nobody is at work: it returns


def test_who_leaves_does_not_wait_for_a_download_that_hangs() -> None:
    assert python("-c", _HANGING).returncode == 3


def test_a_conversion_that_is_left_cleans_up(tmp_path: Path) -> None:
    done = python("-c", _CONVERTING, str(tmp_path))
    assert (done.returncode, done.stdout) == (7, "leaving")
    assert list((tmp_path / "converted").iterdir()) == []


def test_a_sigterm_while_libraries_are_imported_ends_it_as_it_would_any_process(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SIGTERM_WHILE_IMPORTING)
    assert python("-m", "quire", "--version", path=str(tmp_path)).returncode == -signal.SIGTERM


def test_who_had_sigterm_ignored_still_has(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"{_SIGTERM_WHILE_IMPORTING}\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    )
    assert python("-m", "quire", "--version", path=str(tmp_path)).returncode == 0
