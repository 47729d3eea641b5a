"""What is wanted, where: runners keep the wider contract, and results of several tokens change no answer."""

from benchmarks.record import say
from proofs.core.scheduler import simulated
from proofs.framework.proof import Proof, section
from quire.backends.conformance import contract as conformance
from quire.backends.conformance import wanted as conformance_wanted
from quire.backends.conformance.harness import ConformanceError, MakeRunner
from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from tests.support.workers import traces

SETTINGS = {"memory_bytes": 8 << 30, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024}


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
    runs = simulated(proof, proof.sized(quick=40, full=2_000), "drafts")
    num_right = sum(one.totals.num_accepted_tokens for one in runs)
    proof.at_least("sim_right_drafts", num_right, 1)
    proof.at_least("sim_wrong_drafts", sum(one.totals.num_draft_tokens for one in runs) - num_right, 1)
    proof.equals("sim_divergences", sum(bool(one.story) for one in runs), 0)


@section("recorded traces")
def prove_traces(proof: Proof) -> None:
    """Ordinary requests are planned and answered as they were before results could carry several tokens."""
    recorded, now = traces.recorded(), traces.traces()
    proof.at_least("replay_runs", len(recorded), 20)
    proof.equals("replay_mismatches", sum(now.get(run) != trace for run, trace in recorded.items()), 0)
