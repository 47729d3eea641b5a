"""`make compare BASE=COMMIT`: compares the speed of two builds of quire on this machine, in alternating rounds.

Each build is a wheel in its own environment, built from its commit with that commit's constraints. Nothing of either is
imported: only commands are run, with options that are in the `--help` texts of both, and requests go over HTTP. One
client measures both: `quire bench serve` of this tree. A row is new over old, above 1 if the new build is faster. A row
that a build cannot run, because it lacks a command or an option, is listed and not judged.

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
"""Outside the tree, because its tests read all Markdown pages in it."""
TINY = Tiny(hidden=128, intermediate=128, num_layers=2, metadata={"llama.context_length": 512})
SERVE = ("--memory", "6GiB", "--max-model-len", "2048", "--speculation", "off")
NUM_ANSWERS, ANSWER_TOKENS = 50, 24
MIN_RATIO = 0.98
"""A row whose whole interval is below this is slower."""


class UnsupportedError(Exception):
    """A build has no such command or option."""


@dataclass(frozen=True, slots=True)
class Build:
    """An installed build of a commit."""

    name: str
    commit: str
    program: Path

    def run(self, *words: str, timeout_s: float = 900.0) -> "subprocess.CompletedProcess[str]":
        """Run a command of this build."""
        return subprocess.run([str(self.program), *words], capture_output=True, text=True, timeout=timeout_s, cwd="/")

    def check(self, command: Sequence[str], words: Sequence[str]) -> None:
        """Raise UnsupportedError unless the command's help lists all of these options."""
        text = help_of(self.program, tuple(command))
        if missing := [word for word in words if word.startswith("--") and f"{word} " not in text]:
            raise UnsupportedError(f"{self.name} lacks {' '.join([*command, *missing])}")


@cache
def help_of(program: Path, command: tuple[str, ...]) -> str:
    process = subprocess.run([str(program), *command, "--help"], capture_output=True, text=True, timeout=120)
    if process.returncode:
        raise UnsupportedError(f"no such command: quire {' '.join(command)}")
    return process.stdout.replace(",", " ,") + " "


def install_build(name: str, revision: str) -> Build:
    """Install the build of a commit into its own environment, unless it exists."""
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
        options = [
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--constraint",
            str(source / ".ci/constraints.txt"),
        ]
        subprocess.run([str(program.with_name("pip")), *options, str(source)], check=True, stdout=sys.stderr)
    return Build(name, commit, program)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


# -- loads -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """A load for a server: options of `quire bench serve`, and the figure of its result that counts."""

    name: str
    words: tuple[str, ...]
    figure: str
    is_lower_better: bool = False


def loads(requests: int, prompt: int, output: int) -> tuple[Load, ...]:
    """Return the loads for a real model."""
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


def run_load(running: Running, load: Load, seed: str) -> float:
    """Run a load with this tree's client, and return its figure."""
    command = [sys.executable, "-m", "quire", "bench", "serve", "--url", running.url, "--seed", seed, *load.words]
    process = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    if process.returncode:
        raise RuntimeError(process.stderr[-2000:])
    return float(json.loads(process.stdout.splitlines()[-1])[load.figure])


def answers_of(running: Running) -> list[str]:
    """Return greedy answers to prompts that are the same for every build."""
    model = _request(running, "GET", "/v1/models", None)["data"][0]["id"]
    fields = {"model": model, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    prompts = (f"Story {number}: once upon a time, in a house with {number} rooms," for number in range(NUM_ANSWERS))
    answers = (_request(running, "POST", "/v1/completions", {**fields, "prompt": prompt}) for prompt in prompts)
    return [answer["choices"][0]["text"] for answer in answers]


def _request(running: Running, method: str, path: str, fields: Mapping[str, Any] | None) -> Any:
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
    """Both builds, and the results of all rows."""

    old: Build
    new: Build
    row_words: tuple[str, ...]
    server_options: tuple[str, ...] = ()
    """Additional options of both servers."""
    random: Random = field(default_factory=lambda: Random(SystemRandom().getrandbits(64)))
    seed: str = ""
    """The seed of this round's prompts, which are the same for both builds and different in every round."""
    rows: dict[str, RatioInterval] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    unequal: dict[str, int] = field(default_factory=dict)
    """How many of `NUM_ANSWERS` greedy answers differ, by model."""

    def is_wanted(self, name: str) -> bool:
        return not self.row_words or any(word in name for word in self.row_words)

    def measure_rounds(self, names: Sequence[str], measure: Callable[[Build], Sequence[float]]) -> None:
        """Measure both builds in rounds with a random order. `measure` returns one value per name; larger is better."""
        if not names:
            return

        def one_round() -> list[float]:
            self.seed = str(self.random.getrandbits(32))
            values = {build.name: measure(build) for build in self.random.sample([self.old, self.new], 2)}
            return [new / old for new, old in zip(values[self.new.name], values[self.old.name], strict=True)]

        try:
            rows = measured_ratios(one_round)
        except UnsupportedError as error:
            self.unsupported |= dict.fromkeys(names, str(error))
            return
        for name, ratios in zip(names, rows, strict=True):
            self.rows[name] = RatioInterval.of(ratios)
            say(f"  {name:28} {self._text_of(name)} of {len(ratios)} rounds")

    def compare_served(self, name: str, model: Path, all_loads: Sequence[Load], *words: str) -> None:
        """Start servers of both builds with this model, and run the loads in alternation."""
        selected = [load for load in all_loads if self.is_wanted(f"{name}_{load.name}")]
        names = [f"{name}_{load.name}" for load in selected]
        answers_name = f"{name}_answers"
        try:
            with ExitStack() as stack:
                running = {
                    build.name: stack.enter_context(serving(build, model, *words, *self.server_options))
                    for build in (self.old, self.new)
                }
                if self.is_wanted(answers_name):
                    answers = [answers_of(running[build.name]) for build in (self.old, self.new)]
                    self.unequal[answers_name] = sum(old != new for old, new in zip(*answers, strict=True))
                    say(f"  {answers_name:28} {self.unequal[answers_name]} of {NUM_ANSWERS} differ")

                def measure(build: Build) -> list[float]:
                    seed = str(self.random.getrandbits(32))
                    values = [run_load(running[build.name], load, seed) for load in selected]
                    pairs = zip(selected, values, strict=True)
                    return [1 / value if load.is_lower_better else value for load, value in pairs]

                self.measure_rounds(names, measure)
        except UnsupportedError as error:
            self.unsupported |= dict.fromkeys(names, str(error))

    def compare_command(self, name: str, command: Sequence[str], words: Sequence[str]) -> None:
        """Measure the run time of a command."""

        def measure(build: Build) -> list[float]:
            build.check(command, words)
            start_s = perf_counter()
            process = build.run(*command, *words)
            if process.returncode:
                raise RuntimeError(process.stderr[-2000:])
            return [1 / (perf_counter() - start_s)]

        if self.is_wanted(name):
            self.measure_rounds([name], measure)

    def _text_of(self, name: str) -> str:
        row = self.rows[name]
        return f"{row.median:.3f} ({row.low:.3f} to {row.high:.3f}){'' if self.holds(name) else ' SLOWER'}"

    def holds(self, name: str) -> bool:
        """Whether the interval is not entirely below the bound."""
        return self.rows[name].is_within(at_most=None, at_least=MIN_RATIO)

    def record(self) -> Mapping[str, Any]:
        values = {
            f"{name}{end}": value
            for name, row in self.rows.items()
            for end, value in (("", row.median), ("_low", row.low), ("_high", row.high))
        }
        slower = [name for name in self.rows if not self.holds(name)]
        names = {"old": self.old.commit, "new": self.new.commit}
        results = {"figures": values, "slower": slower, "unequal": self.unequal, "lacking": self.unsupported}
        return {**names, "options": self.server_options, **results, **circumstances()}


def trace_of(build: Build, model: Path, folder: Path) -> Path:
    """Return a trace that this build's server has written."""
    path = folder / "trace.jsonl"
    with serving(build, model, "--memory", "1GiB", "--trace", str(path)) as running:
        run_load(running, TINY_LOADS[0], "7")
    return path


def compare(comparison: Comparison) -> None:
    with TemporaryDirectory(prefix="quire-compare-") as name:
        tiny = write_gguf(Path(name) / "tiny.gguf", TINY)
        comparison.compare_served("tiny", tiny, TINY_LOADS, "--memory", "1GiB")
        comparison.compare_served("smollm2", smollm2_file(), loads(8, 64, 64), *SERVE)
        comparison.compare_served("coder", coder_file(), loads(4, 32, 16), *SERVE)
        comparison.compare_command("sim_s", ("sim",), ("--scenario", "tenants", "--seed", "3", "--json"))
        comparison.compare_command(
            "engine_s", ("bench", "engine"),
            (str(smollm2_file()), "--batches", "1,4,16", "--rounds", "1", "--no-roof", "--memory", "6GiB"),
        )  # fmt: skip
        for build in (comparison.old, comparison.new):
            if comparison.is_wanted(f"replay_{build.name}"):
                trace = trace_of(build, tiny, Path(name))
                for reader in (comparison.old, comparison.new):
                    process = reader.run("replay", str(trace), "--json")
                    say(f"  {reader.name} replays a trace of {build.name}: code {process.returncode}")
                trace.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two builds of quire on this machine.")
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--commit", default="HEAD", help="the commit in question")
    parser.add_argument("--rows", default="", help="words of rows, with commas between; default: all")
    parser.add_argument("--save", type=Path, help="write the result to this file")
    parser.add_argument("--set", default="", help="the instruction set of both; default: the best")
    arguments = parser.parse_args()
    comparison = Comparison(
        install_build("old", arguments.base),
        install_build("new", arguments.commit),
        tuple(word for word in arguments.rows.split(",") if word),
        ("--instruction-set", arguments.set) if arguments.set else (),
    )
    compare(comparison)
    for row, reason in comparison.unsupported.items():
        say(f"  {row:28} not judged: {reason}")
    record = json.dumps(comparison.record(), indent=2)
    if arguments.save is not None:
        arguments.save.write_text(record + "\n")
    print(record)
    return 1 if comparison.record()["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
