"""`quire serve` whose worker is `scripted_worker`: routes, dialects, templates, grammars and scheduler are real.

    python -m proofs.agents.clients_run.scripted_server --diary FILE --port 0 …

Takes the settings of `quire serve` as `--name value`; says the same lines on stderr. `running` starts one for a proof.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.packaged_models import coder_file
from benchmarks.record import ROOT
from proofs.agents.clients_run.scripted_worker import DIARY
from proofs.api.load import Server, started
from quire.api.models.model_park import OpenClient, ReportProgress
from quire.api.serving import Plan, run
from quire.client.engines.served import ServedModel, Serving, plan_worker
from quire.config import OnDemandModel, Settings, load_settings
from quire.observe.access_log import configure_logging

MODEL = "scripted"
WORKER = (sys.executable, "-m", "proofs.agents.clients_run.scripted_worker")


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """One that runs, and its diary."""

    server: Server
    diary: Path

    @property
    def url(self) -> str:
        """Without a path."""
        return self.server.url

    def requests(self) -> list[dict[str, Any]]:
        """Those that have ended, in that order."""
        return [json.loads(line) for line in self.diary.read_text().splitlines()] if self.diary.exists() else []


@contextmanager
def running(folder: Path, *words: str, **how: Any) -> Iterator[ScriptedServer]:
    """A server in a process of its own."""
    diary = folder / "diary.jsonl"
    with started(
        folder, "--diary", str(diary), *words, module="proofs.agents.clients_run.scripted_server", **how
    ) as server:
        yield ScriptedServer(server, diary)


def opener(diary: Path, settings: Settings) -> OpenClient:
    """As `quire serve` opens a model, but for the worker's program."""

    @asynccontextmanager
    async def opened(model: OnDemandModel, _tell: ReportProgress) -> AsyncIterator[ServedModel]:
        def prepare() -> Serving:
            serving = plan_worker(model.model, settings.model, settings.serving)()
            around = {DIARY: str(diary), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
            return replace(serving, plan=replace(serving.plan, command=WORKER, environment=around))

        async with ServedModel(prepare) as client:
            yield client

    return opened


def main(words: list[str]) -> int:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--diary", type=Path, required=True)
    given, rest = parser.parse_known_args(words)
    flags = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    settings = load_settings(dict(flags), environ={})
    configure_logging("json" if settings.server.log_format == "json" else "plain")
    plan = Plan([OnDemandModel(MODEL, str(coder_file()), is_kept=True)], settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(plan, say, opener(given.diary, settings)))
    return 0


def say(line: str) -> None:
    """Where `quire serve` says it."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
