"""Speed of a 4-bit mixture of Qwen3-30B-A3B's shape, with as many layers as fit in 12 GiB, against memory bandwidth.

Tokens are sampled: greedy answers of random weights soon repeat themselves, and equal tokens use equal experts.
"""

import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.bench_mixture import active_bytes, bench_mixture
from benchmarks.steps import GIB, OWN_TOKENS, filled, interleave, real_text
from proofs.cpu.loading import AUTO, load_decoder
from proofs.framework.proof import Proof, section
from proofs.framework.ratios import spread
from quire.backends.cpu.measured_roof import read_sum
from quire.core.request import ResolvedSampling
from tests.support.models.models import Ask, Machine

NUM_LAYERS = 34
"""Layers of the generated model, whose file has 11.9 GiB; the published model has 48."""
CONTEXT = 288
MIN_SPEED, MIN_SPEEDUP = 0.5, 1.8


def _file(proof: Proof) -> Path:
    return bench_mixture(proof.sized(quick=4, full=NUM_LAYERS))


@section("a mixture beside the memory")
def memory_speed(proof: Proof) -> None:
    """One sequence: weight bytes per step over what the memory could have read in that time; then sixteen sequences."""
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
    times = interleave(calls, proof.sized(quick=5, full=31))
    speed, one, sixteen = GIB / median(times["read"]), times["rows 1"], times["rows 16"]
    note = f"{weights / 1e9:.2f} GB in {median(one) * 1e3:.1f} ms at {speed / 1e9:.1f} GB/s"
    proof.report("moe_load_s", load_s, "its file cached by the system or not")
    proof.at_least("moe_speed_1", weights / (median(one) * speed), MIN_SPEED, note)
    shares = [weights / GIB * read / step for read, step in zip(times["read"], one, strict=True)]
    proof.report("moe_speed_1_spread", spread(shares))
    proof.report("moe_tokens_per_s", 1.0 / median(one))
    note = f"{16 / median(sixteen):.1f} / {1 / median(one):.1f} tokens/s"
    proof.at_least("moe_speedup_16", 16 * median(one) / median(sixteen), MIN_SPEEDUP, note)
    rounds = [16 * alone / many for alone, many in zip(one, sixteen, strict=True)]
    proof.report("moe_speedup_16_spread", spread(rounds))
    proof.report("moe_tokens", _num_distinct(machines[16]), "distinct tokens of sixteen sequences")


def _ask(number: int) -> Ask:
    text = real_text()[1_000 * (number + 1) :][:CONTEXT]
    return Ask(text, ResolvedSampling(temperature=1.0, max_tokens=OWN_TOKENS), seed=number)


def _num_distinct(machine: Machine) -> int:
    return len({token for ask in machine.asks for token in ask.tokens})
