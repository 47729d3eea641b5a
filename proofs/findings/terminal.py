"""Sections `idle terminal` and `glued lines`: what commands leave on a terminal, seen through a small one of our own.

Real commands in a pty (`tests/support/machine/terminal_screen.py`), 80 and 110 columns wide, two at a time: `serve` and
`run` of a tiny model, `serve` of three, `chat` with a line typed while it loads, `launch` with a script as its agent,
and Ctrl-C once the worker is spawned. A line is glued if something begins in the middle of it, or if text stands behind
a bar.
"""

import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random

from benchmarks.record import ROOT, say
from benchmarks.test_model import smollm2_file
from proofs.framework.proof import Proof, section
from tests.support.machine.terminal_screen import BAR, Terminal, is_glued, terminal
from tests.support.models.tiny_models import Tiny, write_gguf

PATIENCE_S = 240.0
TINY = Tiny(hidden=128, intermediate=128, num_layers=2, metadata={"llama.context_length": 512})
NAMES = ("tiny", "second", "third")
READY = ("listening on http://", "try: curl ", "chat in a browser: ")
WIDTHS = (80, 110)
LONGEST_WAIT_S = 1.5
"""Until Ctrl-C, from when there is a worker."""


@dataclass(frozen=True, slots=True)
class Left:
    """What one start left on its terminal."""

    kind: str
    num_glued: int
    num_bars: int
    """That stand there though nothing is loaded any more."""
    num_lost: int
    """Lines that a person needs and cannot read."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Commands of one folder, in which the models lie."""

    folder: Path
    models: tuple[Path, ...]
    dice: Random

    def environment(self, name: str) -> Mapping[str, str]:
        """Nothing of this user's; a runtime folder for each start."""
        program = self.folder / "bin" / "aider"
        if not program.exists():
            program.parent.mkdir(exist_ok=True)
            program.write_text("#!/bin/sh\necho the agent is here\n")
            program.chmod(stat.S_IRWXU)
        return {
            **os.environ,
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_RUNTIME_DIR": str(self.folder / name),
            "XDG_CONFIG_HOME": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "QUIRE_MEMORY": "2GiB",
        }

    def words(self, kind: str) -> list[str]:
        """What is typed."""
        model, port = str(self.models[0]), ["--port", "0"]
        typed = {
            "serve": ["serve", model, *port],
            "interrupted": ["serve", model, *port],
            "run": ["run", model, "--no-browser", *port],
            "three models": ["serve", *map(str, self.models), *port],
            "chat": ["chat", model, "--temperature", "0", "--max-tokens", "4"],
            "launch": ["launch", "aider", "--model", model],
        }
        return [sys.executable, "-m", "quire", *typed[kind]]

    def start(self, number: int, kind: str, width: int) -> Left:
        """One, from its first byte to its end."""
        name = f"run{number}"
        try:
            with terminal(self.words(kind), self.environment(name), width) as seen:
                num_bars = LIVES[kind](seen, self.dice.uniform(0, LONGEST_WAIT_S))
                seen.end()
                lines = seen.screen.lines()
        finally:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        glued = [line for line in lines if is_glued(line)]
        needed = NEEDED[kind]
        lost = [words for words in needed if not any(line.startswith(words) for line in lines)]
        for line in [*glued, *(lines if lost else [])]:
            say(f"  {kind}, {width} columns: {line[:200]}")
        return Left(kind, len(glued), num_bars + sum(bool(BAR.search(line)) for line in lines), len(lost))


def _served(seen: Terminal, _wait_s: float) -> int:
    """Until it is ready, and then Ctrl-C; the bars that still stand when it is ready."""
    seen.until(lambda one: one.shows(READY[-1]) or one.process.poll() is not None, PATIENCE_S)
    num_bars = sum(bool(BAR.search(line)) for line in seen.screen.lines())
    seen.type("\x03")
    return num_bars


def _interrupted(seen: Terminal, wait_s: float) -> int:
    """Ctrl-C once there is a worker, sooner or later."""
    children = Path(f"/proc/{seen.process.pid}/task/{seen.process.pid}/children")
    seen.until(lambda one: one.process.poll() is not None or bool(children.read_text()), PATIENCE_S)
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        seen.read(0.02)
    seen.type("\x03")
    return 0


def _talked(seen: Terminal, wait_s: float) -> int:
    """A line typed while it loads, and Ctrl-D once it is answered."""
    seen.until(lambda one: bool(one.num_bytes), PATIENCE_S)
    seen.type("Tell me about lighthouses.\n")
    seen.until(lambda one: one.shows(" tokens/s") or one.shows("error: "), PATIENCE_S)
    seen.type("\x04")
    return 0


def _watched(seen: Terminal, _wait_s: float) -> int:
    """It ends by itself."""
    return 0


LIVES: dict[str, Callable[[Terminal, float], int]] = {
    "serve": _served,
    "run": _served,
    "three models": _served,
    "interrupted": _interrupted,
    "chat": _talked,
    "launch": _watched,
}
NEEDED: dict[str, tuple[str, ...]] = {
    "serve": READY,
    "run": READY,
    "three models": READY,
    "interrupted": (),
    "chat": ("type a message; ", "> Tell me about lighthouses."),
    "launch": ("starting a server for ", "the agent is here"),
}
MIX = ("serve", "interrupted", "chat", "run", "interrupted", "serve", "launch", "interrupted", "run", "three models")


@section("idle terminal")
def prove_idle(proof: Proof) -> None:
    starts = Starts(proof.folder, (write_gguf(proof.folder / "tiny.gguf", TINY),), proof.random)
    with terminal(starts.words("serve"), starts.environment("idle")) as seen:
        seen.until(lambda one: one.shows(READY[-1]), PATIENCE_S)
        before, deadline_s = seen.num_bytes, time.monotonic() + proof.sized(quick=20.0, full=60.0)
        while time.monotonic() < deadline_s:
            seen.read(0.2)
        proof.equals("idle_bytes", seen.num_bytes - before, 0)
        seen.type("\x03")
        proof.equals("idle_exit_code", seen.end(), 0)


@section("glued lines")
def prove_glued(proof: Proof) -> None:
    tiny = tuple(write_gguf(proof.folder / f"{name}.gguf", TINY) for name in NAMES)
    small = Starts(proof.folder, tiny, proof.random)
    large = Starts(proof.folder, (smollm2_file(),), proof.random)
    kinds = list(islice(cycle(MIX), proof.sized(quick=10, full=200)))
    with ThreadPoolExecutor(2) as pool:
        left = list(pool.map(small.start, *_numbered(kinds, 0)))
        left += pool.map(large.start, *_numbered(["serve", "chat"] * proof.sized(quick=1, full=5), len(kinds)))
    for kind in sorted({one.kind for one in left}):
        proof.report(f"starts_{kind.replace(' ', '_')}", sum(one.kind == kind for one in left))
    proof.equals("lines_glued", sum(one.num_glued for one in left), 0)
    proof.equals("bars_left", sum(one.num_bars for one in left), 0)
    proof.equals("lines_lost", sum(one.num_lost for one in left), 0, "the address, how to try it, the typed line")


def _numbered(kinds: list[str], first: int) -> Iterator[list[int] | list[str]]:
    """Numbers, kinds and widths, beside each other."""
    yield list(range(first, first + len(kinds)))
    yield kinds
    yield [WIDTHS[number // len(set(kinds)) % 2] for number in range(len(kinds))]
