"""The framework of all proofs: sections by a decorator, figures beside the bounds they must keep, one runner.

    @section("overload")
    def overload(proof: Proof) -> None:
        ...
        proof.at_most("reject_p99_ms", milliseconds, 50)

    if __name__ == "__main__":
        sys.exit(run("server", paths=("src/quire/api",)))

A proof prints a table on stderr; its last line on stdout is one JSON object whose values are numbers or true/false; its
exit code is 1 if a bound does not hold or a section broke off. `--only` takes words of section titles. A full run is
written to `proofs/results/` with the paths that it speaks of, the commit, the machine and the versions.
"""

import argparse
import asyncio
import inspect
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeVar

from benchmarks.record import PROOF_RESULTS, circumstances, say
from proofs.framework.builds import commits_of
from tests.support.machine.process_memory import give_back_memory

Figure = int | float | bool
Prove = Callable[["Proof"], Coroutine[Any, Any, None] | None]
Number = TypeVar("Number", int, float)
REPORTED = "reported"
"""The bound of a figure that is held to none."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a proof that runs, and fails, by itself."""

    title: str
    prove: Prove


def section(title: str) -> Callable[[Prove], Section]:
    """Make a function, plain or asynchronous, a section of the proof whose module it stands in."""
    if "," in title:
        raise ValueError(f"{title!r}: --only has commas between words of titles")
    return lambda prove: Section(title, prove)


def sections_of(module: ModuleType) -> list[Section]:
    """The sections that a module defines, in their order; those it imported are of another."""
    found = [one for one in vars(module).values() if isinstance(one, Section)]
    return [one for one in found if one.prove.__module__ == module.__name__]


@dataclass
class Proof:
    """Collects figures and judges them."""

    name: str
    scale: str
    folder: Path
    """Of this run alone, and gone with it."""
    only: tuple[str, ...] = ()
    """Sections to run, by a word of their titles; none runs all. A full run of some is merged into the record."""
    paths: tuple[str, ...] = ()
    """The code that the record speaks of: where it has changed since, the record is of an older build."""
    random: Random = field(default_factory=lambda: Random(SystemRandom().getrandbits(64)))
    """Other dice in every run."""
    figures: dict[str, Figure] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    bounds: dict[str, str] = field(default_factory=dict)
    """What figures are held to, in words."""
    seconds: dict[str, float] = field(default_factory=dict)
    before: dict[str, Any] | None = None
    """The record as this run found it."""

    def __post_init__(self) -> None:
        path = self._path
        self.before = json.loads(path.read_text()) if path.exists() else None

    @property
    def is_full(self) -> bool:
        return self.scale == "full"

    def sized(self, *, quick: Number, full: Number) -> Number:
        """A size or a bound that differs between the scales."""
        return full if self.is_full else quick

    # -- figures and bounds; `note` says what the words of the bound do not --------------------------------------------

    def at_most(self, key: str, value: Figure, bound: float, note: str = "") -> None:
        """A figure that must not be above its bound."""
        self._judge(key, value, f"at most {_worded(bound)}", note, holds=value <= bound)

    def at_least(self, key: str, value: Figure, bound: float, note: str = "") -> None:
        """A figure that must not be below its bound."""
        self._judge(key, value, f"at least {_worded(bound)}", note, holds=value >= bound)

    def equals(self, key: str, value: Figure, expected: float, note: str = "") -> None:
        """A figure that must be exactly this."""
        self._judge(key, value, _worded(expected), note, holds=value == expected)

    def none(self, key: str, found: Iterable[object], note: str = "") -> None:
        """How many were found of what must not be there; the first ones are shown."""
        listed = list(found)
        for one in listed[:20]:
            say(f"    {one}")
        self.equals(key, len(listed), 0, note)

    def holds(self, key: str, condition: bool, words: str) -> None:
        """What is so or is not: for bounds that are no number."""
        self._judge(key, condition, words, "", holds=condition)

    def judge(self, key: str, value: Figure, words: str, *, holds: bool) -> None:
        """A figure whose bound was applied elsewhere: `words` say what it is."""
        self._judge(key, value, words, "", holds=holds)

    def report(self, key: str, value: Figure, note: str = "") -> None:
        """A figure that is held to nothing."""
        self._judge(key, value, REPORTED, note, holds=True)

    def _judge(self, key: str, value: Figure, words: str, note: str, *, holds: bool) -> None:
        if key in self.figures:
            raise ValueError(f"the key {key!r} was reported before")
        if not isinstance(value, int | float):
            raise TypeError(f"{key} is {value!r}, which is no number and neither true nor false")
        self.figures[key] = round(value, 6) if isinstance(value, float) else value
        told = f"{words}: {note}" if note else words
        if words != REPORTED:
            self.bounds[key] = told
        if not holds or math.isnan(value):
            self.broken.append(key)
        say(f"  {key:28} {self.figures[key]!s:>16}   {told:40} {'BROKEN' if key in self.broken else 'ok'}")

    # -- running -------------------------------------------------------------------------------------------------------

    def chosen(self, sections: Sequence[Section]) -> list[Section]:
        """Those that `only` names."""
        return [one for one in sections if not self.only or any(word in one.title for word in self.only)]

    def run(self, sections: Sequence[Section]) -> int:
        """Run the chosen sections, print the JSON line, and return the exit code."""
        for one in self.chosen(sections):
            self._run_section(one)
            self._write()  # after every section, because a long run may be cut off
        if self.broken:
            say(f"broken: {', '.join(self.broken)}")
        print(json.dumps(self.figures), flush=True)
        return 1 if self.broken else 0

    def _run_section(self, one: Section) -> None:
        say(f"{one.title} ...")
        start = time.perf_counter()
        try:
            proving = one.prove(self)
            if inspect.iscoroutine(proving):
                asyncio.run(proving)
        except Exception:  # a crash loses this section and no other
            traceback.print_exc()
            self.broken.append(_broke_off(one.title))
        give_back_memory()  # gigabytes perhaps, which the next one's budget would lack
        self.seconds[one.title] = round(time.perf_counter() - start, 1)
        say(f"  ({self.seconds[one.title]} s)")

    # -- the record ----------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return PROOF_RESULTS / f"proof-{self.name}.json"

    def _write(self) -> None:
        if self.is_full:
            PROOF_RESULTS.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self.record(), indent=2) + "\n")

    def record(self) -> dict[str, object]:
        """This run; where it ran some sections only, also what the record has of the others. Each has its commit."""
        record: dict[str, Any] = {
            "proof": self.name,
            "scale": self.scale,
            "paths": list(self.paths),
            "figures": self.figures,
            "broken": self.broken,
            "bounds": self.bounds,
            "seconds": self.seconds,
            **circumstances(),
        }
        record["commits"] = dict.fromkeys(self.seconds, record["commit"])
        if not self.only or self.before is None:
            return record
        before = self.before
        for key in ("figures", "bounds", "seconds"):
            record[key] = before.get(key, {}) | record[key]
        record["commits"] = commits_of(before) | record["commits"]
        done_again = {*self.figures, *map(_broke_off, self.seconds)}
        record["broken"] = [key for key in before["broken"] if key not in done_again] + self.broken
        return record


def _worded(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:,.6g}"


def _broke_off(title: str) -> str:
    return f"{title}: broke off"


def run(name: str, *parts: ModuleType | Section, paths: tuple[str, ...]) -> int:
    """Run the proof of this name, which speaks of the code in `paths`: these sections and those of these modules, or
    of the module that was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that a section started are stopped on the way out
    parser = argparse.ArgumentParser(description=f"The proof of {name}.")
    parser.add_argument("--scale", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", default="", help="words of section titles, with commas between; default: all")
    given = parser.parse_args()
    sections: list[Section] = []
    for part in parts or (sys.modules["__main__"],):
        sections += [part] if isinstance(part, Section) else sections_of(part)
    with TemporaryDirectory(prefix=f"quire-proof-{name}-") as folder:
        proof = Proof(name, given.scale, Path(folder), tuple(word for word in given.only.split(",") if word), paths)
        if not proof.chosen(sections):
            parser.error(f"no title has one of these words: {given.only}; there are {[one.title for one in sections]}")
        return proof.run(sections)
