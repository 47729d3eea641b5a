"""Runs engines in separate processes, with requests over pipes; they are stopped by process id."""

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
    """A worker's figures of one batch."""

    seconds: float
    output_tokens: int
    first_s: float | None = None
    """Seconds until all sequences have their first tokens, if the worker reports it."""


class Worker:
    """A process with an engine that answers batches of prompts."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """Run all prompts concurrently. Raises RuntimeError for short answers, which would falsify the figure."""
        fields = self.ask({"prompts": prompts, "max_tokens": max_tokens})
        if fields["output_tokens"] != len(prompts) * max_tokens:
            raise RuntimeError(f"expected {len(prompts)} x {max_tokens} tokens, got {fields['output_tokens']}")
        return Answer(fields["seconds"], fields["output_tokens"], fields.get("first_s"))

    def ask(self, fields: Mapping[str, Any] | None) -> dict[str, Any]:
        """Write a line, unless `fields` is None, and read one."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("expected a worker process with pipes for stdin and stdout")
        if fields is not None:
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")
            self._process.stdin.flush()
        # Libraries may print to stdout too; only lines of the worker are JSON objects.
        while line := self._process.stdout.readline():
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self._process.args!r} ended without an answer")


@contextmanager
def working(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Worker]:
    """Start a worker, and wait until it has loaded its model."""
    process = subprocess.Popen(
        command,
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
    """Start quire with these fields of ModelSettings. Speculation is off: answers to random prompts soon repeat
    themselves, so drafts would be accepted far more often than with real prompts."""
    settings_json = json.dumps({"speculation": "off", **settings})
    command = (sys.executable, "-m", "benchmarks.peers.quire_worker", str(model), settings_json)
    return working(command, {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
