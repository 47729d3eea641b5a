"""Speed of decode steps: against memory bandwidth, against other formats of a model, and next to busy processes.

Compared calls alternate in one process; a figure is a ratio of medians, and `..._spread` is the interquartile range of
the rounds.
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
from benchmarks.step_clock import step_timers
from benchmarks.steps import GIB, decoding, interleave
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
BUSY_LOOP = "while True: pass"


# -- memory bandwidth --------------------------------------------------------------------------------------------------


@section("the memory's speed")
def memory_speed(proof: Proof) -> None:
    """One sequence: weight bytes per step over what the memory could have read in that time."""
    data = np.zeros(GIB // 4, np.float32)
    data += 1.0
    for name, bound in MEMORY_SPEED.items():
        file = bench_model(name)
        weights = step_bytes(file)
        machine = decoding(load_decoder(file, **AUTO), 1, CONTEXT, dtype="bfloat16")
        times = interleave({"read": lambda: read_sum(data), "step": machine.step}, proof.sized(quick=5, full=31))
        speed = GIB / median(times["read"])
        note = f"{weights / 1e9:.2f} GB in {median(times['step']) * 1e3:.1f} ms at {speed / 1e9:.1f} GB/s"
        proof.at_least(f"memory_speed_{name}", weights / (median(times["step"]) * speed), bound, note)
        rounds = [weights / GIB * read / step for read, step in zip(times["read"], times["step"], strict=True)]
        proof.report(f"memory_speed_{name}_spread", spread(rounds))
        proof.report(f"tokens_per_s_{name}", 1.0 / median(times["step"]))
        del machine
        gc.collect()
    proof.report("bandwidth_gb_s", speed / 1e9, "a sum over 1 GiB, the median")


def step_bytes(file: Path) -> int:
    """Return the bytes of matrices that every step reads: all but an embedding that is not also the head."""
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
        times = interleave(calls, rounds)
        report_ratio(proof, f"{name}_{rows}", times["full"], times["small"], least[rows] if least else None)
        proof.report(f"{name}_{rows}_tokens_per_s", rows / median(times["small"]))


@section("four bits over float32")
def q4_over_float32(proof: Proof) -> None:
    """The 4-bit file with default settings and bfloat16 keys and values, against float32 for everything."""
    has_bound = bool(INTEGER_ABILITIES.intersection(abilities()))
    _against_float32(proof, "q4_over_float32", AUTO, Q4_OVER_FLOAT32 if has_bound else None)


@section("bfloat16 over float32")
def bf16_over_float32(proof: Proof) -> None:
    """Weights, keys and values in bfloat16, against float32."""
    _against_float32(proof, "bf16_over_float32", BFLOAT16, BF16_OVER_FLOAT32)


# -- the host, neighbours, prefill -------------------------------------------------------------------------------------


@section("the host's part of one row")
def host_ms(proof: Proof) -> None:
    """The part of a one-row step that is neither a matrix product nor a native kernel."""
    model = load_decoder(smollm2_file(), **AUTO)
    machine = decoding(model, 1, CONTEXT, dtype="bfloat16")
    with step_timers(machine, model) as clock:
        for _ in range(proof.sized(quick=30, full=200)):
            clock.step(machine)
    milliseconds = [step["host"] * 1e3 for step in clock.steps]
    proof.at_most("host_ms_1", median(milliseconds), 0.8)
    proof.report("host_ms_1_spread", spread(milliseconds))
    for part, seconds in clock.shares().items():
        say(f"  {part:14} {seconds * 1e3:7.3f} ms")


@section("busy neighbours")
def neighbours(proof: Proof) -> None:
    """Tokens per second of one stream while other processes keep cores busy, over those without."""
    machine = decoding(load_decoder(smollm2_file(), **AUTO), 1, CONTEXT, dtype="bfloat16")
    steps, rounds = proof.sized(quick=10, full=20), proof.sized(quick=3, full=7)
    rates: dict[int, list[float]] = {0: [], **{count: [] for count in NEIGHBOURS}}
    for _ in range(rounds):
        for count, values in rates.items():
            with busy_processes(count):
                values.append(_rate(machine.step, steps))
    for count, bound in NEIGHBOURS.items():
        key = "neighbour_ratio" if count == 1 else "neighbour_ratio_two"
        note = f"{median(rates[count]):.1f} / {median(rates[0]):.1f} tokens/s"
        proof.at_least(key, median(rates[count]) / median(rates[0]), bound, note)
        proof.report(f"{key}_spread", spread([one / alone for one, alone in zip(rates[count], rates[0], strict=True)]))


def _rate(step: Callable[[], object], count: int) -> float:
    step()
    start_s = time.perf_counter()
    for _ in range(count):
        step()
    return count / (time.perf_counter() - start_s)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run so many processes that keep a core busy each."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP], start_new_session=True) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            stop(process)


@section("prefill")
def prefill(proof: Proof) -> None:
    """Prefill and decode in float32, measured by the sections of proof-native; decode has no bound here."""
    figures = _figures_of(proof, native.prefills)
    proof.at_least("prefill_512", figures["prefill_512"], 0.80)
    proof.report("prefill_512_spread", figures["prefill_512_spread"])
    for key, value in _figures_of(proof, native.roofs).items():
        if key.startswith("roof_"):
            proof.report(key, value)


def _figures_of(proof: Proof, native_section: Section) -> dict[str, Any]:
    """Run a section of proof-native, and return its figures without bounds."""
    inner = Proof("native", proof.scale, proof.folder, random=proof.random)
    native_section.prove(inner)
    return inner.figures
