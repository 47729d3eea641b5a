"""Progress of a load on stderr: a bar if stderr is a terminal, else a line every few seconds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import typer

from quire.bench.outcome import Outcome
from quire.bench.runs import RunListener

SECONDS_BETWEEN_LINES = 5.0


class Tally:
    """Counts of the outcomes of the current run."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.begin("", 0)

    def begin(self, title: str, total: int) -> None:
        """Begin a run: reset all counts."""
        self.title, self.total = title, total
        self.done = self.failed = self.tokens = 0
        self._started_s = self._clock()

    def count(self, outcome: Outcome) -> None:
        """Add one outcome."""
        self.done += 1
        self.failed += not outcome.is_ok
        self.tokens += outcome.output_tokens if outcome.is_ok else 0

    @property
    def line(self) -> str:
        seconds = self._clock() - self._started_s
        rate = f"{self.tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{rate}{failed}"


@contextmanager
def show_run() -> Iterator[RunListener]:
    """Yield a listener that displays the progress of each run."""
    with _bar() if sys.stderr.isatty() else _lines(Tally(), monotonic) as listener:
        yield listener


@contextmanager
def _lines(tally: Tally, clock: Callable[[], float]) -> Iterator[RunListener]:
    last_s = clock()

    def count(outcome: Outcome) -> None:
        nonlocal last_s
        tally.count(outcome)
        if clock() - last_s >= SECONDS_BETWEEN_LINES:
            last_s = clock()
            typer.echo(f"{tally.title}: {tally.done:,} of {tally.total:,}, {tally.line}", err=True)

    yield RunListener(on_run_start=tally.begin, on_outcome=count)


@contextmanager
def _bar() -> Iterator[RunListener]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    tally, task = Tally(), None
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[line]}"), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def begin(title: str, total: int) -> None:
            nonlocal task
            tally.begin(title, total)
            if task is not None:
                progress.remove_task(task)
            task = progress.add_task(title, total=total, line="")

        def count(outcome: Outcome) -> None:
            tally.count(outcome)
            if task is not None:
                progress.update(task, completed=tally.done, line=tally.line)

        yield RunListener(on_run_start=begin, on_outcome=count)
