"""Replays traces of real workers under load and faults; checks that a replay notices changes; and measures their cost.

A trace is a file that a worker writes, with every request and every planned step; a replay plans these steps again and
compares. The model is an oracle with a small pool, for many preemptions and refusals, or the test model with
speculation and grammars. Clients of several tenants and priorities send requests and disconnect; workers are killed.
"""

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from statistics import median
from unittest import mock

from benchmarks.record import say
from benchmarks.servers import Running, quire_command, started
from benchmarks.test_model import smollm2_file
from proofs.framework.proof import Proof, section
from quire.cli.serve.model_traces import ModelTraces
from quire.client.engines.served import ModelOptions, ServedModel, plan_worker
from quire.client.request.params import Grammar, SamplingParams
from quire.config import ModelSettings, OnDemandModel, ServerSettings
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.errors import QuireError
from quire.sim.replay.replay import replay
from quire.sim.replay.report import ReplayReport
from quire.worker.parent.worker_plan import Limits
from tests.support.core.scheduler_changes import CHANGES
from tests.support.servers.served import served
from tests.support.workers.oracle_worker import GUESSES
from tests.support.workers.traced_engines import write_life

TIMEOUT_S = 900.0
"""The timeout of a load."""
GRAMMAR = Grammar.json_schema({"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]})
SUBJECTS = ("the river", "a ship at night", "three small questions", "once more")
REAL_EVERY = 5
"""One of this many traces is of the real model."""


class Load:
    """A random load of clients on one model."""

    def __init__(self, model: ServedModel, random: Random, num_requests: int, *, has_grammars: bool) -> None:
        self._model = model
        self._random = random
        self._num_requests = num_requests
        self._has_grammars = has_grammars
        self.counts: Counter[str] = Counter()

    async def run(self, num_kills: int) -> None:
        """Send all requests and kill the worker `num_kills` times; wait until every request has ended."""
        tasks = [asyncio.create_task(self._ask(number)) for number in range(self._num_requests)]
        for num_done in range(num_kills):
            while self._model.supervisor.load.num_steps < 8 * (num_done + 1) and not all(task.done() for task in tasks):
                await asyncio.sleep(0.01)
            await self._kill()
        await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)

    async def _kill(self) -> None:
        if self._model.supervisor.pid is not None:
            os.kill(self._model.supervisor.pid, signal.SIGKILL)
            self.counts["kills"] += 1
            num_restarts = self._model.supervisor.num_restarts
            while self._model.supervisor.num_restarts == num_restarts:
                await asyncio.sleep(0.01)

    async def _ask(self, number: int) -> None:
        random = self._random
        await asyncio.sleep(random.random() * 0.5)
        subject, tenant = random.choice(SUBJECTS), random.choice("abc")
        prompt = f"Tell me of {subject}. " * random.choice((1, 1, 4, 9)) + random.choice(("", str(number)))
        priority = random.choice(("high", "normal", "low"))
        timeout_s = random.choice((None, None, None, 0.3))
        num_wanted = random.choice((None, None, None, 3))
        try:
            num_pieces = 0
            stream = self._model.stream(
                prompt, self._params(number), tenant=tenant, priority=priority, timeout_s=timeout_s
            )
            async for _ in stream:
                num_pieces += 1
                if num_pieces == num_wanted:
                    self.counts["left"] += 1
                    break
            self.counts["answered"] += 1
            if random.random() < 0.2:
                await self._model.explain(prompt, tenant=tenant)
            if random.random() < 0.05:
                self._model.clear_cache()
        except QuireError as error:
            self.counts[type(error).__name__] += 1

    def _params(self, number: int) -> SamplingParams:
        random = self._random
        has_grammar = self._has_grammars and random.random() < 0.25
        return SamplingParams(
            max_tokens=random.choice((4, 16, 40)),
            temperature=random.choice((0.0, 0.7)),
            seed=number,
            n=random.choice((1, 1, 1, 3)),
            ignore_eos=not has_grammar,
            logprobs=random.choice((None, None, 1)),
            prompt_logprobs=random.choice((None,) * 6 + (1,)),
            stop=random.choice(((), (), ("e",))),
            grammar=GRAMMAR if has_grammar else None,
        )


def trace_options(path: Path) -> ModelOptions:
    """The options of a model that writes a new trace file, as `quire serve --trace` makes them."""
    return ModelOptions(trace=ModelTraces(ServerSettings(trace=path), [OnDemandModel("m", "m", is_kept=True)]).of("m"))


def oracle_model(path: Path, random: Random) -> ServedModel:
    """A model with a small pool, so that sequences are preempted, and a short queue, so that some are refused."""
    settings = ModelSettings(
        memory_bytes=random.choice((90, 150, 400)),
        block_size=4,
        max_step_tokens=random.choice((24, 64)),
        max_running=random.choice((6, 16)),
        max_sequence_tokens=330,
    )
    queue = QueueConfig(random.choice((40, 512, 512)))
    return served(settings, queue=queue, step_s=0.003, trace=trace_options(path).trace)


def real_model(path: Path, random: Random) -> ServedModel:
    """SmolLM2 with speculation, in a pool for a few sequences."""
    settings = ModelSettings(
        memory_bytes=random.choice((420, 600)) << 20,
        max_step_tokens=96,
        max_running=8,
        max_sequence_tokens=512,
        num_threads=1,
    )
    limits = Limits(stuck_s=TIMEOUT_S)
    return ServedModel(plan_worker(str(smollm2_file()), settings, options=trace_options(path), limits=limits))


async def write_trace(path: Path, random: Random, *, is_real: bool, num_requests: int, num_kills: int) -> Counter[str]:
    """Write one trace, from the first request of a load to the end of its server; returns counts of what happened."""
    with oracle_guessing(random.random() < 0.5):
        model = real_model(path, random) if is_real else oracle_model(path, random)
        async with model:
            load = Load(model, random, num_requests, has_grammars=True)
            await load.run(num_kills)
    return load.counts


@contextmanager
def oracle_guessing(is_on: bool) -> Iterator[None]:
    """Let oracles that start within the block guess draft tokens, if `is_on`."""
    with mock.patch.dict(os.environ, {GUESSES: "1"} if is_on else {}):
        yield


@section("replay")
async def replay_traces(proof: Proof) -> None:
    """Count traces whose replay differs; then check that replays notice changed rules and changed traces."""
    num_traces, counts = proof.sized(quick=6, full=50), Counter[str]()
    reports: list[ReplayReport] = []
    for number in range(num_traces):
        path = proof.folder / f"trace-{number}.jsonl"
        is_real = number % REAL_EVERY == REAL_EVERY - 1
        counts += await write_trace(
            path, proof.random, is_real=is_real, num_requests=14 if is_real else 60, num_kills=number % 3
        )
        reports.append(replay(path))
        counts += record_counts(path)
        if not reports[-1].is_same:
            say("\n".join(reports[-1].lines()))
    say(f"  {dict(counts)}")
    proof.equals("replay_diff", sum(not report.is_same for report in reports), 0, f"of {num_traces} traces")
    proof.report("replay_steps", sum(report.num_steps for report in reports), "planned alike")
    proof.report("replay_lives", sum(len(report.sessions) for report in reports), "of workers")
    for name in ("preempted", "restore", "refused", "drafts", "grammars", "kills", "left", "cancel", "explain"):
        proof.at_least(f"replay_{name}", counts[name], 1, "in the traces")
    _control(proof, [Path(report.path) for report in reports])


def record_counts(path: Path) -> Counter[str]:
    """Counts of the records in a trace, by kind."""
    counts = Counter[str]()
    for line in path.read_text().split("\n"):
        with suppress(ValueError):
            record = json.loads(line)
            kind = record["is"]
            counts[kind] += 1
            counts["grammars"] += bool(record.get("has_grammar"))
            counts["drafts"] += any(row[7] for row in record.get("rows", ()))
            counts["preempted"] += sum(event[0] == "preempted" for event in record.get("events", ()))
    return counts


def _control(proof: Proof, paths: list[Path]) -> None:
    """A control: replay with changed rules of the scheduler, and replay changed traces; each must be noticed."""
    synthetic_trace = proof.folder / "lives.jsonl"
    for seed in range(10):
        write_life(synthetic_trace, seed)
    missed = [name for name in CHANGES if not _replay_notices(name, [synthetic_trace, *paths])]
    for path in paths:
        line = _tamper_with(path, proof.random)
        differences = [session.difference for session in replay(path).sessions if session.difference is not None]
        if [difference.line for difference in differences] != [line]:
            missed.append(f"line {line} of {path.name}")
    say(f"  not noticed: {missed}")
    share = 1.0 - len(missed) / (len(CHANGES) + len(paths))
    proof.equals("replay_control", share, 1, f"of {len(CHANGES)} changed rules and {len(paths)} changed traces noticed")


def _replay_notices(name: str, paths: list[Path]) -> bool:
    module, attribute, replacement = CHANGES[name]
    with mock.patch.object(module, attribute, replacement):
        return any(not replay(path).is_same for path in paths)


def _tamper_with(path: Path, random: Random) -> int:
    """Change one number of one plan in a trace; returns the number of its line."""
    lines = path.read_text().split("\n")
    plan_indices = [index for index, line in enumerate(lines) if line.startswith('{"is":"plan"') and line.endswith("}")]
    index = random.choice([i for i in plan_indices if json.loads(lines[i])["rows"]])
    plan = json.loads(lines[index])
    row, field = random.choice(plan["rows"]), random.choice((0, 1, 2))
    row[field] += 1
    lines[index] = json.dumps(plan)
    path.write_text("\n".join(lines))
    return index + 1


# -- the cost of a trace -----------------------------------------------------------------------------------------------

NUM_STREAMS = 16
ANSWER_TOKENS = 64


@section("trace cost")
def trace_cost(proof: Proof) -> None:
    """Compare two servers of the real model, of which one writes a trace, in alternating rounds."""
    path = proof.folder / "cost.jsonl"
    flags = ("--max-running", str(NUM_STREAMS), "--threads", "1")
    plain_command = quire_command(smollm2_file(), *flags, memory="1GiB")
    traced_command = quire_command(smollm2_file(), *flags, "--trace", str(path), memory="1GiB")
    ratios = []
    with started(plain_command) as plain, started(traced_command) as traced:
        for number in range(proof.sized(quick=6, full=80)):
            order = (plain, traced) if number % 2 else (traced, plain)
            speeds = {running.url: tokens_per_s(running, number) for running in order}
            if number:  # the first steps of a process are slow
                ratios.append(speeds[traced.url] / speeds[plain.url])
    report = replay(path)
    say(f"  ratios {[round(ratio, 3) for ratio in ratios]}")
    proof.at_least("trace_cost", median(ratios), 0.97, f"tokens/s with a trace over without, {len(ratios)} rounds")
    proof.equals("trace_cost_same", report.is_same, True, f"replayed: {report.num_steps} steps")
    proof.report("trace_bytes_per_step", path.stat().st_size / max(1, report.num_steps), f"of {NUM_STREAMS} rows")


def tokens_per_s(running: Running, number: int) -> float:
    """Output tokens per second of concurrent requests."""

    def ask(stream: int) -> None:
        body = {
            "model": running.card.name,
            "prompt": f"Round {number}, story {stream}: once upon a time",
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        request = urllib.request.Request(  # noqa: S310 - the URL of a local server
            f"{running.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - a local server
            num_tokens = json.loads(answer.read())["usage"]["completion_tokens"]
        if num_tokens != ANSWER_TOKENS:
            raise RuntimeError(f"expected an answer of {ANSWER_TOKENS} tokens, got {num_tokens}")

    start_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(ask, range(NUM_STREAMS)))
    return NUM_STREAMS * ANSWER_TOKENS / (time.perf_counter() - start_s)
