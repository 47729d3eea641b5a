"""Whole measurements: one load, a sweep over concurrencies, two servers interleaved.

Every round writes prompts of its own, from the seed and the round: what an earlier round left in a server's cache is
never a later one's hit. Two servers of one round get the same prompts.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from time import perf_counter
from typing import Any

from quire.bench.calls import CallMaker
from quire.bench.compare import HEADLINES
from quire.bench.http_client import SECONDS_BETWEEN_LOOKS, Client, ModelCard, ServerAddress
from quire.bench.load_run import LoadRun
from quire.bench.measures import Objective, measured
from quire.bench.outcome import CONNECT, Outcome, Run
from quire.bench.pace import Pace
from quire.bench.records import About, Record, record
from quire.bench.setup import LoadSetup
from quire.errors import ConfigError
from quire.workload.mixes import MIXES, MixSizes, some_visits
from quire.workload.visits import Visit
from quire.workload.writing import SpanWriter

LOADING = ("http 503", CONNECT)
"""What a server that is still loading answers."""
ROUND_FIGURES = (*HEADLINES, "completed", "failed", "duration", "total_output_tokens", "p99_ttft_ms", "p99_tpot_ms")

OnRunBegan = Callable[[str, int], None]
"""Told what begins and how many requests it has."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How to measure, beside the load itself."""

    model: str | None = None
    ready_s: float = 30.0
    """How long to wait for a server that does not answer yet."""
    num_warmups: int = 1
    ignores_eos: bool = True
    sends_priority: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    objective: Objective | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunListener:
    """Who is told how it goes."""

    began: OnRunBegan = lambda _title, _count: None
    watch: Callable[[Outcome], None] = lambda _outcome: None


class Bench:
    """One server under one setup. `opened` makes it; it lives as long as its client."""

    def __init__(self, client: Client, card: ModelCard, wishes: BenchOptions, listener: RunListener) -> None:
        self._client = client
        self.card = card
        self._wishes = wishes
        self._listener = listener

    @classmethod
    async def opened(cls, client: Client, wishes: BenchOptions, listener: RunListener) -> "Bench":
        """Once the server answers, and after its warm-up."""
        card = await client.ready(wishes.ready_s, wishes.model)
        bench = cls(client, card, wishes, listener)
        await bench._warm_up()
        return bench

    async def run(self, setup: LoadSetup, seed: str, title: str) -> tuple[Pace, Run]:
        """One load."""
        visits = setup.visits(seed, self.card.max_tokens)
        pace = setup.pace(visits, seed)
        self._listener.began(title, sum(len(visit.turns) for visit in visits))
        return pace, await self.run_visits(self.maker(setup, seed), visits, pace)

    async def run_visits(self, maker: CallMaker, visits: Sequence[Visit], pace: Pace) -> Run:
        """Some visits, as they are."""
        return await LoadRun(maker, self._client.send, self._listener.watch).run(visits, pace)

    def about(self, run_id: str) -> About:
        """What is said of this server's runs."""
        wishes = self._wishes
        return About(self._client.server.url, self.card.name, run_id, wishes.label, wishes.objective, wishes.metadata)

    def maker(self, setup: LoadSetup, seed: str) -> CallMaker:
        """Writes this server's calls."""
        wishes = self._wishes
        return CallMaker(
            self.card.name, setup.form, SpanWriter(seed), wishes.ignores_eos, wishes.sends_priority, wishes.extra
        )

    async def _warm_up(self) -> None:
        """A few short requests, so that no measured one pays for what is made once.

        A server may list its models while it loads them; so long as it says so, it is asked again.
        """
        until_s = perf_counter() + self._wishes.ready_s
        visits = some_visits(MIXES["distinct"], MixSizes(8, 4), "warm-up", self._wishes.num_warmups)
        maker = self.maker(LoadSetup(), token_hex(4))
        for visit in visits:
            outcome = await self._client.send(maker.call(visit, ()))
            while outcome.error in LOADING and perf_counter() < until_s:
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
                outcome = await self._client.send(maker.call(visit, ()))
            if not outcome.is_ok:
                raise ConfigError(
                    f"expected a response of {self._client.server.url} to a first request within "
                    f"{self._wishes.ready_s:g} s, it failed ({outcome.error}): {outcome.detail or 'no details'}; check "
                    "--model, --api-key and --no-ignore-eos",
                    code="first_request_failed",
                )


def seeded(setup: LoadSetup) -> LoadSetup:
    """With a fresh seed where none was given."""
    return setup if setup.seed else replace(setup, seed=token_hex(4))


async def run_load(
    server: ServerAddress, setup: LoadSetup, wishes: BenchOptions, listener: RunListener
) -> tuple[Record, Run]:
    """One load on one server."""
    async with Client(server) as client:
        bench = await Bench.opened(client, wishes, listener)
        pace, run = await bench.run(setup, setup.seed, setup.comes)
        return record(bench.about(token_hex(8)), setup, pace, run), run


async def sweep_clients(
    server: ServerAddress, setup: LoadSetup, concurrencies: Sequence[int], wishes: BenchOptions, listener: RunListener
) -> list[Record]:
    """The same load by more and more clients."""
    points, run_id = [], token_hex(8)
    async with Client(server) as client:
        bench = await Bench.opened(client, wishes, listener)
        for at, concurrency in enumerate(concurrencies):
            point = setup.with_concurrency(concurrency)
            # Prompts of its own, or a point measured twice would find the first one's in the cache.
            pace, run = await bench.run(point, f"{setup.seed} {at}", f"{concurrency} clients")
            points.append(record(bench.about(run_id), point, pace, run))
    return points


async def interleaved_servers(
    servers: tuple[ServerAddress, ServerAddress],
    setup: LoadSetup,
    num_rounds: int,
    wishes: BenchOptions,
    listener: RunListener,
) -> tuple[Record, Record]:
    """Two servers, round by round: A and B, then B and A, so that neither always goes first."""
    run_id, sides = token_hex(8), ("A", "B")
    async with Client(servers[0]) as first, Client(servers[1]) as second:
        benches = [await Bench.opened(client, wishes, listener) for client in (first, second)]
        runs: tuple[list[Run], list[Run]] = ([], [])
        paces: list[Pace] = []
        for number in range(num_rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                title = f"round {number + 1} of {num_rounds}, {sides[side]}"
                pace, run = await benches[side].run(setup, f"{setup.seed} {number}", title)
                paces.append(pace)
                runs[side].append(run)
        records = [
            _side(record(bench.about(run_id), setup, paces[0], _joined(own)), own, sides[place])
            for place, (bench, own) in enumerate(zip(benches, runs, strict=True))
        ]
    return records[0], records[1]


def _side(whole: Record, runs: Sequence[Run], side: str) -> Record:
    rounds = [{name: figures[name] for name in ROUND_FIGURES} for figures in map(measured, runs)]
    return {**whole, "side": side, "rounds": rounds}


def _joined(runs: Sequence[Run]) -> Run:
    """Rounds laid end to end, without what lay between them."""
    outcomes: list[Outcome] = []
    end_s = runs[0].started_s
    for run in runs:
        shift_s = end_s - run.started_s
        outcomes += [_shifted(one, shift_s) for one in run.outcomes]
        end_s += run.duration_s
    return Run(runs[0].started_s, end_s, tuple(outcomes))


def _shifted(one: Outcome, by_s: float) -> Outcome:
    return replace(
        one,
        due_s=one.due_s + by_s,
        sent_s=one.sent_s + by_s,
        ended_s=one.ended_s + by_s,
        token_s=tuple(moment_s + by_s for moment_s in one.token_s),
    )
