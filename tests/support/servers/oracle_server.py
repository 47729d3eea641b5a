"""`quire serve` with an oracle in its worker: everything but the model is real.

    python -m tests.support.servers.oracle_server --port 0 --step-s 0.01 …

Takes the settings of `quire serve` as `--name value` and the options below; says the same lines on stderr.
"""

import argparse
import asyncio
import gc
import os
import socket
import sys
import time
from asyncio import events
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from quire.api import asgi, serving
from quire.api.http.limits import STUCK_S
from quire.api.listening import listen
from quire.api.serving import Plan, run
from quire.cli.serve.model_traces import ModelTraces
from quire.client.engines.served import ServedModel, Serving
from quire.config import ModelSettings, OnDemandModel, Settings, load_settings
from quire.engine.loading import queue_of
from quire.observe.access_log import configure_logging
from quire.worker.parent.worker_plan import Limits
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import LOAD_S, NEEDS, PACE, oracle_plan


class LoopWatch:
    """The longest callback of an event loop, in its thread's own processor time."""

    def __init__(self) -> None:
        self.longest_s = self.collection_s = 0.0
        self.longest = ""
        self._collecting_s = 0.0
        gc.callbacks.append(self._collects)
        really = events.Handle._run

        def timed(handle: Any) -> None:
            started_s = time.thread_time()
            really(handle)
            spent_s = time.thread_time() - started_s
            if spent_s > self.longest_s:
                self.longest_s, self.longest = spent_s, repr(handle)[:300]

        setattr(events.Handle, "_run", timed)  # noqa: B010 - not ours to change, but to watch

    def _collects(self, phase: str, _about: dict[str, int]) -> None:
        """The interpreter looks for garbage, in the middle of whatever runs."""
        if phase == "start":
            self._collecting_s = time.thread_time()
        else:
            self.collection_s = max(self.collection_s, time.thread_time() - self._collecting_s)

    def say(self, line: str) -> None:
        """Starting is nobody's wait: count from when it is over."""
        asyncio.get_running_loop().call_soon(self._begin, line)

    def _begin(self, line: str) -> None:
        self.longest_s = self.collection_s = 0.0
        say(line)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0, help="what a token takes, layer by layer")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=192, help="of a step, beside one for each who runs")
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--sequence-tokens", type=int, default=512)
    parser.add_argument("--send-buffer", type=int, default=0)
    parser.add_argument("--stuck-s", type=float, default=STUCK_S)
    parser.add_argument("--insecure", type=int, default=0)
    parser.add_argument("--faults", default="", help="of its worker, as JSON")
    parser.add_argument("--needs", default="", help="a file without which no worker loads")
    parser.add_argument("--watch-loop", type=int, default=0)
    parser.add_argument("--template", type=Path, help="a file with another chat template")
    return parser


def opener(given: argparse.Namespace, settings: Settings) -> Any:
    traces = ModelTraces(settings.server, [OnDemandModel("oracle", "oracle", is_kept=True)])

    @asynccontextmanager
    async def opened(_model: OnDemandModel, _tell: Any) -> AsyncIterator[ServedModel]:
        template = TEMPLATE if given.template is None else given.template.read_text()
        text = talker(max_sequence_tokens=given.sequence_tokens, template=template).text
        model = ModelSettings(
            memory_bytes=given.blocks,
            block_size=16,
            max_running=given.running,
            max_step_tokens=given.running + given.prompt_tokens,
            max_sequence_tokens=given.sequence_tokens,
        )
        plan = oracle_plan(
            text.vocabulary_size,
            model,
            faults=given.faults,
            limits=Limits(stuck_s=settings.serving.stuck_step_s),
            queue=queue_of(settings.serving),
            step_s=given.step_s,
            trace=traces.of("oracle"),
        )
        async with ServedModel(lambda: Serving(plan, lambda ready: replace(text, info=ready.info))) as engine_client:
            yield engine_client

    return opened


def with_send_buffer(num_bytes: int) -> Any:
    def listening(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
        return listener

    return listening


def main(words: list[str]) -> int:
    given, rest = options().parse_known_args(words)
    flags = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    settings = load_settings(dict(flags), environ={})
    configure_logging(settings.server.log_format)
    os.environ[LOAD_S], os.environ[PACE] = str(given.load_s), str(given.token_s)
    os.environ[NEEDS] = given.needs
    setattr(asgi, "STUCK_S", given.stuck_s)  # noqa: B010
    if given.send_buffer:
        setattr(serving, "listen", with_send_buffer(given.send_buffer))  # noqa: B010
    watch = LoopWatch() if given.watch_loop else None
    factory = asyncio.new_event_loop if watch else uvloop.new_event_loop
    plan = Plan([OnDemandModel("oracle", "oracle", is_kept=True)], settings, bool(given.insecure))
    with asyncio.Runner(loop_factory=factory) as runner:
        num_ended = runner.run(run(plan, say if watch is None else watch.say, opener(given, settings)))
    if watch is not None:
        longest = f"{watch.longest_s * 1000:.3f} ms in {watch.longest}"
        say(f"longest callback {longest}, longest collection {watch.collection_s * 1000:.3f} ms")
    say(f"ended {num_ended}")
    return 0


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
