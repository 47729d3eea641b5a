"""How fast steps are: beside the memory's speed, beside other formats of the same model, beside busy neighbours.

Whatever is compared runs turn about in one process; a figure is a ratio of medians, `..._spread` beside it the
interquartile range of the rounds.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np

from benchmarks.bench_models import bench_model
from benchmarks.record import abilities, say
from benchmarks.step_clock import watching
from benchmarks.steps import GIB, decoding, in_turn
from benchmarks.test_model import smollm2_file
from proofs.cpu.loading import AUTO, BFLOAT16, FLOAT32, load_decoder
from proofs.framework.proof import Proof, Section, section
from proofs.framework.ratios import report_ratio, spread
from proofs.numerics import native
from quire.backends.cpu.measured_roof import read_sum
from tests.support.machine.spawned import stop

ROWS = (1, 16, 64)
CONTEXT = 288
MEMORY_SPEED = {"1b": 0.70, "8b": 0.75}
Q4_OVER_FLOAT32 = {1: 1.8, 16: 1.3, 64: 1.2}
BF16_OVER_FLOAT32 = {1: 1.2, 16: 1.0, 64: 1.0}
INTEGER_ABILITIES = {"avx512_vnni", "avx_vnni", "amx_int8"}
NEIGHBOURS = {1: 0.35, 2: 0.25}
BUSY = "while True: pass"


# -- beside the memory -------------------------------------------------------------------------------------------------


@section("the memory's speed")
def memory_speed(proof: Proof) -> None:
    """One sequence: bytes of weights that a step reads, over what the memory could have brought meanwhile."""
    data = np.zeros(GIB // 4, np.float32)
    data += 1.0
    for name, least in MEMORY_SPEED.items():
        file = bench_model(name)
        weights = step_bytes(file)
        machine = decoding(load_decoder(file, **AUTO), 1, CONTEXT, dtype="bfloat16")
        taken = in_turn({"read": lambda: read_sum(data), "step": machine.step}, proof.sized(quick=5, full=31))
        speed = GIB / median(taken["read"])
        told = f"{weights / 1e9:.2f} GB in {median(taken['step']) * 1e3:.1f} ms at {speed / 1e9:.1f} GB/s"
        proof.at_least(f"memory_speed_{name}", weights / (median(taken["step"]) * speed), least, told)
        rounds = [weights / GIB * read / step for read, step in zip(taken["read"], taken["step"], strict=True)]
        proof.report(f"memory_speed_{name}_spread", spread(rounds))
        proof.report(f"tokens_per_s_{name}", 1.0 / median(taken["step"]))
        del machine
        gc.collect()
    proof.report("bandwidth_gb_s", speed / 1e9, "a sum over 1 GiB, the median")


def step_bytes(file: Path) -> int:
    """What a file has of matrices that every step reads: all but an embedding that is not the head."""
    tensors = gguf.GGUFReader(file).tensors
    has_head = any(tensor.name == "output.weight" for tensor in tensors)
    skipped = "token_embd.weight" if has_head else ""
    return sum(int(tensor.n_bytes) for tensor in tensors if len(tensor.shape) > 1 and tensor.name != skipped)


# -- formats of the test model -----------------------------------------------------------------------------------------


def _against_float32(proof: Proof, name: str, settings: Mapping[str, Any], least: Mapping[int, float] | None) -> None:
    models = {"full": load_decoder(smollm2_file(), **FLOAT32), "small": load_decoder(smollm2_file(), **settings)}
    kv = {"full": "float32", "small": "bfloat16"}
    rounds = proof.sized(quick=7, full=31)
    for rows in ROWS:
        calls = {
            key: decoding(model, rows, CONTEXT - rounds // 2, dtype=kv[key]).step  # type: ignore[arg-type]
            for key, model in models.items()
        }
        taken = in_turn(calls, rounds)
        report_ratio(proof, f"{name}_{rows}", taken["full"], taken["small"], least[rows] if least else None)
        proof.report(f"{name}_{rows}_tokens_per_s", rows / median(taken["small"]))


@section("four bits over float32")
def q4_over_float32(proof: Proof) -> None:
    """As the 4-bit file starts by default, keys and values in bfloat16, over everything in float32."""
    is_held = bool(INTEGER_ABILITIES.intersection(abilities()))
    _against_float32(proof, "q4_over_float32", AUTO, Q4_OVER_FLOAT32 if is_held else None)


@section("bfloat16 over float32")
def bf16_over_float32(proof: Proof) -> None:
    """Weights, keys and values."""
    _against_float32(proof, "bf16_over_float32", BFLOAT16, BF16_OVER_FLOAT32)


# -- the host, neighbours, prefill -------------------------------------------------------------------------------------


@section("the host's part of one row")
def host_ms(proof: Proof) -> None:
    """What of a one-row step is neither a product nor a native kernel."""
    model = load_decoder(smollm2_file(), **AUTO)
    machine = decoding(model, 1, CONTEXT, dtype="bfloat16")
    with watching(machine, model) as clock:
        for _ in range(proof.sized(quick=30, full=200)):
            clock.step(machine)
    milliseconds = [step["host"] * 1e3 for step in clock.steps]
    proof.at_most("host_ms_1", median(milliseconds), 0.8)
    proof.report("host_ms_1_spread", spread(milliseconds))
    for part, seconds in clock.shares().items():
        say(f"  {part:14} {seconds * 1e3:7.3f} ms")


@section("busy neighbours")
def neighbours(proof: Proof) -> None:
    """One stream's tokens per second beside programs that keep a core busy each, over alone."""
    machine = decoding(load_decoder(smollm2_file(), **AUTO), 1, CONTEXT, dtype="bfloat16")
    steps, rounds = proof.sized(quick=10, full=20), proof.sized(quick=3, full=7)
    rates: dict[int, list[float]] = {0: [], **{count: [] for count in NEIGHBOURS}}
    for _ in range(rounds):
        for count, found in rates.items():
            with busy(count):
                found.append(_rate(machine.step, steps))
    for count, least in NEIGHBOURS.items():
        key = "neighbour_ratio" if count == 1 else "neighbour_ratio_two"
        told = f"{median(rates[count]):.1f} / {median(rates[0]):.1f} tokens/s"
        proof.at_least(key, median(rates[count]) / median(rates[0]), least, told)
        proof.report(f"{key}_spread", spread([one / alone for one, alone in zip(rates[count], rates[0], strict=True)]))


def _rate(step: Callable[[], object], count: int) -> float:
    step()
    started_s = time.perf_counter()
    for _ in range(count):
        step()
    return count / (time.perf_counter() - started_s)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many programs that never rest."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in running:
            stop(process)


@section("prefill")
def prefill(proof: Proof) -> None:
    """As proof-native measures it, in float32; how near decode steps come to their roof is told beside it."""
    figures = _figures_of(proof, native.prefills)
    proof.at_least("prefill_512", figures["prefill_512"], 0.80)
    proof.report("prefill_512_spread", figures["prefill_512_spread"])
    for key, value in _figures_of(proof, native.roofs).items():
        if key.startswith("roof_"):
            proof.report(key, value)


def _figures_of(proof: Proof, other: Section) -> dict[str, Any]:
    """What a section of proof-native says, held to nothing."""
    inner = Proof("native", proof.scale, proof.folder, random=proof.random)
    other.prove(inner)
    return inner.figures
