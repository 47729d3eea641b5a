"""Traces of real workers under load, faults included, replayed; a replay that must notice; and what a trace costs.

A worker is a process with a supervisor over it: an oracle, so that small pools, kills and refusals come often, or the
real model with guesses and grammars. Clients of several tenants and classes ask at once, leave, come late and ask about
the cache; workers are killed. What it wrote is then replayed here.
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

LONGEST_S = 900.0
"""A load that has not ended by then never will."""
GRAMMAR = Grammar.json_schema({"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]})
THINGS = ("the river", "a ship at night", "three small questions", "once more")
REAL_EVERY = 5
"""Every so many traces one of the real model."""


class Load:
    """What clients do to one model, by dice."""

    def __init__(self, model: ServedModel, random: Random, num_requests: int, *, has_grammars: bool) -> None:
        self._model = model
        self._random = random
        self._num_requests = num_requests
        self._has_grammars = has_grammars
        self.counts: Counter[str] = Counter()

    async def run(self, num_kills: int) -> None:
        """All of it, and until everybody has an answer or an error."""
        asking = [asyncio.create_task(self._ask(number)) for number in range(self._num_requests)]
        for kill in range(num_kills):
            while self._model.supervisor.load.num_steps < 8 * (kill + 1) and not all(task.done() for task in asking):
                await asyncio.sleep(0.01)
            await self._kill()
        await asyncio.wait_for(asyncio.gather(*asking), LONGEST_S)

    async def _kill(self) -> None:
        if self._model.supervisor.pid is not None:
            os.kill(self._model.supervisor.pid, signal.SIGKILL)
            self.counts["kills"] += 1
            before = self._model.supervisor.num_restarts
            while self._model.supervisor.num_restarts == before:
                await asyncio.sleep(0.01)

    async def _ask(self, number: int) -> None:
        dice = self._random
        await asyncio.sleep(dice.random() * 0.5)
        thing, tenant = dice.choice(THINGS), dice.choice("abc")
        prompt = f"Tell me of {thing}. " * dice.choice((1, 1, 4, 9)) + dice.choice(("", str(number)))
        priority = dice.choice(("high", "normal", "low"))
        timeout_s = dice.choice((None, None, None, 0.3))
        leaves_at = dice.choice((None, None, None, 3))
        try:
            num_pieces = 0
            stream = self._model.stream(
                prompt, self._params(number), tenant=tenant, priority=priority, timeout_s=timeout_s
            )
            async for _ in stream:
                num_pieces += 1
                if num_pieces == leaves_at:
                    self.counts["left"] += 1
                    break
            self.counts["answered"] += 1
            if dice.random() < 0.2:
                await self._model.explain(prompt, tenant=tenant)
            if dice.random() < 0.05:
                self._model.clear_cache()
        except QuireError as error:
            self.counts[type(error).__name__] += 1

    def _params(self, number: int) -> SamplingParams:
        dice = self._random
        has_grammar = self._has_grammars and dice.random() < 0.25
        return SamplingParams(
            max_tokens=dice.choice((4, 16, 40)),
            temperature=dice.choice((0.0, 0.7)),
            seed=number,
            n=dice.choice((1, 1, 1, 3)),
            ignore_eos=not has_grammar,
            logprobs=dice.choice((None, None, 1)),
            prompt_logprobs=dice.choice((None,) * 6 + (1,)),
            stop=dice.choice(((), (), ("e",))),
            grammar=GRAMMAR if has_grammar else None,
        )


def traced_settings(path: Path) -> ModelOptions:
    """A new file, as `quire serve --trace` makes it."""
    return ModelOptions(trace=ModelTraces(ServerSettings(trace=path), [OnDemandModel("m", "m", is_kept=True)]).of("m"))


def oracle_model(path: Path, random: Random) -> ServedModel:
    """A small pool, so that sequences are preempted; a short queue, so that some are refused."""
    settings = ModelSettings(
        memory_bytes=random.choice((90, 150, 400)),
        block_size=4,
        max_step_tokens=random.choice((24, 64)),
        max_running=random.choice((6, 16)),
        max_sequence_tokens=330,
    )
    queue = QueueConfig(random.choice((40, 512, 512)))
    return served(settings, queue=queue, step_s=0.003, trace=traced_settings(path).trace)


def real_model(path: Path, random: Random) -> ServedModel:
    """SmolLM2 with guesses, in a pool of a few sequences."""
    settings = ModelSettings(
        memory_bytes=random.choice((420, 600)) << 20,
        max_step_tokens=96,
        max_running=8,
        max_sequence_tokens=512,
        num_threads=1,
    )
    limits = Limits(stuck_s=LONGEST_S)
    return ServedModel(plan_worker(str(smollm2_file()), settings, options=traced_settings(path), limits=limits))


async def written(path: Path, random: Random, *, is_real: bool, num_requests: int, num_kills: int) -> Counter[str]:
    """One trace, from the first request of a load to the end of its server."""
    with guessing(random.random() < 0.5):
        model = real_model(path, random) if is_real else oracle_model(path, random)
        async with model:
            load = Load(model, random, num_requests, has_grammars=True)
            await load.run(num_kills)
    return load.counts


@contextmanager
def guessing(wanted: bool) -> Iterator[None]:
    """Oracles of this moment guess."""
    with mock.patch.dict(os.environ, {GUESSES: "1"} if wanted else {}):
        yield


@section("replay")
async def replayed(proof: Proof) -> None:
    """Traces that differ when they are replayed, and those of which the replay must notice something."""
    num_traces, counts = proof.sized(quick=6, full=50), Counter[str]()
    reports: list[ReplayReport] = []
    for number in range(num_traces):
        path = proof.folder / f"trace-{number}.jsonl"
        is_real = number % REAL_EVERY == REAL_EVERY - 1
        counts += await written(
            path, proof.random, is_real=is_real, num_requests=14 if is_real else 60, num_kills=number % 3
        )
        reports.append(replay(path))
        counts += counted(path)
        if not reports[-1].is_same:
            say("\n".join(reports[-1].lines()))
    say(f"  {dict(counts)}")
    proof.equals("replay_diff", sum(not report.is_same for report in reports), 0, f"of {num_traces} traces")
    proof.report("replay_steps", sum(report.num_steps for report in reports), "planned the same")
    proof.report("replay_lives", sum(len(report.sessions) for report in reports), "of workers")
    for name in ("preempted", "restore", "refused", "drafts", "grammars", "kills", "left", "cancel", "explain"):
        proof.at_least(f"replay_{name}", counts[name], 1, "were in them")
    _control(proof, [Path(report.path) for report in reports])


def counted(path: Path) -> Counter[str]:
    """What stands in a trace."""
    found = Counter[str]()
    for line in path.read_text().split("\n"):
        with suppress(ValueError):
            record = json.loads(line)
            kind = record["is"]
            found[kind] += 1
            found["grammars"] += bool(record.get("has_grammar"))
            found["drafts"] += any(row[7] for row in record.get("rows", ()))
            found["preempted"] += sum(event[0] == "preempted" for event in record.get("events", ()))
    return found


def _control(proof: Proof, paths: list[Path]) -> None:
    """Schedulers of which a rule was changed, and traces of which a number was."""
    lives = proof.folder / "lives.jsonl"
    for seed in range(10):
        write_life(lives, seed)
    unnoticed = [name for name in CHANGES if not _is_noticed(name, [lives, *paths])]
    for path in paths:
        line = _tampered(path, proof.random)
        found = [life.difference for life in replay(path).sessions if life.difference is not None]
        if [one.line for one in found] != [line]:
            unnoticed.append(f"line {line} of {path.name}")
    say(f"  not noticed: {unnoticed}")
    share = 1.0 - len(unnoticed) / (len(CHANGES) + len(paths))
    proof.equals("replay_control", share, 1, f"of {len(CHANGES)} changed rules and {len(paths)} changed traces noticed")


def _is_noticed(name: str, paths: list[Path]) -> bool:
    room, attribute, changed = CHANGES[name]
    with mock.patch.object(room, attribute, changed):
        return any(not replay(path).is_same for path in paths)


def _tampered(path: Path, random: Random) -> int:
    """Change one number of one plan; the number of its line."""
    lines = path.read_text().split("\n")
    places = [at for at, line in enumerate(lines) if line.startswith('{"is":"plan"') and line.endswith("}")]
    at = random.choice([place for place in places if json.loads(lines[place])["rows"]])
    plan = json.loads(lines[at])
    row, field = random.choice(plan["rows"]), random.choice((0, 1, 2))
    row[field] += 1
    lines[at] = json.dumps(plan)
    path.write_text("\n".join(lines))
    return at + 1


# -- what it costs -----------------------------------------------------------------------------------------------------

NUM_STREAMS = 16
ANSWER_TOKENS = 64


@section("trace cost")
def trace_cost(proof: Proof) -> None:
    """Two servers of the real model, one that writes a trace, asked in turn."""
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
    """Of answers that are all asked for at once."""

    def ask(stream: int) -> None:
        body = {
            "model": running.card.name,
            "prompt": f"Round {number}, story {stream}: once upon a time",
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        request = urllib.request.Request(  # noqa: S310 - a server of ours
            f"{running.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LONGEST_S) as answer:  # noqa: S310
            told = json.loads(answer.read())["usage"]["completion_tokens"]
        if told != ANSWER_TOKENS:
            raise RuntimeError(f"an answer has {told} tokens, {ANSWER_TOKENS} were asked for")

    began_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(ask, range(NUM_STREAMS)))
    return NUM_STREAMS * ANSWER_TOKENS / (time.perf_counter() - began_s)
