"""What clients are told of cached tokens, held against what the worker computed: hits, preemptions and dead workers.

The worker keeps a diary of every prompt position it was made to compute (`tests.support.workers.recording`). What a
client must be told follows from that alone: its prompt tokens that nobody computed for it on its first pass. A pass
ends with the first preemption. A worker that dies before the first token leaves a pass unfinished: what it had found
when it began counts, though its successor had to compute it, and what the pass that brought the first token found if
that is more.
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
    """Prompts that share beginnings, in a pool that is too small, and a worker that dies again and again."""
    count, num_deaths = proof.sized(quick=200, full=1000), proof.sized(quick=6, full=30)
    diary = proof.folder / "cached.diary"
    words = ("--blocks", "140", "--running", "16", "--queue", "2000", "--max-open-requests", "2000",
             "--step-s", "0.003", "--prompt-tokens", "32")  # fmt: skip
    with started(proof.folder, *words, environment={DIARY: str(diary)}) as server:
        told = asyncio.run(_Asking(server, proof.random, death_of(diary)).all_of(count, num_deaths))
        restarts = server.num_restarts()
        server.stop()
        lines = [line for line in server.access_lines() if "cached_tokens" in line]
    expected, num_broken_off, num_interrupted = _expected(diary)
    wrong = [seed for seed, cached in told.items() if seed in expected and expected[seed] != cached]
    for seed in wrong[:5]:
        say(f"  seed {seed}: {told[seed]} told, {expected[seed]} computed from the diary")
    num_left_out = count - len([seed for seed in told if seed in expected])
    num_preempted = sum(line["preemptions"] > 0 for line in lines)
    num_replayed = sum(line["replays"] > 0 for line in lines)
    proof.at_least("cached_tokens_hits", sum(value > 0 for value in told.values()), 1)
    proof.at_least("cached_tokens_preempted", num_preempted, 1)
    proof.at_least("cached_tokens_replayed", num_replayed, 1)
    proof.equals("cached_tokens_deaths", restarts, num_deaths)
    for name, number in (("broken_off", num_broken_off), ("interrupted", num_interrupted)):
        proof.at_least(f"cached_tokens_{name}", number, proof.sized(quick=0, full=1), "before their first token")
    proof.equals("cached_tokens_left_out", num_left_out, 0, f"of {count}")
    proof.equals("cached_tokens_wrong", len(wrong), 0, f"of {count - num_left_out}")


class _Asking:
    """Requests over HTTP, each known by its seed."""

    def __init__(self, server: Server, dice: Random, death: Path) -> None:
        self._server = server
        self._dice = dice
        self._death = death
        self._shared = [[dice.randrange(40, 300) for _ in range(320)] for _ in range(6)]
        self._told: dict[int, int] = {}

    async def all_of(self, count: int, num_deaths: int) -> dict[int, int]:
        """What each was told. The worker is told to die after every so many."""
        gate = asyncio.Semaphore(40)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(seed: int) -> None:
                async with gate:
                    await self._ask(session, seed)

            asking = asyncio.gather(*(one(seed) for seed in range(count)))
            for at in range(num_deaths):
                await self._until((at + self._dice.uniform(0.2, 0.8)) * count / (num_deaths + 1))
                self._death.touch()
            await asking
        return self._told

    async def _until(self, num_told: float) -> None:
        while len(self._told) < num_told or self._death.exists():
            await asyncio.sleep(0.005)

    async def _ask(self, session: aiohttp.ClientSession, seed: int) -> None:
        dice = self._dice
        ids = dice.choice(self._shared)[: dice.randint(1, 320)] + _fresh(dice, 100)
        body = {"model": "oracle", "prompt": ids, "max_tokens": dice.randint(1, 60), "seed": seed, "ignore_eos": True}
        body |= {"priority": dice.choice([-1, 0, 1])}
        async with session.post(f"{self._server.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
        if response.status != 200 or answer["usage"]["completion_tokens"] != body["max_tokens"]:
            raise RuntimeError(f"{response.status}: {answer}")
        self._told[seed] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _fresh(dice: Random, most: int) -> list[int]:
    return [dice.randrange(40, 300) for _ in range(dice.randint(1, most))]


def _expected(diary: Path) -> tuple[dict[int, int], int, int]:
    """What each seed must be told, and how many lost a worker or were preempted before their first token. One whose
    first pass cannot be seen is not among them.
    """
    passes: dict[int, list[Pass]] = {}
    for one in passes_in(diary):
        passes.setdefault(one.seed, []).append(one)
    expected, num_broken_off, num_interrupted = {}, 0, 0
    for seed, own in passes.items():
        brought = next((at for at, one in enumerate(own) if one.has_token), None)
        if brought is None or any(one.was_let_go_unseen for one in own[: brought + 1]):
            continue
        num_broken_off += brought > 0
        num_interrupted += own[brought].was_interrupted
        expected[seed] = max(own[0].first_position, own[brought].num_found)
    return expected, num_broken_off, num_interrupted
