"""What every proof shares: bounds beside figures, one JSON object as the last line, a record of where it was run.

A proof is a list of figures and the bounds they must keep. It talks on stderr; its last line on stdout is one JSON
object whose values are numbers or true/false; its exit code is 1 if a bound does not hold. A full run is written to
`benchmarks/results/` with the commit, the machine and the versions.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ABILITIES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""Instructions that decide what arithmetic costs; whoever uses other ones plays another game."""
VERSIONS = ("quire", "torch", "numpy", "transformers", "tokenizers", "aiohttp", "uvicorn", "uvloop", "hypothesis")
RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]

Figure = int | float | bool
REPORTED = "reported"
"""The bound of a figure that is held to none."""


@dataclass
class Proof:
    """Collects figures and judges them."""

    name: str
    scale: str
    figures: dict[str, Figure] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    bounds: dict[str, str] = field(default_factory=dict)
    """What figures are held to, in words."""
    seconds: dict[str, float] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    """Sections to run, by a word of their titles; none runs all. A full run of some is merged into the record."""
    before: dict[str, Any] | None = None
    """The record as this run found it."""

    def __post_init__(self) -> None:
        path = RESULTS / f"proof-{self.name}.json"
        self.before = json.loads(path.read_text()) if path.exists() else None

    @property
    def is_full(self) -> bool:
        return self.scale == "full"

    def sized(self, *, quick: int, full: int) -> int:
        return full if self.is_full else quick

    def report(self, key: str, value: Figure, bound: str = REPORTED, *, holds: bool = True) -> None:
        """State a figure beside its bound in words; `holds` says whether it is kept."""
        self.figures[key] = round(value, 6) if isinstance(value, float) else value
        if bound != REPORTED:
            self.bounds[key] = bound
        if not holds:
            self.broken.append(key)
        verdict = "ok" if holds else "BROKEN"
        say(f"  {key:28} {self.figures[key]!s:>16}   {bound:40} {verdict}")

    def run_sections(self, sections: Sequence[tuple[str, Callable[[], None]]]) -> None:
        for title, call in sections:
            if not self.only or any(word in title for word in self.only):
                try:
                    with self.section(title):
                        call()
                except Exception:  # what was found before is told all the same
                    traceback.print_exc()
                    self.broken.append(f"{title}: broke off")
                self._write()

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        say(f"{title} ...")
        start = time.perf_counter()
        yield
        self.seconds[title] = round(time.perf_counter() - start, 1)
        say(f"  ({self.seconds[title]} s)")

    def finish(self) -> int:
        """Write the record of a full run, print the JSON line, and return the exit code."""
        self._write()
        if self.broken:
            say(f"broken: {', '.join(self.broken)}")
        print(json.dumps(self.figures), flush=True)
        return 1 if self.broken else 0

    def _write(self) -> None:
        """After every section, because a long run may be cut off."""
        if self.is_full:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"proof-{self.name}.json").write_text(json.dumps(self._record(), indent=2) + "\n")

    def _record(self) -> dict[str, object]:
        """This run; where it ran some sections only, also what the record says of the others, and of which commit."""
        record: dict[str, Any] = {
            "proof": self.name,
            "scale": self.scale,
            "figures": self.figures,
            "broken": self.broken,
            "bounds": self.bounds,
            "seconds": self.seconds,
            **circumstances(),
        }
        if not self.only or self.before is None:
            return record
        before = self.before
        part = {"sections": list(before["seconds"]), "commit": before["commit"], "date": before["date"]}
        record["figures"] = before["figures"] | self.figures
        record["seconds"] = before["seconds"] | self.seconds
        record["bounds"] = before.get("bounds", {}) | self.bounds
        done_again = {*self.figures, *(f"{title}: broke off" for title in self.seconds)}
        record["broken"] = [key for key in before["broken"] if key not in done_again] + self.broken
        record["earlier_runs"] = [*before.get("earlier_runs", []), part]
        return record


def run(name: str, prove: Callable[[Proof], None]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that a section started are stopped on the way out
    parser = argparse.ArgumentParser(description=f"The proof of {name}.")
    parser.add_argument("--scale", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", default="", help="words of section titles, with commas between; default: all")
    given = parser.parse_args()
    proof = Proof(name, given.scale, only=tuple(word for word in given.only.split(",") if word))
    prove(proof)
    return proof.finish()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def circumstances() -> dict[str, object]:
    """Commit, machine and versions: without them a number means nothing."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src", "tests", "native", "benchmarks/*.py")),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {
            "processor": _cpu_line("model name") or platform.machine(),
            "abilities": [one for one in ABILITIES if one in _cpu_line("flags").split()],
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version(), **_versions(*VERSIONS)},
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _cpu_line(name: str) -> str:
    """What the system says of its processor under this name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}
