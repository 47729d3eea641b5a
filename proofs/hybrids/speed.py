"""Speed of a 4-bit hybrid of Qwen3-Next's shape, with as many layers as fit in 12 GiB, against memory bandwidth."""

import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.bench_hybrid import bench_hybrid
from benchmarks.bench_mixture import active_bytes
from benchmarks.steps import (
    BLOCK,
    GIB,
    MAX_STEP_TOKENS,
    OWN_TOKENS,
    filled,
    interleave,
    make_runner,
    make_store,
    real_text,
)
from proofs.cpu.loading import AUTO, load_decoder
from proofs.framework.proof import Proof, section
from proofs.framework.ratios import spread
from quire.backends.cpu.layers import PARTS
from quire.backends.cpu.measured_roof import read_sum
from quire.core.request import ResolvedSampling
from quire.core.step import StepPlan, WorkItem
from tests.support.models.models import Ask

NUM_LAYERS = 13
"""Layers of the generated model, whose file has 11.7 GiB; the published model has 48."""
CONTEXT = 288
MIN_SPEED, MAX_SHARE = 0.5, 0.25


def _file(proof: Proof) -> Path:
    return bench_hybrid(proof.sized(quick=4, full=NUM_LAYERS))


@section("a hybrid beside the memory")
def memory_speed(proof: Proof) -> None:
    """One sequence: weight bytes per step over what the memory could have read in that time; then a prefill step."""
    file = _file(proof)
    proof.at_most("hybrid_file_gib", file.stat().st_size / GIB, 12.0)
    weights = active_bytes(file)
    data = np.zeros(GIB // 4, np.float32)
    data += 1.0
    started_s = time.perf_counter()
    model = load_decoder(file, **AUTO)
    proof.report("hybrid_load_s", time.perf_counter() - started_s, "its file cached by the system or not")
    proof.report("hybrid_slot_mb", model.slot_size * 4 / 1e6)
    ask = Ask(real_text()[1_000:][:CONTEXT], ResolvedSampling(temperature=1.0, max_tokens=OWN_TOKENS))
    machine = filled(model, [ask], "bfloat16")
    times = interleave({"read": lambda: read_sum(data), "step": machine.step}, proof.sized(quick=5, full=31))
    speed, step = GIB / median(times["read"]), times["step"]
    note = f"{weights / 1e9:.2f} GB in {median(step) * 1e3:.1f} ms at {speed / 1e9:.1f} GB/s"
    proof.at_least("hybrid_speed_1", weights / (median(step) * speed), MIN_SPEED, note)
    shares = [weights / GIB * read / step_s for read, step_s in zip(times["read"], step, strict=True)]
    proof.report("hybrid_speed_1_spread", spread(shares))
    proof.report("hybrid_tokens_per_s", 1.0 / median(step))
    seconds = np.zeros(len(PARTS))
    model.time_parts(seconds)
    runner = make_runner(model, make_store(model, MAX_STEP_TOKENS // BLOCK, "bfloat16"))
    table = tuple(range(1, MAX_STEP_TOKENS // BLOCK + 1))
    item = WorkItem(0, tuple(real_text()[:MAX_STEP_TOKENS]), 0, table, state_slot=1)
    scan_shares = []
    for _ in range(proof.sized(quick=3, full=7)):
        seconds[:] = 0.0
        runner.run(StepPlan(0, (), (item,)))
        scan_shares.append(float(seconds[PARTS.index("mix")] + seconds[PARTS.index("scan")]) / float(seconds.sum()))
    model.time_parts(None)
    note = f"a prompt's step of {MAX_STEP_TOKENS} tokens, {1e3 * float(seconds.sum()):.0f} ms"
    proof.at_most("scan_share", median(scan_shares), MAX_SHARE, note)
    proof.report("scan_share_spread", spread(scan_shares))
