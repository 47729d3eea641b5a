"""`make compare BASE=COMMIT`: two builds of quire beside each other on this machine, in turns.

Each build is a wheel in an environment of its own, made from its commit with its commit's constraints. Nothing of
either is imported: what is run are its commands, with options that the `--help` texts of both list, and what is asked
goes over HTTP. One client asks both: `quire bench serve` of this tree. A row is new over old, above 1 where the new
build is quicker. A row that a build cannot run, because it lacks a command or an option, is named and not judged.

    --rows WORDS     only rows whose names have one of these words, with commas between
    --set NAME       with the kernels of this instruction set on both sides
    --save FILE      write the result (JSON), which also goes to stdout
"""

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir
from time import perf_counter
from typing import Any

from benchmarks.packaged_models import coder_file
from benchmarks.record import ROOT, circumstances, say
from benchmarks.rounds import RatioInterval, measured_ratios
from benchmarks.servers import Command, Running, started
from benchmarks.test_model import smollm2_file
from tests.support.models.tiny_models import Tiny, write_gguf

BUILDS = Path(gettempdir()) / "quire-compare"
"""Outside of the tree, whose tests read every page below it."""
TINY = Tiny(hidden=128, intermediate=128, num_layers=2, metadata={"llama.context_length": 512})
SERVE = ("--memory", "6GiB", "--max-model-len", "2048", "--speculation", "off")
NUM_ANSWERS, ANSWER_TOKENS = 50, 24
LEAST = 0.98
"""An interval that lies below it is a loss."""


class LacksError(Exception):
    """A build has no such command or option."""


@dataclass(frozen=True, slots=True)
class Build:
    """A commit, installed."""

    name: str
    commit: str
    program: Path

    def run(self, *words: str, timeout_s: float = 900.0) -> "subprocess.CompletedProcess[str]":
        """One of its commands."""
        return subprocess.run([str(self.program), *words], capture_output=True, text=True, timeout=timeout_s, cwd="/")

    def check(self, command: Sequence[str], words: Sequence[str]) -> None:
        """Its help lists every option of these."""
        text = help_of(self.program, tuple(command))
        if missing := [word for word in words if word.startswith("--") and f"{word} " not in text]:
            raise LacksError(f"{self.name} lacks {' '.join([*command, *missing])}")


@cache
def help_of(program: Path, command: tuple[str, ...]) -> str:
    ran = subprocess.run([str(program), *command, "--help"], capture_output=True, text=True, timeout=120)
    if ran.returncode:
        raise LacksError(f"there is no command quire {' '.join(command)}")
    return ran.stdout.replace(",", " ,") + " "


def built(name: str, revision: str) -> Build:
    """The commit of this name in an environment of its own; made once."""
    commit = _git("rev-parse", revision)
    folder = BUILDS / commit
    program = folder / "environment" / "bin" / "quire"
    if not program.exists():
        shutil.rmtree(folder, ignore_errors=True)
        source = folder / "source"
        with TemporaryFile() as archive:
            subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=archive, check=True)
            archive.seek(0)
            with tarfile.open(fileobj=archive) as files:
                files.extractall(source, filter="data")
        say(f"  {name}: building {commit[:10]} ...")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
        words = [
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--constraint",
            str(source / ".ci/constraints.txt"),
        ]
        subprocess.run([str(program.with_name("pip")), *words, str(source)], check=True, stdout=sys.stderr)
    return Build(name, commit, program)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


# -- loads -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server, and which figure of the answer counts."""

    name: str
    words: tuple[str, ...]
    figure: str
    is_lower_better: bool = False


def loads(requests: int, prompt: int, output: int) -> tuple[Load, ...]:
    """Of a real model."""
    streams = tuple(
        Load(
            f"tokens_{count}",
            ("--concurrency", str(count), "--requests", str(max(count, requests)), "--prompt-tokens", str(prompt),
             "--output-tokens", str(output)),
            "output_throughput",
        )
        for count in (1, 4, 16)
    )  # fmt: skip
    alone = ("--concurrency", "1", "--requests", "4", "--output-tokens", "2")
    shared = ("--workload", "shared", "--groups", "1", "--shared-tokens", "512", "--prompt-tokens", "16")
    return (
        *streams,
        Load("ttft_cold", (*alone, "--prompt-tokens", "512"), "median_ttft_ms", is_lower_better=True),
        Load("ttft_cached", (*alone, *shared, "--warmups", "2"), "median_ttft_ms", is_lower_better=True),
    )


TINY_LOADS = (
    Load(
        "requests_s",
        ("--concurrency", "8", "--requests", "400", "--prompt-tokens", "16", "--output-tokens", "1"),
        "request_throughput",
    ),
)


@contextmanager
def serving(build: Build, model: Path, *words: str) -> Iterator[Running]:
    build.check(["serve"], words)
    command = Command((str(build.program), "serve", str(model), "--port", "{port}", *words), ready_s=300.0)
    with started(command) as running:
        yield running


def asked(running: Running, load: Load, seed: str) -> float:
    """The figure of one run of a load, by this tree's client."""
    words = ["bench", "serve", "--url", running.url, "--seed", seed, *load.words]
    ran = subprocess.run([sys.executable, "-m", "quire", *words], capture_output=True, text=True, timeout=900, cwd=ROOT)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    return float(json.loads(ran.stdout.splitlines()[-1])[load.figure])


def answers_of(running: Running) -> list[str]:
    """Greedy answers to prompts that are the same for every build."""
    model = _asked(running, "GET", "/v1/models", None)["data"][0]["id"]
    fields = {"model": model, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    prompts = (f"Story {number}: once upon a time, in a house with {number} rooms," for number in range(NUM_ANSWERS))
    answers = (_asked(running, "POST", "/v1/completions", {**fields, "prompt": prompt}) for prompt in prompts)
    return [answer["choices"][0]["text"] for answer in answers]


def _asked(running: Running, method: str, path: str, fields: Mapping[str, Any] | None) -> Any:
    connection = HTTPConnection(running.url.partition("//")[2], timeout=300)
    try:
        body = None if fields is None else json.dumps(fields)
        connection.request(method, path, body, {"content-type": "application/json"})
        return json.load(connection.getresponse())
    finally:
        connection.close()


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Both builds, and what came of each row."""

    old: Build
    new: Build
    wanted: tuple[str, ...]
    forced: tuple[str, ...] = ()
    """Options of both servers."""
    dice: Random = field(default_factory=lambda: Random(SystemRandom().getrandbits(64)))
    seed: str = ""
    """Of this round's prompts: both builds get the same, and none gets them twice."""
    rows: dict[str, RatioInterval] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    unequal: dict[str, int] = field(default_factory=dict)
    """Of `NUM_ANSWERS` greedy answers for each model, how many differ."""

    def is_wanted(self, name: str) -> bool:
        return not self.wanted or any(word in name for word in self.wanted)

    def in_turns(self, names: Sequence[str], measure: Callable[[Build], Sequence[float]]) -> None:
        """Rounds of both builds; which is first is drawn. One value for each name, larger is better."""
        if not names:
            return

        def both() -> list[float]:
            self.seed = str(self.dice.getrandbits(32))
            found = {build.name: measure(build) for build in self.dice.sample([self.old, self.new], 2)}
            return [new / old for new, old in zip(found[self.new.name], found[self.old.name], strict=True)]

        try:
            measured = measured_ratios(both)
        except LacksError as lack:
            self.lacking |= dict.fromkeys(names, str(lack))
            return
        for name, ratios in zip(names, measured, strict=True):
            self.rows[name] = RatioInterval.of(ratios)
            say(f"  {name:28} {self._shown(name)} of {len(ratios)} rounds")

    def served(self, name: str, model: Path, all_loads: Sequence[Load], *words: str) -> None:
        """Both serve the model; loads are put on them in turns."""
        wanted = [load for load in all_loads if self.is_wanted(f"{name}_{load.name}")]
        names = [f"{name}_{load.name}" for load in wanted]
        compared = f"{name}_answers"
        try:
            with ExitStack() as stack:
                running = {
                    build.name: stack.enter_context(serving(build, model, *words, *self.forced))
                    for build in (self.old, self.new)
                }
                if self.is_wanted(compared):
                    answers = [answers_of(running[build.name]) for build in (self.old, self.new)]
                    self.unequal[compared] = sum(old != new for old, new in zip(*answers, strict=True))
                    say(f"  {compared:28} {self.unequal[compared]} of {NUM_ANSWERS} differ")

                def measure(build: Build) -> list[float]:
                    seed = str(self.dice.getrandbits(32))
                    values = [asked(running[build.name], load, seed) for load in wanted]
                    return [
                        1 / value if load.is_lower_better else value for load, value in zip(wanted, values, strict=True)
                    ]

                self.in_turns(names, measure)
        except LacksError as lack:
            self.lacking |= dict.fromkeys(names, str(lack))

    def command(self, name: str, command: Sequence[str], words: Sequence[str]) -> None:
        """How quick a command is, from its start to its end."""

        def measure(build: Build) -> list[float]:
            build.check(command, words)
            began_s = perf_counter()
            ran = build.run(*command, *words)
            if ran.returncode:
                raise RuntimeError(ran.stderr[-2000:])
            return [1 / (perf_counter() - began_s)]

        if self.is_wanted(name):
            self.in_turns([name], measure)

    def _shown(self, name: str) -> str:
        row = self.rows[name]
        return f"{row.median:.3f} ({row.low:.3f} to {row.high:.3f}){'' if self.holds(name) else ' SLOWER'}"

    def holds(self, name: str) -> bool:
        """The interval is not entirely below the bound."""
        return self.rows[name].is_within(at_most=None, at_least=LEAST)

    def record(self) -> Mapping[str, Any]:
        values = {
            f"{name}{end}": value
            for name, row in self.rows.items()
            for end, value in (("", row.median), ("_low", row.low), ("_high", row.high))
        }
        slower = [name for name in self.rows if not self.holds(name)]
        names = {"old": self.old.commit, "new": self.new.commit}
        found = {"figures": values, "slower": slower, "unequal": self.unequal, "lacking": self.lacking}
        return {**names, "options": self.forced, **found, **circumstances()}


def trace_of(build: Build, model: Path, folder: Path) -> Path:
    """A trace that this build's server wrote."""
    path = folder / "trace.jsonl"
    with serving(build, model, "--memory", "1GiB", "--trace", str(path)) as running:
        asked(running, TINY_LOADS[0], "7")
    return path


def compare(comparison: Comparison) -> None:
    with TemporaryDirectory(prefix="quire-compare-") as name:
        tiny = write_gguf(Path(name) / "tiny.gguf", TINY)
        comparison.served("tiny", tiny, TINY_LOADS, "--memory", "1GiB")
        comparison.served("smollm2", smollm2_file(), loads(8, 64, 64), *SERVE)
        comparison.served("coder", coder_file(), loads(4, 32, 16), *SERVE)
        comparison.command("sim_s", ("sim",), ("--scenario", "tenants", "--seed", "3", "--json"))
        comparison.command(
            "engine_s", ("bench", "engine"),
            (str(smollm2_file()), "--batches", "1,4,16", "--rounds", "1", "--no-roof", "--memory", "6GiB"),
        )  # fmt: skip
        for build in (comparison.old, comparison.new):
            if comparison.is_wanted(f"replay_{build.name}"):
                trace = trace_of(build, tiny, Path(name))
                for reader in (comparison.old, comparison.new):
                    ran = reader.run("replay", str(trace), "--json")
                    say(f"  {reader.name} replays a trace of {build.name}: code {ran.returncode}")
                trace.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two builds of quire on this machine.")
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--commit", default="HEAD", help="the commit in question")
    parser.add_argument("--rows", default="", help="words of rows, with commas between; default: all")
    parser.add_argument("--save", type=Path, help="write the result to this file")
    parser.add_argument("--set", default="", help="the instruction set of both; default: the best")
    given = parser.parse_args()
    comparison = Comparison(
        built("old", given.base),
        built("new", given.commit),
        tuple(word for word in given.rows.split(",") if word),
        ("--instruction-set", given.set) if given.set else (),
    )
    compare(comparison)
    for row, why in comparison.lacking.items():
        say(f"  {row:28} not judged: {why}")
    record = json.dumps(comparison.record(), indent=2)
    if given.save is not None:
        given.save.write_text(record + "\n")
    print(record)
    return 1 if comparison.record()["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
