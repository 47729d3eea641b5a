"""`quire serve` whose worker is `scripted_worker`: routes, dialects, templates, grammars and scheduler are real.

    python -m proofs.agents.clients_run.scripted_server --diary FILE --port 0 …

It takes the settings of `quire serve` as `--name value`, and logs the same lines. `running` starts one for a proof.
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
    """A running server, and its diary of finished requests (see `scripted_worker`)."""

    server: Server
    diary: Path

    @property
    def url(self) -> str:
        """The base URL."""
        return self.server.url

    def requests(self) -> list[dict[str, Any]]:
        """The diary's lines: finished requests, in the order of their ends."""
        return [json.loads(line) for line in self.diary.read_text().splitlines()] if self.diary.exists() else []


@contextmanager
def running(folder: Path, *words: str, **options: Any) -> Iterator[ScriptedServer]:
    """Run a server in a process of its own."""
    diary = folder / "diary.jsonl"
    with started(
        folder, "--diary", str(diary), *words, module="proofs.agents.clients_run.scripted_server", **options
    ) as server:
        yield ScriptedServer(server, diary)


def opener(diary: Path, settings: Settings) -> OpenClient:
    """Opens a model as `quire serve` does, but with the scripted worker."""

    @asynccontextmanager
    async def open_model(model: OnDemandModel, _report_progress: ReportProgress) -> AsyncIterator[ServedModel]:
        def prepare() -> Serving:
            serving = plan_worker(model.model, settings.model, settings.serving)()
            variables = {DIARY: str(diary), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
            return replace(serving, plan=replace(serving.plan, command=WORKER, environment=variables))

        async with ServedModel(prepare) as client:
            yield client

    return open_model


def main(arguments: list[str]) -> int:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--diary", type=Path, required=True)
    options, words = parser.parse_known_args(arguments)
    flags = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    settings = load_settings(dict(flags), environ={})
    configure_logging("json" if settings.server.log_format == "json" else "plain")
    plan = Plan([OnDemandModel(MODEL, str(coder_file()), is_kept=True)], settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(plan, say, opener(options.diary, settings)))
    return 0


def say(line: str) -> None:
    """Print a line to stderr, as `quire serve` does."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
