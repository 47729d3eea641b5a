"""The framework of all proofs: sections by a decorator, figures with the bounds they must keep, and one runner.

    @section("overload")
    def overload(proof: Proof) -> None:
        ...
        proof.at_most("reject_p99_ms", milliseconds, 50)

    if __name__ == "__main__":
        sys.exit(run("server", paths=("src/quire/api",)))

A proof prints a table on stderr; its last line on stdout is one JSON object whose values are numbers or true/false; its
exit code is 1 if a bound does not hold or a section raises. `--only` takes words of section titles. A full run is
written to `proofs/results/` with the paths of code that it covers, the commit, the machine and the versions.
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
"""What stands for the bound of a figure that has none."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a proof. If one raises, the others still run."""

    title: str
    prove: Prove


def section(title: str) -> Callable[[Prove], Section]:
    """Make a function, plain or asynchronous, a section of the proof of its module."""
    if "," in title:
        raise ValueError(f"expected a title without commas: they separate words of --only, got {title!r}")
    return lambda prove: Section(title, prove)


def sections_of(module: ModuleType) -> list[Section]:
    """The sections that a module defines, in their order, without those it imports."""
    sections = [value for value in vars(module).values() if isinstance(value, Section)]
    return [one for one in sections if one.prove.__module__ == module.__name__]


@dataclass
class Proof:
    """One run of a proof: collects figures, judges them by their bounds, and writes the record."""

    name: str
    scale: str
    folder: Path
    """A temporary folder of this run, deleted at its end."""
    only: tuple[str, ...] = ()
    """Words of titles of sections to run; empty: all. A full run of some sections is merged into the record."""
    paths: tuple[str, ...] = ()
    """The code that the record covers; once it changes, the record is of an older build."""
    random: Random = field(default_factory=lambda: Random(SystemRandom().getrandbits(64)))
    """Seeded anew in every run."""
    figures: dict[str, Figure] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    bounds: dict[str, str] = field(default_factory=dict)
    """The bound of each figure, in words."""
    seconds: dict[str, float] = field(default_factory=dict)
    before: dict[str, Any] | None = None
    """The record of earlier runs; None: there is none."""

    def __post_init__(self) -> None:
        path = self._path
        self.before = json.loads(path.read_text()) if path.exists() else None

    @property
    def is_full(self) -> bool:
        return self.scale == "full"

    def sized(self, *, quick: Number, full: Number) -> Number:
        """A size or a bound that differs between the scales."""
        return full if self.is_full else quick

    # -- figures and bounds; `note` is printed and recorded after the words of a bound ---------------------------------

    def at_most(self, key: str, value: Figure, bound: float, note: str = "") -> None:
        """A figure that must not be above its bound."""
        self._judge(key, value, f"at most {_words_of(bound)}", note, holds=value <= bound)

    def at_least(self, key: str, value: Figure, bound: float, note: str = "") -> None:
        """A figure that must not be below its bound."""
        self._judge(key, value, f"at least {_words_of(bound)}", note, holds=value >= bound)

    def equals(self, key: str, value: Figure, expected: float, note: str = "") -> None:
        """A figure that must be exactly this."""
        self._judge(key, value, _words_of(expected), note, holds=value == expected)

    def none(self, key: str, faults: Iterable[object], note: str = "") -> None:
        """The number of faults, which must be 0; the first 20 are printed."""
        all_faults = list(faults)
        for fault in all_faults[:20]:
            say(f"    {fault}")
        self.equals(key, len(all_faults), 0, note)

    def holds(self, key: str, condition: bool, words: str) -> None:
        """A condition that must be true, for bounds that are no number."""
        self._judge(key, condition, words, "", holds=condition)

    def judge(self, key: str, value: Figure, words: str, *, holds: bool) -> None:
        """A figure that the caller has compared with its bound; `words` say what the bound is."""
        self._judge(key, value, words, "", holds=holds)

    def report(self, key: str, value: Figure, note: str = "") -> None:
        """A figure without a bound."""
        self._judge(key, value, REPORTED, note, holds=True)

    def _judge(self, key: str, value: Figure, words: str, note: str, *, holds: bool) -> None:
        if key in self.figures:
            raise ValueError(f"the key {key!r} was reported before")
        if not isinstance(value, int | float):
            raise TypeError(f"expected a number, true or false for {key}, got {value!r}")
        self.figures[key] = round(value, 6) if isinstance(value, float) else value
        bound = f"{words}: {note}" if note else words
        if words != REPORTED:
            self.bounds[key] = bound
        if not holds or math.isnan(value):
            self.broken.append(key)
        say(f"  {key:28} {self.figures[key]!s:>16}   {bound:40} {'BROKEN' if key in self.broken else 'ok'}")

    # -- running -------------------------------------------------------------------------------------------------------

    def selection(self, sections: Sequence[Section]) -> list[Section]:
        """The sections that `only` names; all, if it is empty."""
        return [one for one in sections if not self.only or any(word in one.title for word in self.only)]

    def run(self, sections: Sequence[Section]) -> int:
        """Run the selected sections, print the JSON line, and return the exit code."""
        for selected in self.selection(sections):
            self._run_section(selected)
            self._write()  # after every section, because a long run may be killed
        if self.broken:
            say(f"broken: {', '.join(self.broken)}")
        print(json.dumps(self.figures), flush=True)
        return 1 if self.broken else 0

    def _run_section(self, part: Section) -> None:
        say(f"{part.title} ...")
        start = time.perf_counter()
        try:
            result = part.prove(self)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception:  # a crash loses this section and no other
            traceback.print_exc()
            self.broken.append(_crash_key(part.title))
        give_back_memory()  # perhaps gigabytes, which the next section's memory budget would lack
        self.seconds[part.title] = round(time.perf_counter() - start, 1)
        say(f"  ({self.seconds[part.title]} s)")

    # -- the record ----------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return PROOF_RESULTS / f"proof-{self.name}.json"

    def _write(self) -> None:
        if self.is_full:
            PROOF_RESULTS.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self.record(), indent=2) + "\n")

    def record(self) -> dict[str, object]:
        """This run, merged into the earlier record if only some sections ran; each section has its commit."""
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
        new_keys = {*self.figures, *map(_crash_key, self.seconds)}
        record["broken"] = [key for key in before["broken"] if key not in new_keys] + self.broken
        return record


def _words_of(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:,.6g}"


def _crash_key(title: str) -> str:
    return f"{title}: broke off"


def run(name: str, *parts: ModuleType | Section, paths: tuple[str, ...]) -> int:
    """Run the proof of this name, which covers the code under `paths`. `parts` are sections, and modules with sections;
    without any, the sections of the module that was started run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops servers that a section started
    parser = argparse.ArgumentParser(description=f"The proof of {name}.")
    parser.add_argument("--scale", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", default="", help="words of titles of sections to run, with commas between them")
    options = parser.parse_args()
    sections: list[Section] = []
    for part in parts or (sys.modules["__main__"],):
        sections += [part] if isinstance(part, Section) else sections_of(part)
    with TemporaryDirectory(prefix=f"quire-proof-{name}-") as folder:
        proof = Proof(name, options.scale, Path(folder), tuple(filter(None, options.only.split(","))), paths)
        if not proof.selection(sections):
            parser.error(f"expected words of {[one.title for one in sections]}, got {options.only}")
        return proof.run(sections)
