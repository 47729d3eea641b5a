"""What is wanted, where: runners keep the wider contract, and results of several tokens change no answer."""

from concurrent.futures import ProcessPoolExecutor
from random import SystemRandom
from typing import NamedTuple

from benchmarks.record import say
from proofs.framework.machinery import NUM_PROCESSES
from proofs.framework.proof import Proof, section
from quire.backends.conformance import contract as conformance
from quire.backends.conformance import wanted as conformance_wanted
from quire.backends.conformance.harness import ConformanceError, MakeRunner
from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from quire.errors import QuireError
from quire.sim.server.config import configured
from quire.sim.server.simulation import Simulation
from tests.support.workers import traces

SETTINGS = {"memory_bytes": 8 << 30, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024}


class SimRun(NamedTuple):
    """One seed's life of a server that guesses ahead."""

    num_right: int
    num_wrong: int
    story: str
    """What went wrong, if anything did, and the line that replays it."""


def simulate(seed: int) -> SimRun:
    """Everything goes wrong, beside drafts, several tokens in a result and requests for their prompt alone."""
    config = configured("drafts", seed)
    replay = f"quire sim --scenario drafts --seed {seed} --requests {config.num_requests}"
    try:
        report = Simulation(config).run()
    except (QuireError, AssertionError, IndexError, KeyError, ValueError) as error:
        return SimRun(0, 0, f"{replay}: {error!r}")
    totals = report.totals
    story = f"{replay}: {report.violations[0]}" if report.violations else ""
    return SimRun(totals.num_accepted_tokens, totals.num_draft_tokens - totals.num_accepted_tokens, story)


@section("conformance")
def prove_conformance(proof: Proof) -> None:
    """The kit, asked of the oracle, of torch and of the CPU backend."""
    num_broken = sum(not keeps_the_contract(name, make) for name, make in runners())
    proof.at_least("conformance_new_checks", len(conformance_wanted.CHECKS), 4)
    proof.holds(
        "conformance", num_broken == 0, f"{len(conformance.CHECKS)} checks on the oracle, torch and the CPU backend"
    )


def runners() -> list[tuple[str, MakeRunner]]:
    """The oracle, transformers' own modules, and the CPU backend in both types of weights."""
    from tests.support.models import architectures  # noqa: PLC0415 - transformers makes the models, and takes seconds
    from tests.support.models.models import runners_of  # noqa: PLC0415

    def loaded(name: str, block_size: int, dtype: str = "float32") -> tuple[str, MakeRunner]:
        settings = {**SETTINGS, "block_size": block_size, "dtype": dtype}
        return f"{name} in {dtype}", runners_of(architectures.directory(name), **settings)

    return [
        ("oracle", lambda: OracleRunner(Capacity(48, 8, 1 << 20, 256, 50, 64))),
        loaded("llama", 8),
        loaded("gemma2", 8),
        loaded("llama-native", 16),
        loaded("llama-native", 16, "bfloat16"),
    ]


def keeps_the_contract(name: str, make_runner: MakeRunner) -> bool:
    """Whether a runner passes the whole kit; what it fails in is told."""
    try:
        conformance.check_all(make_runner)
    except ConformanceError as error:
        say(f"    {name}: {error}")
        return False
    return True


@section("several tokens in a result")
def prove_simulations(proof: Proof) -> None:
    """Whole lives of servers that guess ahead: every client gets what it would have got alone."""
    num_seeds = proof.sized(quick=40, full=2_000)
    dice = SystemRandom()
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        runs = list(pool.map(simulate, [dice.getrandbits(40) for _ in range(num_seeds)], chunksize=4))
    stories = [one.story for one in runs if one.story]
    proof.at_least("sim_seeds", len(runs), num_seeds)
    proof.at_least("sim_right_drafts", sum(one.num_right for one in runs), 1)
    proof.at_least("sim_wrong_drafts", sum(one.num_wrong for one in runs), 1)
    proof.none("sim_divergences", stories)


@section("recorded traces")
def prove_traces(proof: Proof) -> None:
    """Ordinary requests are planned and answered as they were before results could carry several tokens."""
    recorded, now = traces.recorded(), traces.traces()
    proof.at_least("replay_runs", len(recorded), 20)
    proof.equals("replay_mismatches", sum(now.get(run) != trace for run, trace in recorded.items()), 0)
