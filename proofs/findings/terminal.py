"""Sections `idle terminal` and `glued lines`: what commands leave on a terminal, read with a small terminal emulator.

Real commands in a pty (`tests/support/machine/terminal_screen.py`), 80 and 110 columns wide, two at a time: `serve` and
`run` of a tiny model, `serve` of three, `chat` with a line typed while it loads, `launch` with a script as its agent,
and Ctrl-C once the worker is spawned. A line is *glued* if a second message begins in the middle of it, or if text
follows a progress bar.
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
"""Time from the start of the worker to Ctrl-C, at most."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Defects in what one start of a command left on its terminal."""

    kind: str
    num_glued: int
    num_bars: int
    """Progress bars that are still shown although loading is over."""
    num_lost: int
    """Lines that a person needs, and that are missing."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Starts commands with the models of one folder."""

    folder: Path
    models: tuple[Path, ...]
    dice: Random

    def environment(self, name: str) -> Mapping[str, str]:
        """Environment variables without this user's settings, and with a runtime folder for each start."""
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
        """The command line of each kind of start."""
        model, port = str(self.models[0]), ["--port", "0"]
        arguments = {
            "serve": ["serve", model, *port],
            "interrupted": ["serve", model, *port],
            "run": ["run", model, "--no-browser", *port],
            "three models": ["serve", *map(str, self.models), *port],
            "chat": ["chat", model, "--temperature", "0", "--max-tokens", "4"],
            "launch": ["launch", "aider", "--model", model],
        }
        return [sys.executable, "-m", "quire", *arguments[kind]]

    def start(self, number: int, kind: str, width: int) -> Leftovers:
        """Run one command from its first byte to its end."""
        name = f"run{number}"
        try:
            with terminal(self.words(kind), self.environment(name), width) as term:
                num_bars = SCRIPTS[kind](term, self.dice.uniform(0, LONGEST_WAIT_S))
                term.end()
                lines = term.screen.lines()
        finally:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        glued = [line for line in lines if is_glued(line)]
        lost = [words for words in NEEDED_LINES[kind] if not any(line.startswith(words) for line in lines)]
        for line in [*glued, *(lines if lost else [])]:
            say(f"  {kind}, {width} columns: {line[:200]}")
        return Leftovers(kind, len(glued), num_bars + sum(bool(BAR.search(line)) for line in lines), len(lost))


def _serve(term: Terminal, _wait_s: float) -> int:
    """Wait until the server is ready, then press Ctrl-C; returns the number of bars shown when the server is ready."""
    term.until(lambda term: term.shows(READY[-1]) or term.process.poll() is not None, PATIENCE_S)
    num_bars = sum(bool(BAR.search(line)) for line in term.screen.lines())
    term.type("\x03")
    return num_bars


def _interrupt(term: Terminal, wait_s: float) -> int:
    """Press Ctrl-C some time after the worker was started."""
    children = Path(f"/proc/{term.process.pid}/task/{term.process.pid}/children")
    term.until(lambda term: term.process.poll() is not None or bool(children.read_text()), PATIENCE_S)
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        term.read(0.02)
    term.type("\x03")
    return 0


def _chat(term: Terminal, wait_s: float) -> int:
    """Type a line while the model loads, and press Ctrl-D at the next prompt: a Ctrl-D that is typed before the program
    reads from the terminal is no end of input for it, because readline changes the terminal's mode."""
    term.until(lambda term: bool(term.num_bytes), PATIENCE_S)
    term.type("Tell me about lighthouses.\n")
    term.until(lambda term: term.shows(" tokens/s") or term.shows("error: "), PATIENCE_S)
    term.until(lambda term: [line for line in term.screen.lines() if line][-1] == ">", PATIENCE_S)
    term.type("\x04")
    return 0


def _watch(term: Terminal, _wait_s: float) -> int:
    """Type nothing: the command ends by itself."""
    return 0


SCRIPTS: dict[str, Callable[[Terminal, float], int]] = {
    "serve": _serve,
    "run": _serve,
    "three models": _serve,
    "interrupted": _interrupt,
    "chat": _chat,
    "launch": _watch,
}
NEEDED_LINES: dict[str, tuple[str, ...]] = {
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
    with terminal(starts.words("serve"), starts.environment("idle")) as term:
        term.until(lambda term: term.shows(READY[-1]), PATIENCE_S)
        num_before, deadline_s = term.num_bytes, time.monotonic() + proof.sized(quick=20.0, full=60.0)
        while time.monotonic() < deadline_s:
            term.read(0.2)
        proof.equals("idle_bytes", term.num_bytes - num_before, 0)
        term.type("\x03")
        proof.equals("idle_exit_code", term.end(), 0)


@section("glued lines")
def prove_glued(proof: Proof) -> None:
    tiny = tuple(write_gguf(proof.folder / f"{name}.gguf", TINY) for name in NAMES)
    small = Starts(proof.folder, tiny, proof.random)
    large = Starts(proof.folder, (smollm2_file(),), proof.random)
    kinds = list(islice(cycle(MIX), proof.sized(quick=10, full=200)))
    with ThreadPoolExecutor(2) as pool:
        leftovers = list(pool.map(small.start, *_numbered(kinds, 0)))
        leftovers += pool.map(large.start, *_numbered(["serve", "chat"] * proof.sized(quick=1, full=5), len(kinds)))
    for kind in sorted({one.kind for one in leftovers}):
        proof.report(f"starts_{kind.replace(' ', '_')}", sum(one.kind == kind for one in leftovers))
    proof.equals("lines_glued", sum(one.num_glued for one in leftovers), 0)
    proof.equals("bars_left", sum(one.num_bars for one in leftovers), 0)
    proof.equals("lines_lost", sum(one.num_lost for one in leftovers), 0, "the address, how to try it, the typed line")


def _numbered(kinds: list[str], first: int) -> Iterator[list[int] | list[str]]:
    """Three lists of equal length: numbers, kinds and widths of the starts."""
    yield list(range(first, first + len(kinds)))
    yield kinds
    yield [WIDTHS[number // len(set(kinds)) % 2] for number in range(len(kinds))]
