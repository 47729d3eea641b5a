"""`make proof-torch`: a real model through the real scheduler, against transformers and against itself.

The reference for greedy tokens is transformers' own `generate` in fp32; for sampling a plain implementation in pure
Python; for everything else the same request, alone and with an empty cache.
"""

import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.record import ROOT, say
from benchmarks.steps import real_text
from benchmarks.test_model import smollm2, smollm2_file
from proofs.framework.machinery import json_from_child
from proofs.framework.proof import Proof, run, section
from quire.backends.conformance.contract import check_all
from quire.backends.protocol import Runner
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling
from tests.support.models import architectures, plain_sampler
from tests.support.models.models import Ask, Machine, load_runner, random_params, runners_of, texts_of
from tests.support.workers import hostile

Make = Callable[[Sequence[int]], list[list[int]]]

NEAR_TIE = 1e-4
NEAR_BORDER = 1e-5
GIB = 1 << 30
# Budgets are of the whole process, and this one also holds the reference models.
SMOLLM2_SETTINGS = {"memory_bytes": 9 * GIB, "max_sequence_tokens": 2304, "max_step_tokens": 256, "max_running": 32}
TINY_SETTINGS = {"memory_bytes": 18 * GIB, "max_sequence_tokens": 2304, "max_step_tokens": 256, "block_size": 16}


# -- the model ---------------------------------------------------------------------------------------------------------


@cache
def smollm2_runner() -> Runner:
    return load_runner(smollm2().directory, **SMOLLM2_SETTINGS)


@cache
def smollm2_reference() -> PreTrainedModel:
    logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smollm2().directory, dtype=torch.float32).eval()
    return model


def random_length(random: Random, longest: int) -> int:
    return max(1, min(longest, round(math.exp(random.uniform(0.0, math.log(longest))))))


# -- conformance, sampler, files ---------------------------------------------------------------------------------------


@section("conformance")
def conformance(proof: Proof) -> None:
    names = [*architectures.FAST, "gemma2"] if proof.is_full else ["llama", "qwen3"]
    settings = {**TINY_SETTINGS, "max_step_tokens": 128, "max_running": 16, "block_size": 8}
    checks = [check_all(runners_of(architectures.directory(name), **settings)) for name in names]
    proof.report("conformance_architectures", len(checks))
    passes = bool(checks) and all(len(one) >= 19 for one in checks)
    proof.holds("conformance", passes, "the kit passes: at least 19 checks for each")


@section("the sampler against a plain one")
def sampler(proof: Proof) -> None:
    survey = plain_sampler.survey(proof.sized(quick=1_000, full=10_000), proof.random.getrandbits(32))
    proof.report("sampler_rows", survey.num_rows)
    proof.report("sampler_near_ties", survey.num_near_ties)
    proof.none("sampler_wrong", survey.wrong)


@section("hostile files")
def hostile_files(proof: Proof) -> None:
    count, seed = proof.sized(quick=200, full=2_000), proof.random.getrandbits(32)
    survey = hostile.survey(count, seed, load="tests.support.models.torch_loading:load_and_step")
    for line in survey.crashed[:10]:
        say(f"  {line}")
    proof.report("hostile_files", survey.num_files)
    proof.report("hostile_files_refused", survey.num_refused)
    proof.equals("hostile_files_crashed", len(survey.crashed), 0)


# -- parity ------------------------------------------------------------------------------------------------------------


@dataclass
class Parity:
    num_tokens: int = 0
    num_mismatches: int = 0
    num_near_ties: int = 0


@section("parity with transformers")
def parity(proof: Proof) -> None:
    report_parity(proof, compare_models(proof, tuple(architectures.MODELS)))


def compare_models(proof: Proof, names: Sequence[str], **settings: object) -> Parity:
    """Compare greedy tokens of the test model and of these small models with transformers, and return the counts."""
    random, counts = proof.random, Parity()
    num_prompts, length = (200, 128) if proof.is_full else (6, 24)
    longest = 2_000 if proof.is_full else 300
    asks = _prompts_in_groups(random, num_prompts, longest, lambda lengths: texts_of(random, real_text(), lengths))
    runner = load_runner(smollm2().directory, **{**SMOLLM2_SETTINGS, **settings}) if settings else smollm2_runner()
    _compare(counts, smollm2_reference(), runner, asks, length, random)
    say(f"  SmolLM2: {counts}")
    for name in names:
        runner = load_runner(architectures.directory(name), **{**TINY_SETTINGS, **settings})
        compare_tiny(proof, counts, name, runner)
    return counts


def compare_tiny(proof: Proof, counts: Parity, name: str, runner: Runner) -> None:
    """Compare greedy tokens of one small model, and add to the counts."""
    random = proof.random
    num_prompts, length = (50, 64) if proof.is_full else (4, 16)
    groups = _prompts_in_groups(random, num_prompts, 2_000 if proof.is_full else 200, lambda n: _noise(random, n))
    _compare(counts, architectures.reference(name), runner, groups, length, random)
    say(f"  {name}: {counts}")


def report_parity(proof: Proof, counts: Parity) -> None:
    """Report the counts; near ties are no mismatches."""
    proof.report("parity_tokens", counts.num_tokens)
    proof.report("parity_near_ties", counts.num_near_ties, "counted separately")
    proof.equals("parity_mismatches", counts.num_mismatches, 0)


def _noise(random: Random, lengths: Sequence[int]) -> list[list[int]]:
    return [[random.randrange(3, architectures.VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


def _prompts_in_groups(random: Random, count: int, longest: int, make: Make) -> list[list[list[int]]]:
    """Return groups of prompts of equal length, which transformers' `generate` needs."""
    groups: list[list[list[int]]] = []
    while (left := count - sum(map(len, groups))) > 0:
        length = random_length(random, longest)
        size = min(left, random.choice([1, 4, 8, 16, 32]), max(1, 16_000 // length))
        groups.append(make([length] * size))
    return groups


def _compare(
    counts: Parity,
    reference: PreTrainedModel,
    runner: Runner,
    groups: list[list[list[int]]],
    num_tokens: int,
    random: Random,
) -> None:
    params = ResolvedSampling(temperature=0.0, max_tokens=num_tokens)
    asks = [Ask(prompt, params) for group in groups for prompt in group]
    expected = [answer for group in groups for answer in _generate(reference, group, num_tokens)]
    order = random.sample(range(len(asks)), len(asks))
    while order:
        size = random.randint(1, 32)
        batch, order = order[:size], order[size:]
        Machine(runner, max_running=size).run([asks[index] for index in batch])
    for ask, theirs in zip(asks, expected, strict=True):
        _compare_answer(counts, reference, runner, ask, theirs)


@torch.inference_mode()
def _generate(reference: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    generate: Callable[..., torch.Tensor] = reference.generate
    out = generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        eos_token_id=None, pad_token_id=0, top_k=None, top_p=None, temperature=None,
    )  # fmt: skip
    answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return answers


@torch.inference_mode()
def _reference_logits(reference: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([list(tokens)])).logits[0, -1]
    return logits


def _first_difference(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    return next(index for index, (a, b) in enumerate(zip(tokens, other_tokens, strict=True)) if a != b)


def _compare_answer(counts: Parity, reference: PreTrainedModel, runner: Runner, ask: Ask, expected: list[int]) -> None:
    """Compare all tokens; after a difference, continue from the reference's tokens."""
    actual, first = ask.tokens, 0
    while actual != expected[first:]:
        index = first + _first_difference(actual, expected[first:])
        best = _reference_logits(reference, [*ask.prompt, *expected[:index]]).topk(2).values
        gap = float(best[0] - best[1])
        if gap < NEAR_TIE:
            counts.num_near_ties += 1
        else:
            counts.num_mismatches += 1
            say(f"  token {index}: expected {expected[index]}, got {actual[index - first]}, gap {gap:.2g}")
        first = index + 1
        if first == len(expected):
            break
        rest = ResolvedSampling(temperature=0.0, max_tokens=len(expected) - first)
        actual = Machine(runner).alone(Ask([*ask.prompt, *expected[:first]], rest)).tokens
    counts.num_tokens += len(expected)


# -- circumstances -----------------------------------------------------------------------------------------------------


@section("the same tokens in other ways")
def cached(proof: Proof) -> None:
    """The tokens of cold requests equal those after hits, in chunks, after preemptions and of forks."""
    random = proof.random
    runner, num_mismatches, num_near_ties, num_pairs, ways = smollm2_runner(), 0, 0, 0, Counter[str]()
    params = ResolvedSampling(temperature=0.0, max_tokens=12)
    for _ in range(proof.sized(quick=1, full=10)):
        prompts = texts_of(random, real_text(), [random.randint(100, 700) for _ in range(13 if proof.is_full else 6)])
        cold = [ask.tokens for ask in Machine(runner).run([Ask(prompt, params) for prompt in prompts])]
        for answers in _run_other_paths(runner, random, prompts, params, ways):
            num_pairs += len(answers)
            for prompt, expected, answer in zip(prompts, cold, answers, strict=True):
                if answer != expected:
                    shared = [*prompt, *expected[: _first_difference(answer, expected)]]
                    best = _reference_logits(smollm2_reference(), shared).topk(2).values
                    is_near = float(best[0] - best[1]) < NEAR_TIE
                    num_near_ties, num_mismatches = num_near_ties + is_near, num_mismatches + (not is_near)
    proof.at_least("cached_pairs", num_pairs, proof.sized(quick=24, full=500))
    for way, count in sorted(ways.items()):
        proof.at_least(f"cached_by_{way}", count, proof.sized(quick=4, full=100), "that used this path")
    proof.report("cached_near_ties", num_near_ties, "counted separately")
    proof.equals("cached_mismatches", num_mismatches, 0)


def _run_other_paths(
    runner: Runner, random: Random, prompts: list[list[int]], params: ResolvedSampling, path_counts: Counter[str]
) -> list[list[list[int]]]:
    size = runner.capacity.block_size
    warm = Machine(runner)
    heads = [prompt[: random.randint(2 * size, len(prompt))] for prompt in prompts]
    warm.run([Ask(head, ResolvedSampling(temperature=0.0, max_tokens=1)) for head in heads])
    hits = warm.run([Ask(prompt, params) for prompt in prompts])
    path_counts["hit"] += sum(ask.num_cached_tokens > 0 for ask in hits)
    chunked = Machine(runner, max_step_tokens=size + random.randint(8, 40), max_running=8)
    in_chunks = chunked.run([Ask(prompt, params) for prompt in prompts])
    pieces = Counter(
        item.sequence_id for plan in chunked.runner.plans for item in plan.items if len(item.token_ids) > 1
    )
    path_counts["chunks"] += sum(count > 1 for count in pieces.values())
    preempted = Machine(runner)

    def preempt_sometimes() -> None:
        if random.random() < 0.6:
            preempted.engine.scheduler.preempt_latest()
            if random.random() < 0.3:
                preempted.engine.memory.evict(random.randint(1, 8))

    resumed = preempted.run([Ask(prompt, params) for prompt in prompts], preempt_sometimes)
    path_counts["preemption"] += preempted.engine.scheduler.stats.num_preemptions
    fork = Machine(runner, max_running=60)
    forked = fork.run([Ask(prompt, params, n=3) for prompt in prompts])
    path_counts["fork"] += sum(len(ask.answers) == 3 for ask in forked)
    return [
        [ask.tokens for ask in hits],
        [ask.tokens for ask in in_chunks],
        [ask.tokens for ask in resumed],
        [ask.answers[random.randrange(3)] for ask in forked],
    ]


@section("seeds")
def seeds(proof: Proof) -> None:
    random, runner, num_mismatches, num_near_ties = proof.random, smollm2_runner(), 0, 0
    count = proof.sized(quick=10, full=200)
    prompts = texts_of(random, real_text(), [random_length(random, 300) for _ in range(count)])
    asks = [Ask(one, random_params(random, 16), random.getrandbits(63)) for one in prompts]
    alone = [Machine(runner).alone(ask).tokens for ask in asks]
    mixed = [Ask(ask.prompt, ask.params, ask.seed) for ask in asks]
    order = random.sample(mixed, len(mixed))
    while order:
        size = random.randint(2, 32)
        batch, order = order[:size], order[size:]
        Machine(runner, max_running=32).run(batch)
    for tokens, ask in zip(alone, mixed, strict=True):
        if tokens != ask.tokens:
            is_near = is_near_border(ask, tokens, _first_difference(tokens, ask.tokens))
            num_near_ties, num_mismatches = num_near_ties + is_near, num_mismatches + (not is_near)
    proof.report("seed_requests", count)
    proof.report("seed_near_ties", num_near_ties, "counted separately")
    proof.equals("seed_mismatches", num_mismatches, 0)


def is_near_border(ask: Ask, tokens: Sequence[int], index: int) -> bool:
    """Whether rounding alone may have decided the token after `tokens[:at]`."""
    prefix = (*ask.prompt, *tokens[:index])
    logits = _reference_logits(smollm2_reference(), prefix).tolist()
    sampling = Sampling(ask.params, ask.seed, 0, len(prefix), len(ask.prompt), prefix)
    return plain_sampler.plain_choice(logits, sampling).margin < NEAR_BORDER


@section("a shared prefix is not copied")
def zero_copy(proof: Proof) -> None:
    """While one request runs, start another with the same 2,000 tokens, and compare their block tables."""
    runner = smollm2_runner()
    size, prefix = runner.capacity.block_size, texts_of(proof.random, real_text(), [2_000])[0]
    machine = Machine(runner)
    params = ResolvedSampling(temperature=0.0, max_tokens=200)
    machine.submit(Ask([*prefix, 5, 6, 7], params))
    while not machine.engine.scheduler.running or machine.engine.scheduler.running[0].num_uncomputed > 1:
        machine.step()
    before = len(machine.runner.plans)
    machine.submit(Ask([*prefix, 8, 9], params))
    while len(machine.engine.scheduler.running) < 2 or machine.engine.scheduler.running[1].num_uncomputed > 1:
        machine.step()
    tables = [list(one.table.blocks) for one in machine.engine.scheduler.running if one.table is not None]
    num_shared = 2_000 // size
    shared = tables[0][:num_shared]
    counts = {machine.engine.memory.pool.ref_count[block] for block in shared}
    copies = sum(len(plan.copies) for plan in machine.runner.plans[before:])
    items = [item for plan in machine.runner.plans[before:] for item in plan.items]
    num_fed = max(len(item.token_ids) for item in items)
    holds = tables[1][:num_shared] == shared and counts == {2} and copies == 0 and num_fed <= size + 2
    proof.holds("zero_copy", holds, "same blocks, two references, no copy")


@section("a shared prefix is computed once")
def prefill_saved(proof: Proof) -> None:
    random, runner = proof.random, smollm2_runner()
    prefix = texts_of(random, real_text(), [1_024])[0]
    asks = [Ask([*prefix, *rest], ResolvedSampling(temperature=0.0, max_tokens=4)) for rest in
            texts_of(random, real_text(), [32] * 16)]  # fmt: skip
    machine = Machine(runner)
    machine.run(asks)
    num_output = sum(len(ask.tokens) for ask in asks)
    # Every output token but the last of a sequence is fed once; all other computed tokens are prompt tokens.
    computed = machine.engine.scheduler.stats.num_computed_tokens - (num_output - len(asks))
    proof.at_most("prefill_saved", computed / sum(len(ask.prompt) for ask in asks), 0.125)


# -- loading and budgets -----------------------------------------------------------------------------------------------


@section("loading")
def loading(proof: Proof) -> None:
    """A process that imports, resolves and loads the GGUF file, first with an empty cache, then with a filled one."""
    seconds: list[float] = []
    with TemporaryDirectory() as cache_folder:
        for _ in range(1 + proof.sized(quick=1, full=5)):
            started = time.perf_counter()
            command = [sys.executable, "-m", "proofs.framework.load_once", str(smollm2_file())]
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "QUIRE_CACHE": cache_folder})
            seconds.append(time.perf_counter() - started)
    proof.at_most("load_first_s", seconds[0], 30)
    proof.at_most("load_again_s", median(seconds[1:]), 6, "the median")


@section("budgets")
def budgets(proof: Proof) -> None:
    """Each budget in a separate process, which reports its peak memory, including loading."""
    count, max_share, max_refused_share = proof.sized(quick=3, full=40), 0.0, 0.0
    num_over = num_started = num_refused = 0
    for index in range(count):
        budget = int(proof.random.uniform(0.95, 1.75) * GIB)
        report = json_from_child("tests.support.models.torch_loading", smollm2().directory, budget)
        if report is None:
            num_over += 1
            continue
        share = report["peak_bytes"] / budget
        num_started += report["is_started"]
        num_refused += not report["is_started"]
        if report["is_started"]:
            max_share = max(max_share, share)
            num_over += share > 1.05 or not report["is_full"]
        else:
            max_refused_share = max(max_refused_share, share)
            num_over += not report["sentence"]
        if index < 5 or share > 1.0:
            say(f"  budget {budget / GIB:.2f} GiB: {report}")
    proof.report("budgets", count)
    proof.at_least("budgets_started", num_started, proof.sized(quick=0, full=20))
    proof.report("budgets_refused", num_refused)
    proof.at_most("budget_worst_share", max_share, 1.05)
    proof.report("budget_worst_share_refused", max_refused_share, "peak memory of refused loads")
    proof.equals("over_budget", num_over, 0)


PATHS = ("src/quire/backends/torch", "src/quire/backends/host", "src/quire/backends/kernels", "native")

if __name__ == "__main__":
    sys.exit(run("torch", paths=PATHS))
