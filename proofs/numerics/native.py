"""`make proof-native`: bit for bit the same in any circumstance, and step times against the roofline of the machine.

    bare    only the matrix products of a step, with the fastest packed operator for as many rows (at least two)
    roof    bare + KV bytes / bandwidth, where bandwidth is the fastest native sum over 1 GiB in these rounds
    step    plan, run, sample and apply of the real engine

Compared calls alternate in one process, because the speed of the machine drifts. A figure is a ratio of medians;
`..._spread` beside it is the interquartile range of the ratios of single rounds.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from unittest.mock import patch

import numpy as np

from benchmarks.bare import bare_products
from benchmarks.record import say
from benchmarks.step_clock import step_timers
from benchmarks.steps import (
    GIB,
    MAX_STEP_TOKENS,
    Times,
    decoding,
    fastest,
    interleave,
    kv_bytes,
    load_smollm2,
    make_runner,
    make_store,
    real_text,
    smollm2_model,
    timed,
)
from benchmarks.test_model import smollm2
from proofs.cpu.perplexity import fixed_text, perplexity
from proofs.framework.proof import Proof, run, section
from proofs.framework.ratios import report_ratio, spread
from proofs.numerics import native_bits
from quire.backends import memory_plan
from quire.backends.cpu.measured_roof import read_sum
from quire.backends.kernels import products
from quire.backends.kernels.products import has_amx
from quire.backends.load import load_backend
from quire.backends.protocol import Runner
from quire.checkpoints.families import read_shape
from quire.config import Dtype, ModelSettings
from quire.core.request import ResolvedSampling
from tests.support.models.models import Ask, Machine, texts_of

DECODES = ((1, 288), (4, 288), (16, 288), (32, 288), (16, 1024), (64, 1024))
KV_DTYPES: tuple[Dtype, Dtype] = ("float32", "bfloat16")


# -- decode ------------------------------------------------------------------------------------------------------------


@section("near the roof")
def roofs(proof: Proof) -> None:
    """Decode steps compared with the minimal time for their matrix products and for reading their KV blocks."""
    # Allocated like the KV store, so that the sum reads as fast as attention could.
    data = np.zeros(GIB // 4, np.float32)
    data += 1.0
    shape, rounds = read_shape(smollm2().config), proof.sized(quick=7, full=31)
    for num_rows, context in DECODES:
        machine = decoding(smollm2_model(), num_rows, context - rounds // 2)
        num_product_rows = max(2, num_rows)
        bare = bare_products(shape, num_product_rows, num_product_rows)
        read = {"read": lambda: read_sum(data)}
        times = interleave({**bare, **read, "step": machine.step}, rounds)
        products, bandwidth = fastest(times, list(bare)), GIB / min(times["read"])
        kv_s = kv_bytes(num_rows, context) / bandwidth
        name = f"{num_rows}_{context}"
        each = ", ".join(f"{one} {median(times[one]) * 1e3:.1f}" for one in bare)
        say(f"  {name}: bare {median(products) * 1e3:.1f} ms ({each}), {bandwidth / 1e9:.1f} GB/s")
        report_ratio(proof, f"roof_{name}", [one + kv_s for one in products], times["step"], 0.80)
        proof.report(f"step_ms_{name}", median(times["step"]) * 1e3)
        if name == "16_288":
            report_ratio(proof, "bare_16_288", products, times["step"], 0.68)
        del machine, bare, times
        gc.collect()


@section("the host's share")
def host_share(proof: Proof) -> None:
    """The share of a 16-row step that is neither a matrix product nor a native kernel."""
    model = smollm2_model()
    machine = decoding(model, 16, 288)
    with step_timers(machine, model) as clock:
        for _ in range(proof.sized(quick=10, full=60)):
            clock.step(machine)
    proof.at_most("host_share", median(clock.host_shares()), 0.10)
    proof.report("host_share_spread", spread(clock.host_shares()))
    for part, seconds in clock.shares().items():
        say(f"  {part:14} {seconds * 1e3:7.2f} ms")


# -- prefill -----------------------------------------------------------------------------------------------------------


@section("prefill")
def prefills(proof: Proof) -> None:
    """A step of 512 prompt tokens, with and without 512 tokens before it."""
    random, model = proof.random, smollm2_model()
    runner = make_runner(model, make_store(model, 512))

    def step_of(num_tokens: int) -> float:
        """Return the seconds of the last step of a cold prompt."""
        machine = Machine(runner)
        prompt = texts_of(random, real_text(), [num_tokens])[0]
        machine.submit(Ask(prompt, ResolvedSampling(temperature=0.0, max_tokens=1)))
        for _ in range(num_tokens // MAX_STEP_TOKENS - 1):
            machine.step()
        taken = timed(machine.step)
        assert not machine.engine.has_work
        return taken

    shape = read_shape(smollm2().config)
    bare = bare_products(shape, MAX_STEP_TOKENS, 2)
    for parts in (2, 4):
        bare |= bare_products(shape, MAX_STEP_TOKENS, 2, parts, ("native", "mkl"))
    taken: Times = {name: [] for name in (*bare, "first", "second")}
    step_of(MAX_STEP_TOKENS)
    for _ in range(proof.sized(quick=4, full=15)):
        for name, call in bare.items():
            taken[name].append(timed(call))
        taken["first"].append(step_of(MAX_STEP_TOKENS))
        taken["second"].append(step_of(2 * MAX_STEP_TOKENS))
    products = fastest(taken, list(bare))
    report_ratio(proof, "prefill_512", products, taken["first"], 0.80)
    report_ratio(proof, "prefill_512_past_512", products, taken["second"], 0.62)


# -- sharing, batching, formats ----------------------------------------------------------------------------------------


@section("a shared prefix")
def shared_prefix(proof: Proof) -> None:
    """32 sequences of 1,088 tokens, of which 1,024 are in shared or in separate blocks."""
    model, rounds = smollm2_model(), proof.sized(quick=7, full=21)
    context = 1_088 - rounds // 2
    calls = {
        "private": decoding(model, 32, context).step,
        "shared": decoding(model, 32, context, shared=1_024).step,
    }
    taken = interleave(calls, rounds)
    report_ratio(proof, "shared_prefix_speedup", taken["private"], taken["shared"], 1.4)


@section("sixteen at once")
def batching(proof: Proof) -> None:
    """Sixteen concurrent requests compared with single ones, some of which run before and some after."""
    model, rounds = smollm2_model(), proof.sized(quick=2, full=4)
    runner = make_runner(model, make_store(model, 512))
    prompts = texts_of(proof.random, real_text(), [32] * 16)
    params = ResolvedSampling(temperature=0.0, max_tokens=proof.sized(quick=24, full=128))

    def seconds(batch: Sequence[list[int]]) -> float:
        machine = Machine(runner)
        return timed(lambda: machine.run([Ask(one, params) for one in batch]))

    seconds(prompts[:2])
    alone_s, batch_s = [], []
    for round_number in range(rounds):
        singles = prompts[4 * round_number : 4 * round_number + 4]
        before = [seconds([one]) for one in singles[:2]]
        batch_s.append(seconds(prompts))
        alone_s.append(16 * mean([*before, *(seconds([one]) for one in singles[2:])]))
    report_ratio(proof, "speedup_16_vs_1", alone_s, batch_s, 6)
    proof.report("tokens_per_s_16", 16 * params.max_tokens / median(batch_s))
    proof.report("tokens_per_s_1", 16 * params.max_tokens / median(alone_s))


@section("keys and values in bf16")
def kv_bf16(proof: Proof) -> None:
    """Keys and values in half the bytes: the speedup, and the change of perplexity."""
    model, rounds = smollm2_model(), proof.sized(quick=7, full=21)
    context = 1_024 - rounds // 2
    calls = {
        "full": decoding(model, 32, context).step,
        "half": decoding(model, 32, context, dtype="bfloat16").step,
    }
    taken = interleave(calls, rounds)
    report_ratio(proof, "kv_bf16_speedup", taken["full"], taken["half"], 1.25)
    tokens = fixed_text()[: proof.sized(quick=512, full=2_048)]
    full, half = (perplexity(model, tokens, dtype) for dtype in KV_DTYPES)
    proof.report("perplexity_tokens", len(tokens))
    proof.report("perplexity_kv_fp32", full)
    proof.report("perplexity_kv_bf16", half)
    proof.report("perplexity_change", half / full - 1.0, "bf16 over fp32, minus 1")


@section("weights in bf16")
def weights_bf16(proof: Proof) -> None:
    """Weights, keys and values in half the bytes: the speedup, with tile registers if available, and perplexity."""
    full, half, rounds = smollm2_model(), load_smollm2("bfloat16"), proof.sized(quick=7, full=21)
    proof.report("has_amx", has_amx(), "whether this processor multiplies bf16 in tile registers")
    for num_rows, context in ((1, 288), (16, 288), (64, 1_024)):
        calls = {
            "full": decoding(full, num_rows, context - rounds // 2).step,
            "half": decoding(half, num_rows, context - rounds // 2, dtype="bfloat16").step,
        }
        taken = interleave(calls, rounds)
        report_ratio(proof, f"bf16_speedup_{num_rows}_{context}", taken["full"], taken["half"])
    prompts = texts_of(proof.random, real_text(), [MAX_STEP_TOKENS] * rounds)
    taken = {"full": [], "half": []}
    runners = {
        "full": make_runner(full, make_store(full, 64)),
        "half": make_runner(half, make_store(half, 64, "bfloat16")),
    }
    for prompt in prompts:
        for name, runner in runners.items():
            machine = Machine(runner)
            machine.submit(Ask(prompt, ResolvedSampling(temperature=0.0, max_tokens=1)))
            taken[name].append(timed(machine.step))
    report_ratio(proof, "bf16_speedup_prefill_512", taken["full"], taken["half"])
    tokens = fixed_text()[: proof.sized(quick=512, full=2_048)]
    before, after = perplexity(full, tokens, "float32"), perplexity(half, tokens, "bfloat16")
    proof.report("perplexity_bf16", after)
    proof.report("perplexity_change_bf16", after / before - 1.0, "weights and KV in bf16 over fp32, minus 1")


@section("without native kernels")
def fallback(proof: Proof) -> None:
    """Sixteen requests through transformers' modules, the fallback without native kernels, over the CPU backend."""
    budget_bytes = memory_plan.resident_bytes() + 8 * GIB  # in addition to the memory of earlier sections
    settings = ModelSettings(max_step_tokens=MAX_STEP_TOKENS, max_sequence_tokens=1_024, memory_bytes=budget_bytes)
    with patch.object(products, "probe", lambda _dtype: "disabled"):
        plain = load_backend(smollm2(), replace(settings, backend="torch")).runner
    own = make_runner(smollm2_model(), make_store(smollm2_model(), 512))
    prompts = texts_of(proof.random, real_text(), [64] * 16)
    params = ResolvedSampling(temperature=0.0, max_tokens=16)

    def answer(runner: Runner) -> list[Ask]:
        return Machine(runner).run([Ask(one, params) for one in prompts])

    calls = {"plain": lambda: answer(plain), "native": lambda: answer(own)}
    taken = interleave(calls, proof.sized(quick=2, full=7))
    report_ratio(proof, "fallback_ratio", taken["plain"], taken["native"])


PATHS = ("native", "src/quire/backends/kernels", "src/quire/backends/cpu", "src/quire/backends/host")

if __name__ == "__main__":
    sys.exit(run("native", sys.modules[__name__], native_bits, paths=PATHS))
