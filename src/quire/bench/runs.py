"""Complete measurements: one load, a sweep over numbers of clients, two servers interleaved.

Every round generates its own prompts from the seed and the round number, so it has no cache hits from earlier rounds.
Two compared servers get the same prompts in the same round.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from time import perf_counter
from typing import Any, TypeVar

import uvloop

from quire.bench.calls import CallMaker
from quire.bench.compare import MAIN_METRICS
from quire.bench.http_client import RETRY_INTERVAL_S, Client, ModelCard
from quire.bench.load_run import LoadRun, Pace
from quire.bench.measures import Objective, metrics_of
from quire.bench.outcome import CONNECT, Outcome, Run
from quire.bench.records import Record, RunMetadata, record
from quire.bench.setup import LoadSetup
from quire.errors import ConfigError
from quire.http_client import ServerAddress
from quire.workload.mixes import MIXES, MixSizes, sample_visits
from quire.workload.visits import Visit
from quire.workload.writing import SpanWriter

LOADING_ERRORS = ("http 503", CONNECT)
"""Values of `Outcome.error` while a server is still loading."""
ROUND_METRICS = (*MAIN_METRICS, "completed", "failed", "duration", "total_output_tokens", "p99_ttft_ms", "p99_tpot_ms")

Result = TypeVar("Result")
OnRunStart = Callable[[str, int], None]
"""Called at the start of a run, with its title and number of requests."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a measurement that do not change its load."""

    model: str | None = None
    ready_s: float = 30.0
    """Longest wait for a server that does not respond yet."""
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

    on_run_start: OnRunStart = lambda _title, _count: None
    on_outcome: Callable[[Outcome], None] = lambda _outcome: None


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a measurement on uvloop and return its result. uvloop needs about half of asyncio's time per event, and a
    slow client would distort the measurement."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Bench:
    """Measures one server. Create it with `open`; it can be used until its client is closed."""

    def __init__(self, client: Client, card: ModelCard, options: BenchOptions, listener: RunListener) -> None:
        self._client = client
        self.card = card
        self._options = options
        self._listener = listener

    @classmethod
    async def open(cls, client: Client, options: BenchOptions, listener: RunListener) -> "Bench":
        """Wait until the server responds, and warm it up."""
        card = await client.ready(options.ready_s, options.model)
        bench = cls(client, card, options, listener)
        await bench._warm_up()
        return bench

    async def run(self, setup: LoadSetup, seed: str, title: str) -> tuple[Pace, Run]:
        """Run one load."""
        visits = setup.visits(seed, self.card.max_tokens)
        pace = setup.pace(visits, seed)
        self._listener.on_run_start(title, sum(len(visit.turns) for visit in visits))
        return pace, await self.run_visits(self.maker(setup, seed), visits, pace)

    async def run_visits(self, maker: CallMaker, visits: Sequence[Visit], pace: Pace) -> Run:
        """Run these visits."""
        return await LoadRun(maker, self._client.send, self._listener.on_outcome).run(visits, pace)

    def metadata(self, run_id: str) -> RunMetadata:
        """Return the metadata of this server's runs."""
        options, url = self._options, self._client.server.url
        return RunMetadata(url, self.card.name, run_id, options.label, options.objective, options.metadata)

    def maker(self, setup: LoadSetup, seed: str) -> CallMaker:
        """Return the builder of this server's calls."""
        model, options = self.card.name, self._options
        return CallMaker(
            model, setup.prompt_format, SpanWriter(seed), options.ignores_eos, options.sends_priority, options.extra
        )

    async def _warm_up(self) -> None:
        """Send a few short requests, so that one-time costs are not measured.

        A server may list its models while it loads them. A request that fails meanwhile is retried.
        """
        deadline_s = perf_counter() + self._options.ready_s
        visits = sample_visits(MIXES["distinct"], MixSizes(8, 4), "warm-up", self._options.num_warmups)
        maker = self.maker(LoadSetup(), token_hex(4))
        for visit in visits:
            outcome = await self._client.send(maker.make_call(visit, ()))
            while outcome.error in LOADING_ERRORS and perf_counter() < deadline_s:
                await asyncio.sleep(RETRY_INTERVAL_S)
                outcome = await self._client.send(maker.make_call(visit, ()))
            if not outcome.is_ok:
                raise ConfigError(
                    f"expected a first response from {self._client.server.url} within "
                    f"{self._options.ready_s:g} s, got {outcome.error}: {outcome.detail or 'no details'}; check "
                    "--model, --api-key and --no-ignore-eos",
                    code="first_request_failed",
                )


def seeded(setup: LoadSetup) -> LoadSetup:
    """Return the setup, with a new random seed if it has none."""
    return setup if setup.seed else replace(setup, seed=token_hex(4))


async def run_load(
    server: ServerAddress, setup: LoadSetup, options: BenchOptions, listener: RunListener
) -> tuple[Record, Run]:
    """Run one load on one server."""
    async with Client(server, options.timeout_s) as client:
        bench = await Bench.open(client, options, listener)
        pace, run = await bench.run(setup, setup.seed, setup.arrival_process)
        return record(bench.metadata(token_hex(8)), setup, pace, run), run


async def sweep_clients(
    server: ServerAddress, setup: LoadSetup, concurrencies: Sequence[int], options: BenchOptions, listener: RunListener
) -> list[Record]:
    """Run the same load with different numbers of clients."""
    points, run_id = [], token_hex(8)
    async with Client(server, options.timeout_s) as client:
        bench = await Bench.open(client, options, listener)
        for index, concurrency in enumerate(concurrencies):
            point = setup.with_concurrency(concurrency)
            # A seed per point: if a number of clients is measured twice, the second run must have no cache hits.
            pace, run = await bench.run(point, f"{setup.seed} {index}", f"{concurrency} clients")
            points.append(record(bench.metadata(run_id), point, pace, run))
    return points


async def measure_interleaved(
    servers: tuple[ServerAddress, ServerAddress],
    setup: LoadSetup,
    num_rounds: int,
    options: BenchOptions,
    listener: RunListener,
) -> tuple[Record, Record]:
    """Measure two servers, round by round: A and B, then B and A, so that neither is always first."""
    run_id, names = token_hex(8), ("A", "B")
    clients = [Client(server, options.timeout_s) for server in servers]
    async with clients[0], clients[1]:
        benches = [await Bench.open(client, options, listener) for client in clients]
        runs: tuple[list[Run], list[Run]] = ([], [])
        paces: list[Pace] = []
        for number in range(num_rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                title = f"round {number + 1} of {num_rounds}, {names[side]}"
                pace, run = await benches[side].run(setup, f"{setup.seed} {number}", title)
                paces.append(pace)
                runs[side].append(run)
        records = [
            _with_rounds(record(bench.metadata(run_id), setup, paces[0], _concatenate(rounds)), rounds, name)
            for bench, rounds, name in zip(benches, runs, names, strict=True)
        ]
    return records[0], records[1]


def _with_rounds(whole_run: Record, runs: Sequence[Run], side: str) -> Record:
    rounds = [{name: metrics[name] for name in ROUND_METRICS} for metrics in map(metrics_of, runs)]
    return {**whole_run, "side": side, "rounds": rounds}


def _concatenate(runs: Sequence[Run]) -> Run:
    """Concatenate rounds, without the time between them."""
    outcomes: list[Outcome] = []
    end_s = runs[0].started_s
    for run in runs:
        shift_s = end_s - run.started_s
        outcomes += [_shift(outcome, shift_s) for outcome in run.outcomes]
        end_s += run.duration_s
    return Run(runs[0].started_s, end_s, tuple(outcomes))


def _shift(outcome: Outcome, by_s: float) -> Outcome:
    return replace(
        outcome,
        due_s=outcome.due_s + by_s,
        sent_s=outcome.sent_s + by_s,
        ended_s=outcome.ended_s + by_s,
        token_s=tuple(moment_s + by_s for moment_s in outcome.token_s),
    )
