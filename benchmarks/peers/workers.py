"""Engines in processes of their own, asked over pipes; stopped by their process id."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT
from benchmarks.servers import plain_environment
from tests.support.machine.spawned import stop


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker says of one batch."""

    seconds: float
    output_tokens: int
    first_s: float | None = None
    """Until all have their first tokens, where the worker says so."""


class Worker:
    """One engine that answers batches of prompts."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """All prompts at once, to their ends. An answer that is too short makes the figure worthless, so it raises."""
        fields = self.ask({"prompts": prompts, "max_tokens": max_tokens})
        if fields["output_tokens"] != len(prompts) * max_tokens:
            raise RuntimeError(f"{len(prompts)} x {max_tokens} tokens were asked for, {fields['output_tokens']} came")
        return Answer(fields["seconds"], fields["output_tokens"], fields.get("first_s"))

    def ask(self, fields: Mapping[str, Any] | None) -> dict[str, Any]:
        """One line in, one out; None only reads."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a worker is asked over pipes")
        if fields is not None:
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")
            self._process.stdin.flush()
        # Libraries may talk on stdout, too; a line of ours is a JSON object.
        while line := self._process.stdout.readline():
            if line.startswith(b"{"):
                told: dict[str, Any] = json.loads(line)
                return told
        raise RuntimeError(f"{self._process.args!r} ended before it answered")


@contextmanager
def working(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[Worker]:
    """The worker, loaded."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**plain_environment(), **environment},
        start_new_session=True,
    )
    try:
        worker = Worker(process)
        worker.ask(None)
        yield worker
    finally:
        stop(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def quire_working(model: Path, settings: Mapping[str, Any]) -> AbstractContextManager[Worker]:
    """Ours, with these fields of ModelSettings. Prompts are noise and answers soon repeat themselves: drafts would be
    right far more often than people's are, so there are none."""
    told = json.dumps({"speculation": "off", **settings})
    words = (sys.executable, "-m", "benchmarks.peers.quire_worker", str(model), told)
    return working(words, {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
