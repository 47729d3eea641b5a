"""The `cached_tokens` that clients get, against what the worker computed: with hits, preemptions and dead workers.

The worker writes a diary of every prompt position that it computes (`tests.support.workers.recording`). It determines
the right number: the prompt tokens that were not computed in the request's first pass. A pass ends with a preemption,
or with the death of its worker. If the worker died before the first token, the right number is the larger of two: the
tokens that the first pass found in the cache, and those that the pass with the first token found.
"""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from tests.support.workers.recording import DIARY, Pass, death_of, passes_in


@section("cached tokens")
def cached_tokens(proof: Proof) -> None:
    """Send prompts with common prefixes to a pool that is too small, while workers die again and again."""
    count, num_deaths = proof.sized(quick=200, full=1000), proof.sized(quick=6, full=30)
    diary = proof.folder / "cached.diary"
    options = ("--blocks", "140", "--running", "16", "--queue", "2000", "--max-open-requests", "2000",
             "--step-s", "0.003", "--prompt-tokens", "32")  # fmt: skip
    with started(proof.folder, *options, environment={DIARY: str(diary)}) as server:
        cached_by_seed = asyncio.run(_Requests(server, proof.random, death_of(diary)).run(count, num_deaths))
        restarts = server.num_restarts()
        server.stop()
        lines = [line for line in server.access_lines() if "cached_tokens" in line]
    expected, num_broken_off, num_interrupted = _expected_tokens(diary)
    wrong = [seed for seed, cached in cached_by_seed.items() if seed in expected and expected[seed] != cached]
    for seed in wrong[:5]:
        say(f"  seed {seed}: the client got {cached_by_seed[seed]}, expected {expected[seed]} by the diary")
    num_left_out = count - len([seed for seed in cached_by_seed if seed in expected])
    num_preempted = sum(line["preemptions"] > 0 for line in lines)
    num_replayed = sum(line["replays"] > 0 for line in lines)
    proof.at_least("cached_tokens_hits", sum(value > 0 for value in cached_by_seed.values()), 1)
    proof.at_least("cached_tokens_preempted", num_preempted, 1)
    proof.at_least("cached_tokens_replayed", num_replayed, 1)
    proof.equals("cached_tokens_deaths", restarts, num_deaths)
    for name, number in (("broken_off", num_broken_off), ("interrupted", num_interrupted)):
        proof.at_least(f"cached_tokens_{name}", number, proof.sized(quick=0, full=1), "before their first token")
    proof.equals("cached_tokens_left_out", num_left_out, 0, f"of {count}")
    proof.equals("cached_tokens_wrong", len(wrong), 0, f"of {count - num_left_out}")


class _Requests:
    """Sends requests over HTTP; a seed identifies each of them in the diary."""

    def __init__(self, server: Server, random: Random, death: Path) -> None:
        self._server = server
        self._random = random
        self._death = death
        self._shared = [[random.randrange(40, 300) for _ in range(320)] for _ in range(6)]
        self._cached_by_seed: dict[int, int] = {}

    async def run(self, count: int, num_deaths: int) -> dict[int, int]:
        """Send all requests, and end the worker at even intervals; returns seed -> cached tokens."""
        gate = asyncio.Semaphore(40)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def send(seed: int) -> None:
                async with gate:
                    await self._send(session, seed)

            requests = asyncio.gather(*(send(seed) for seed in range(count)))
            for number in range(num_deaths):
                await self._wait_for((number + self._random.uniform(0.2, 0.8)) * count / (num_deaths + 1))
                self._death.touch()
            await requests
        return self._cached_by_seed

    async def _wait_for(self, num_answers: float) -> None:
        while len(self._cached_by_seed) < num_answers or self._death.exists():
            await asyncio.sleep(0.005)

    async def _send(self, session: aiohttp.ClientSession, seed: int) -> None:
        random = self._random
        ids = random.choice(self._shared)[: random.randint(1, 320)] + _new_tokens(random, 100)
        body = {"model": "oracle", "prompt": ids, "max_tokens": random.randint(1, 60), "seed": seed, "ignore_eos": True}
        body |= {"priority": random.choice([-1, 0, 1])}
        async with session.post(f"{self._server.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
        if response.status != 200 or answer["usage"]["completion_tokens"] != body["max_tokens"]:
            raise RuntimeError(f"{response.status}: {answer}")
        self._cached_by_seed[seed] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _new_tokens(random: Random, max_tokens: int) -> list[int]:
    return [random.randrange(40, 300) for _ in range(random.randint(1, max_tokens))]


def _expected_tokens(diary: Path) -> tuple[dict[int, int], int, int]:
    """Seed -> the right number of cached tokens; and how many requests lost a worker, or were preempted, before their
    first token. Requests whose first pass is not in the diary are left out.
    """
    passes: dict[int, list[Pass]] = {}
    for run in passes_in(diary):
        passes.setdefault(run.seed, []).append(run)
    expected, num_broken_off, num_interrupted = {}, 0, 0
    for seed, own_passes in passes.items():
        first_token_index = next((index for index, run in enumerate(own_passes) if run.has_token), None)
        if first_token_index is None or any(run.was_let_go_unseen for run in own_passes[: first_token_index + 1]):
            continue
        num_broken_off += first_token_index > 0
        num_interrupted += own_passes[first_token_index].was_interrupted
        expected[seed] = max(own_passes[0].first_position, own_passes[first_token_index].num_found)
    return expected, num_broken_off, num_interrupted
