"""Three models in the memory of two, behind one `quire serve`: requests, switches and killed workers.

Every answer is compared with that of the same model and prompt without other requests: at temperature 0 neither
switches nor kills nor batches may change it. A switch unloads one model and loads another.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import aiohttp

from benchmarks.record import say
from benchmarks.test_model import smollm2_directory, smollm2_file
from proofs.api.load import Server, children_of, phrase, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

NAMES = ("first", "second", "third")
MEMORY_BYTES, EACH_BYTES = 2_000_000_000, 900_000_000
NUM_OPEN = 6
NUM_PROMPTS = 12
MAX_TOKENS = 24
PHASE = 6
"""The number of requests to a pair of models before the pair changes."""
SAMPLE_S = 0.02
QUEUE = 16
NUM_KEYS = 64
"""The number of API keys that requests alternate; one tenant alone may cause only four loads in a minute."""
EXPECTED_CODES = ("", "model_loading", "server_overloaded")
"""Expected error codes: none, or a request to retry while the model loads or its queue is full."""
STREAM = {
    "model": NAMES[0], "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 1
}  # fmt: skip
"""Sampled without a seed: a repeated answer would be speculated and arrive several tokens at a time."""


@section("park of models")
def park(proof: Proof) -> None:
    """Run requests in phases, each of which uses two of the three models."""
    count, min_switches, num_kills = (
        proof.sized(quick=90, full=500), proof.sized(quick=10, full=40), proof.sized(quick=3, full=10)
    )  # fmt: skip
    results = Results()
    with serving(proof.folder, "--turn-s", "0.2") as server:
        asyncio.run(_collect_references(server, results, proof.random))
        with memory_sampled(server, results):
            asyncio.run(_requests(server, results, proof.random, count, num_kills))
            num_loads = sum("is being loaded" in line for line in server.lines)
            switch_times_s = asyncio.run(_time_switches(server, results, proof.sized(quick=6, full=20)))
    for failure in (results.failed + results.wrong)[:6]:
        say(f"    {failure}")
    proof.at_least("park_requests", results.num_requests, count)
    proof.at_least("park_switches", num_loads - 2, min_switches, "models that were loaded in place of another")
    proof.equals("park_kills", results.num_killed, num_kills, "workers, some of which were loading")
    proof.equals("park_failed", len(results.failed), 0, "requests that failed")
    proof.equals("park_lost", len(results.wrong), 0, "answers that differ from those without other requests")
    proof.equals("park_over", results.num_over, 0, f"of {results.num_samples} samples of the workers' memory")
    proof.report("park_memory_share", results.max_bytes / MEMORY_BYTES, "peak memory of all workers")
    proof.report("switch_median_s", median(switch_times_s))
    proof.at_most("switch_s", max(switch_times_s), 4, "to unload one model, load another, and compute its first token")


@section("waiting for a model that loads")
def stream_while_loading(proof: Proof) -> None:
    """A stream of a model that stays loaded, while others are loaded and get many requests."""
    rounds = proof.sized(quick=2, full=5)
    flood = Flood()
    options = ("--turn-s", "0", "--queue", str(QUEUE))
    with serving(proof.folder, *options, keeps=NAMES[:1]) as server:
        asyncio.run(_stream_gaps(server))
        ratios = []
        for _ in range(rounds):
            alone_s = asyncio.run(_stream_gaps(server))
            loading_s = asyncio.run(_stream_gaps(server, flood))
            ratios.append(loading_s / alone_s)
            say(f"    p95 gap {alone_s * 1000:.1f} ms alone, {loading_s * 1000:.1f} ms while a model loads")
    counts = {code: flood.codes.count(code) for code in set(flood.codes)}
    say(f"    error codes of the other requests: {counts}")
    proof.at_least("park_turned_away", flood.codes.count("model_loading"), rounds, "beyond the queue's bounds")
    proof.equals("park_without_retry", flood.num_without_retry, 0)
    num_unexpected = len([code for code in flood.codes if code not in EXPECTED_CODES])
    proof.equals("park_waits_failed", num_unexpected, 0, "requests that were neither answered nor asked to retry")
    proof.at_most("park_waits", median(ratios), 1.5, "p95 gap between tokens, over that without loading")


@dataclass
class Clients:
    """Keys of clients, which requests use in turn."""

    secrets: Iterator[str] = field(default_factory=lambda: iter(()))

    def next(self) -> dict[str, str]:
        """Return the headers of the next client."""
        return {"x-api-key": next(self.secrets)}


CLIENTS = Clients()


# -- a server ----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, *options: str, keeps: Sequence[str] = ()) -> Iterator[Server]:
    """Start a server with three models, the memory of two, and many keys."""
    keys = folder / "keys.json"
    keys.unlink(missing_ok=True)
    CLIENTS.secrets = cycle([add_key(keys, f"client-{number}") for number in range(NUM_KEYS)])
    third = folder / "third.gguf"
    if not third.exists():
        third.symlink_to(smollm2_file())
    models = (smollm2_file(), smollm2_directory(), third)
    lines = [f'memory = "{MEMORY_BYTES}"', "max_model_len = 1024", "max_running = 8"]
    for name, model in zip(NAMES, models, strict=True):
        lines += [f"[models.{name}]", f'model = "{model}"', f'memory = "{EACH_BYTES}"']
        lines += ["keep = true"] * (name in keeps)
    config = folder / "park.toml"
    config.write_text("\n".join(lines))
    with started(folder, "--config", str(config), "--keys-file", str(keys), *options, module="quire serve") as server:
        yield server


def worker_pids(server: Server) -> list[int]:
    """Return the worker processes of models, without the helper processes."""
    pids = []
    for pid in children_of(server.pid):
        with suppress(OSError):
            if b"quire.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
    return pids


def resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@dataclass
class Results:
    """Counts and failures of the requests, and samples of memory."""

    num_requests: int = 0
    num_killed: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_samples: int = 0
    num_over: int = 0
    max_bytes: int = 0
    references: dict[tuple[str, str], str] = field(default_factory=dict)
    """The answer of each model to each prompt, without other requests."""

    def sample(self, server: Server) -> None:
        """Sample the memory of all workers."""
        num_bytes = sum(resident_bytes(pid) for pid in worker_pids(server))
        self.num_samples += 1
        self.num_over += num_bytes > MEMORY_BYTES
        self.max_bytes = max(self.max_bytes, num_bytes)


@contextmanager
def memory_sampled(server: Server, results: Results) -> Iterator[None]:
    """Sample memory in a thread while the block runs."""
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            results.sample(server)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# -- requests ----------------------------------------------------------------------------------------------------------


def _body(model: str, prompt: str, max_tokens: int = MAX_TOKENS, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more
    }  # fmt: skip


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))


async def _collect_references(server: Server, results: Results, random: Random) -> None:
    prompts = [phrase(random) for _ in range(NUM_PROMPTS)]
    async with _session() as session:
        for name in NAMES:
            for prompt in prompts:
                async with session.post(
                    f"{server.url}/v1/completions", json=_body(name, prompt), headers=CLIENTS.next()
                ) as response:
                    results.references[name, prompt] = (await response.json())["choices"][0]["text"]


async def _requests(server: Server, results: Results, random: Random, count: int, num_kills: int) -> None:
    """Run a few requests at a time; each phase uses another pair of models. Some requests kill a worker first."""
    semaphore = asyncio.Semaphore(NUM_OPEN)
    prompts = sorted({prompt for _, prompt in results.references})
    kills = set(random.sample(range(PHASE, count - PHASE), num_kills))

    async def run_one(session: aiohttp.ClientSession, number: int) -> None:
        excluded = number // PHASE % len(NAMES)
        name = random.choice([name for index, name in enumerate(NAMES) if index != excluded])
        async with semaphore:
            if number in kills:
                await _kill_worker(server, results, random)
            await _run_and_compare(session, server, results, name, random.choice(prompts), random.random() < 0.5)

    async with _session() as session:
        await asyncio.gather(*(run_one(session, number) for number in range(count)))


async def _kill_worker(server: Server, results: Results, random: Random) -> None:
    while not (pids := worker_pids(server)):
        await asyncio.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(random.choice(pids), signal.SIGKILL)
        results.num_killed += 1


async def _run_and_compare(
    session: aiohttp.ClientSession, server: Server, results: Results, name: str, prompt: str, is_streamed: bool
) -> None:
    results.num_requests += 1
    try:
        if is_streamed:
            text = "".join([delta async for delta in _deltas(session, server, _body(name, prompt))])
        else:
            async with session.post(
                f"{server.url}/v1/completions", json=_body(name, prompt), headers=CLIENTS.next()
            ) as response:
                text = (await response.json())["choices"][0]["text"]
    except (aiohttp.ClientError, LookupError, RuntimeError, TimeoutError) as error:
        results.failed.append(f"{name}: {error!r}")
        return
    if text != results.references[name, prompt]:
        results.wrong.append(f"{name}: expected {results.references[name, prompt][:60]!r}, got {text[:60]!r}")


async def _deltas(session: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> Any:
    is_done = False
    async with session.post(
        f"{server.url}/v1/completions", json={**body, "stream": True}, headers=CLIENTS.next()
    ) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status} {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    yield choice["text"]
    if not is_done:
        raise RuntimeError("the stream ended without [DONE]")


async def _time_switches(server: Server, results: Results, count: int) -> list[float]:
    """Return the times to the first token of requests to a model that is not loaded."""
    times_s = []
    prompt = next(iter(results.references))[1]
    async with _session() as session:
        for _ in range(count):
            await asyncio.sleep(0.3)  # loaded models have stayed for their minimal time
            unloaded = [model["name"] for model in server.admin("/stats")["models"] if model["state"] == "unloaded"]
            start_s = time.perf_counter()
            deltas = _deltas(session, server, _body(unloaded[0], prompt))
            await anext(deltas)
            times_s.append(time.perf_counter() - start_s)
            async for _ in deltas:
                pass
    return times_s


# -- streams while a model loads ---------------------------------------------------------------------------------------


@dataclass
class Flood:
    """Error codes of requests to models that were being loaded."""

    codes: list[str] = field(default_factory=list)
    """Empty for a complete answer."""
    num_without_retry: int = 0

    async def ask(self, session: aiohttp.ClientSession, server: Server, name: str) -> None:
        async with session.post(
            f"{server.url}/v1/completions", json=_body(name, "hello", 2), headers=CLIENTS.next()
        ) as response:
            answer = await response.json()
            self.codes.append(answer.get("error", {}).get("code", ""))
            self.num_without_retry += response.status == 503 and "retry-after" not in response.headers


async def _stream_gaps(server: Server, flood: Flood | None = None) -> float:
    """Return the 95th percentile of the time between two tokens of the model that stays loaded. With a flood, the two
    other models, which do not fit together, get requests in turn."""
    times: list[float] = []
    async with _session() as session:

        async def send_flood(stop: asyncio.Event) -> None:
            number = 0
            while not stop.is_set():
                name = NAMES[1 + number % 2]
                number += 1
                assert flood is not None
                await asyncio.gather(*(flood.ask(session, server, name) for _ in range(2 * QUEUE)))

        stop = asyncio.Event()
        flood_task = asyncio.ensure_future(send_flood(stop)) if flood is not None else None
        async for _ in _deltas(session, server, STREAM):
            times.append(time.perf_counter())
        stop.set()
        if flood_task is not None:
            await flood_task
    gaps = [after - before for before, after in pairwise(times)]
    return quantiles(gaps, n=20)[-1]
