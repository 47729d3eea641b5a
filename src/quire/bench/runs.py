"""Complete measurements: one load, a sweep over numbers of clients, two servers interleaved.

Every round generates its own prompts from the seed and the round number, so it has no cache hits from earlier rounds.
Two servers get the same prompts in the same round.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from time import perf_counter
from typing import Any, TypeVar

import uvloop

from quire.bench.calls import CallMaker
from quire.bench.compare import HEADLINES
from quire.bench.http_client import SECONDS_BETWEEN_LOOKS, Client, ModelCard
from quire.bench.load_run import LoadRun, Pace
from quire.bench.measures import Objective, measured
from quire.bench.outcome import CONNECT, Outcome, Run
from quire.bench.records import About, Record, record
from quire.bench.setup import LoadSetup
from quire.errors import ConfigError
from quire.http_client import HttpServer
from quire.workload.mixes import MIXES, MixSizes, some_visits
from quire.workload.visits import Visit
from quire.workload.writing import SpanWriter

LOADING = ("http 503", CONNECT)
"""Errors of a server that is still loading."""
ROUND_FIGURES = (*HEADLINES, "completed", "failed", "duration", "total_output_tokens", "p99_ttft_ms", "p99_tpot_ms")

Result = TypeVar("Result")
OnRunBegan = Callable[[str, int], None]
"""Called at the start of a run, with its title and number of requests."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How to measure, independent of the load."""

    model: str | None = None
    ready_s: float = 30.0
    """How long to wait for a server that does not respond yet."""
    timeout_s: float = 600.0
    """The longest time for one response."""
    num_warmups: int = 1
    ignores_eos: bool = True
    sends_priority: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    objective: Objective | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunListener:
    """Callbacks for progress."""

    began: OnRunBegan = lambda _title, _count: None
    watch: Callable[[Outcome], None] = lambda _outcome: None


def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a measurement and return its result. uvloop handles an event in about half of asyncio's time; a slow client
    would distort the measurement."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Bench:
    """Measures one server. Create it with `opened`; it is valid as long as its client."""

    def __init__(self, client: Client, card: ModelCard, wishes: BenchOptions, listener: RunListener) -> None:
        self._client = client
        self.card = card
        self._wishes = wishes
        self._listener = listener

    @classmethod
    async def opened(cls, client: Client, wishes: BenchOptions, listener: RunListener) -> "Bench":
        """Wait until the server responds, and warm it up."""
        card = await client.ready(wishes.ready_s, wishes.model)
        bench = cls(client, card, wishes, listener)
        await bench._warm_up()
        return bench

    async def run(self, setup: LoadSetup, seed: str, title: str) -> tuple[Pace, Run]:
        """Run one load."""
        visits = setup.visits(seed, self.card.max_tokens)
        pace = setup.pace(visits, seed)
        self._listener.began(title, sum(len(visit.turns) for visit in visits))
        return pace, await self.run_visits(self.maker(setup, seed), visits, pace)

    async def run_visits(self, maker: CallMaker, visits: Sequence[Visit], pace: Pace) -> Run:
        """Run these visits."""
        return await LoadRun(maker, self._client.send, self._listener.watch).run(visits, pace)

    def about(self, run_id: str) -> About:
        """Return the metadata of this server's runs."""
        wishes = self._wishes
        return About(self._client.server.url, self.card.name, run_id, wishes.label, wishes.objective, wishes.metadata)

    def maker(self, setup: LoadSetup, seed: str) -> CallMaker:
        """Return the builder of this server's calls."""
        wishes = self._wishes
        return CallMaker(
            self.card.name, setup.form, SpanWriter(seed), wishes.ignores_eos, wishes.sends_priority, wishes.extra
        )

    async def _warm_up(self) -> None:
        """Send a few short requests, so that one-time costs are not measured.

        A server may list its models while it loads them. While it responds like that, requests are retried.
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
    """Return the setup, with a new random seed if it has none."""
    return setup if setup.seed else replace(setup, seed=token_hex(4))


async def run_load(
    server: HttpServer, setup: LoadSetup, wishes: BenchOptions, listener: RunListener
) -> tuple[Record, Run]:
    """Run one load on one server."""
    async with Client(server, wishes.timeout_s) as client:
        bench = await Bench.opened(client, wishes, listener)
        pace, run = await bench.run(setup, setup.seed, setup.comes)
        return record(bench.about(token_hex(8)), setup, pace, run), run


async def sweep_clients(
    server: HttpServer, setup: LoadSetup, concurrencies: Sequence[int], wishes: BenchOptions, listener: RunListener
) -> list[Record]:
    """Run the same load with different numbers of clients."""
    points, run_id = [], token_hex(8)
    async with Client(server, wishes.timeout_s) as client:
        bench = await Bench.opened(client, wishes, listener)
        for at, concurrency in enumerate(concurrencies):
            point = setup.with_concurrency(concurrency)
            # A seed per point: if a number of clients is measured twice, the second time must have no cache hits.
            pace, run = await bench.run(point, f"{setup.seed} {at}", f"{concurrency} clients")
            points.append(record(bench.about(run_id), point, pace, run))
    return points


async def interleaved_servers(
    servers: tuple[HttpServer, HttpServer],
    setup: LoadSetup,
    num_rounds: int,
    wishes: BenchOptions,
    listener: RunListener,
) -> tuple[Record, Record]:
    """Measure two servers, round by round: A and B, then B and A, so that neither is always first."""
    run_id, sides = token_hex(8), ("A", "B")
    clients = [Client(server, wishes.timeout_s) for server in servers]
    async with clients[0], clients[1]:
        benches = [await Bench.opened(client, wishes, listener) for client in clients]
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
    """Concatenate rounds, without the time between them."""
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
