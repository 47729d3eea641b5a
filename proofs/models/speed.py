"""A mixture at the memory's speed: Qwen3-30B-A3B's shape in 4 bits, with as many layers as fit in 12 GiB.

Tokens are sampled: greedy answers of random weights soon repeat themselves, and equal tokens ask for equal experts.
"""

import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.bench_mixture import active_bytes, bench_mixture
from benchmarks.steps import GIB, OWN_TOKENS, filled, in_turn, real_text
from proofs.cpu.loading import AUTO, load_decoder
from proofs.framework.proof import Proof, section
from proofs.framework.ratios import spread
from quire.backends.cpu.measured_roof import read_sum
from quire.core.request import ResolvedSampling
from tests.support.models.models import Ask, Machine

NUM_LAYERS = 34
"""Of 48; the file has 11.9 GiB."""
CONTEXT = 288
LEAST_SPEED, LEAST_SPEEDUP = 0.5, 1.8


def _file(proof: Proof) -> Path:
    return bench_mixture(proof.sized(quick=4, full=NUM_LAYERS))


@section("a mixture beside the memory")
def memory_speed(proof: Proof) -> None:
    """One sequence: bytes of what it reads, over what the memory could have brought meanwhile; and sixteen of them."""
    file = _file(proof)
    proof.at_most("moe_file_gib", file.stat().st_size / GIB, 12.0)
    weights = active_bytes(file)
    data = np.zeros(GIB // 4, np.float32)
    data += 1.0
    started_s = time.perf_counter()
    model = load_decoder(file, **AUTO)
    load_s = time.perf_counter() - started_s
    machines = {rows: filled(model, [_ask(at) for at in range(rows)], "bfloat16") for rows in (1, 16)}
    calls = {"read": lambda: read_sum(data), **{f"rows {rows}": one.step for rows, one in machines.items()}}
    taken = in_turn(calls, proof.sized(quick=5, full=31))
    speed, one, sixteen = GIB / median(taken["read"]), taken["rows 1"], taken["rows 16"]
    told = f"{weights / 1e9:.2f} GB in {median(one) * 1e3:.1f} ms at {speed / 1e9:.1f} GB/s"
    proof.report("moe_load_s", load_s, "its file warm or not")
    proof.at_least("moe_speed_1", weights / (median(one) * speed), LEAST_SPEED, told)
    shares = [weights / GIB * read / step for read, step in zip(taken["read"], one, strict=True)]
    proof.report("moe_speed_1_spread", spread(shares))
    proof.report("moe_tokens_per_s", 1.0 / median(one))
    told = f"{16 / median(sixteen):.1f} / {1 / median(one):.1f} tokens/s"
    proof.at_least("moe_speedup_16", 16 * median(one) / median(sixteen), LEAST_SPEEDUP, told)
    rounds = [16 * alone / many for alone, many in zip(one, sixteen, strict=True)]
    proof.report("moe_speedup_16_spread", spread(rounds))
    proof.report("moe_tokens", _distinct(machines[16]), "different ones that sixteen sequences were given")


def _ask(at: int) -> Ask:
    text = real_text()[1_000 * (at + 1) :][:CONTEXT]
    return Ask(text, ResolvedSampling(temperature=1.0, max_tokens=OWN_TOKENS), seed=at)


def _distinct(machine: Machine) -> int:
    return len({token for ask in machine.asks for token in ask.tokens})
