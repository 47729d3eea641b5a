"""Speculation: equal bits in chunks, equal answers with draft tokens, the speedup, no drafts from other tenants."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import median, quantiles
from time import perf_counter

import numpy as np

from benchmarks.packaged_models import coder_file
from benchmarks.test_model import smollm2_file
from proofs.cpu.loading import load_decoder
from proofs.cpu.models import ARITHMETIC_NAMES, CONTEXT, NUM_BLOCKS, kinds, tiny_file
from proofs.engine.worker import Ask
from proofs.framework.proof import Proof, section
from proofs.numerics.native_bits import FedSequence, Harness
from proofs.steps.grammar import killed_guided
from proofs.steps.tasks import TASKS, TaskAsk, TimedAnswer, run_timed, task_prompt
from quire.client.engines.opening import OpenedModel, open_model
from quire.client.request.params import Grammar, SamplingParams
from quire.config import Dtype, ModelSettings
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.scheduling.ngrams import Ngrams
from quire.core.scheduling.sequence import Sequence
from tests.support.servers.server import Server

CHUNKS = range(2, 18)
TEXT_TOKENS = 68
KINDS: dict[str, Dtype] = {"float32": "float32", "q4": "auto"}
"""Name -> data type of the test model; with `auto`, the file's 4-bit weights are computed in int8."""
MIN_SPEEDUP = {
    "float32": {"edit": 2.3, "extract": 1.25, "chat": 0.98},
    "q4": {"edit": 1.6, "extract": 1.1, "chat": 0.97},
}
MIN_SPEEDUP_OF_16 = 0.97
ANSWER_TOKENS = 112
GROUPS = ("a", "b", "c")
MEMORY_BYTES = 4 << 30
SCHEMA = {
    "type": "object",
    "properties": {"owner": {"type": "string", "maxLength": 30}, "city": {"type": "string", "maxLength": 20},
                   "sold": {"type": "integer"}},
    "required": ["owner", "city", "sold"],
    "additionalProperties": False,
}  # fmt: skip


@section("chunk_rows_unequal")
def chunks(proof: Proof) -> None:
    """Compare each position in chunks of 2 to 17 tokens with single steps, in each format and arithmetic."""
    dice = np.random.default_rng(proof.random.getrandbits(64))
    num_rows = num_unequal = num_kinds = 0
    for name, kind in kinds():
        file = tiny_file(proof.folder, name, dice)
        settings = {"arithmetic": ARITHMETIC_NAMES[kind]} if name not in ("F32", "F16", "BF16") else {}
        model = load_decoder(file, dtype="auto", max_sequence_tokens=CONTEXT, **settings)
        harness = Harness(proof.random, model, NUM_BLOCKS, "float32" if name == "F32" else "bfloat16")
        tokens = [proof.random.randrange(3, model.vocabulary_size) for _ in range(TEXT_TOKENS)]
        with harness.blocks(len(tokens)) as blocks:
            expected = FedSequence(tokens, blocks).run(harness, 1).digests
        for size in proof.random.sample(CHUNKS, proof.sized(quick=2, full=len(CHUNKS))):
            with harness.blocks(len(tokens)) as blocks:
                digests = FedSequence(tokens, blocks).run(harness, size).digests
            num_rows += len(digests)
            num_unequal += sum(a != b for a, b in zip(digests, expected, strict=True))
        num_kinds += 1
    proof.report("chunk_kinds", num_kinds, "formats and their arithmetics")
    proof.at_least("chunk_rows", num_rows, proof.sized(quick=500, full=2_000))
    proof.equals("chunk_rows_unequal", num_unequal, 0)


# -- equal answers -----------------------------------------------------------------------------------------------------


@contextmanager
def open_pair(dtype: Dtype = "auto") -> Iterator[dict[str, OpenedModel]]:
    """Open the test model with speculation (`auto`) and without (`off`); close both at the end of the block."""
    plain = ModelSettings(memory_bytes=MEMORY_BYTES, max_sequence_tokens=1024, max_running=16, dtype=dtype)
    settings = {"auto": plain, "off": replace(plain, speculation="off")}
    pair = {name: open_model(str(smollm2_file()), model_settings) for name, model_settings in settings.items()}
    yield pair
    for model in pair.values():
        model.engine.close()


@section("speculated_unequal")
def unequal(proof: Proof) -> None:
    """Compare tokens and log-probabilities with and without speculation, also over restarts and killed workers."""
    num_answers = num_unequal = num_resets = num_accepted = 0
    for dtype in KINDS.values():
        with open_pair(dtype) as pair:
            for _ in range(proof.sized(quick=2, full=36)):
                asks = [_random_ask(pair["off"], proof.random) for _ in range(proof.random.randint(4, 14))]
                expected = run_timed(pair["off"], asks)
                reset = RareEvent(proof.random)
                answers = run_timed(pair["auto"], asks, reset)
                num_resets += reset.count
                pairs = [row for lists in zip(answers, expected, strict=True) for row in zip(*lists, strict=True)]
                num_answers += len(pairs)
                num_unequal += sum(not _is_equal(*row) for row in pairs)
            num_accepted += pair["auto"].engine.scheduler.stats.num_accepted_tokens
    kills = asyncio.run(_run_killed(proof))
    proof.report("speculated_forgotten", num_resets, "times an engine was reset in the middle")
    proof.report("speculated_kills", kills[0], "of workers, by SIGKILL")
    proof.at_least("speculated_accepted", num_accepted, proof.sized(quick=100, full=5_000), "else nothing was tried")
    proof.at_least("speculated_answers", num_answers + kills[1], proof.sized(quick=20, full=1_000))
    proof.equals("speculated_unequal", num_unequal + kills[2], 0)


def _is_equal(answer: TimedAnswer, expected: TimedAnswer) -> bool:
    """Whether the answers are equal; an engine that was reset has no log-probabilities of earlier tokens."""
    logprobs = expected.logprobs[len(expected.logprobs) - len(answer.logprobs) :]
    return answer.tokens == expected.tokens and answer.logprobs == logprobs


def _random_ask(model: OpenedModel, random: Random) -> TaskAsk:
    params: dict[str, object] = {
        "temperature": random.choice([0.0, 0.7]),
        "top_p": random.choice([1.0, 0.9]),
        "max_tokens": random.choice([5, 40, 80]),
        "n": random.choice([1, 1, 1, 2, 4]),
        "seed": random.getrandbits(60),
    }
    params |= random.choice(
        [{}, {}, {"logprobs": 2}, {"grammar": Grammar.json_schema(SCHEMA)}, {"stop_token_ids": [28]},
         {"repetition_penalty": 1.1}, {"frequency_penalty": 0.3, "logprobs": 0}]
    )  # fmt: skip
    return TaskAsk(task_prompt(model, random.choice(TASKS), random), SamplingParams(**params))  # type: ignore[arg-type]


class RareEvent:
    """Returns True for one of fifty calls, and counts these."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.count = 0

    def __call__(self) -> bool:
        is_now = self._random.random() < 0.02
        self.count += is_now
        return is_now


async def _run_killed(proof: Proof) -> tuple[int, int, int]:
    """The numbers of kills, of answers, and of tokens that differ from an engine without speculation."""
    with open_pair() as pair:
        prompts = [task_prompt(pair["off"], TASKS[i % 3], proof.random) for i in range(proof.sized(quick=6, full=60))]
        asks = [
            TaskAsk(prompt, SamplingParams(temperature=0.7 * (number % 2), max_tokens=60, seed=number))
            for number, prompt in enumerate(prompts)
        ]
        expected = [answers[0].tokens for answers in run_timed(pair["off"], asks)]
    questions = [Ask(ask.prompt, ask.params) for ask in asks]
    result = await killed_guided(questions, expected, proof.sized(quick=1, full=8), proof.random)
    return result.num_kills, len(asks), result.num_unequal


# -- speedup -----------------------------------------------------------------------------------------------------------


@section("speculation_1: one sequence")
def one_sequence(proof: Proof) -> None:
    """Measure tokens per second of decoding, with speculation over without, in alternating order."""
    for kind, dtype in KINDS.items():
        with open_pair(dtype) as pair:
            for task in TASKS:
                ratios = _ratios(proof, pair, task, 1)
                key = f"speculation_{task}_1_{kind}"
                proof.at_least(key, median(ratios), MIN_SPEEDUP[kind][task], "tokens/s with speculation over without")
                proof.report(f"{key}_spread", _spread(ratios))
            stats = pair["auto"].engine.scheduler.stats
            share = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
            proof.report(f"speculation_accepted_{kind}", share, "of the draft tokens")


@section("speculation_16: sixteen sequences")
def sixteen_sequences(proof: Proof) -> None:
    """Measure sixteen concurrent sequences; the bound holds for the worst of the tasks."""
    worst = 9.9
    for kind, dtype in KINDS.items():
        with open_pair(dtype) as pair:
            for task in TASKS:
                ratio = median(_ratios(proof, pair, task, 16))
                proof.report(f"speculation_{task}_16_{kind}", ratio)
                worst = min(worst, ratio)
    proof.at_least("speculation_16", worst, MIN_SPEEDUP_OF_16, "the worst of them")


@section("speculation of the coder")
def coder(proof: Proof) -> None:
    """Report the speedup of the 1.5B coder model in 4 bits, for one sequence."""
    file = coder_file()
    plain = ModelSettings(memory_bytes=6 << 30, max_sequence_tokens=1024, max_running=4)
    settings = {"auto": plain, "off": replace(plain, speculation="off")}
    pair = {name: open_model(str(file), model_settings) for name, model_settings in settings.items()}
    for task in TASKS:
        ratios = _ratios(proof, pair, task, 1, num_rounds=proof.sized(quick=1, full=3))
        proof.report(f"speculation_{task}_1_coder", median(ratios))


def _ratios(
    proof: Proof, pair: dict[str, OpenedModel], task: str, num_sequences: int, num_rounds: int | None = None
) -> list[float]:
    """Seconds without speculation over seconds with it, for equal tokens, one ratio per round."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    ratios = []
    for round_number in range(num_rounds or proof.sized(quick=3, full=9)):
        asks = [TaskAsk(task_prompt(pair["off"], task, proof.random), params) for _ in range(num_sequences)]
        seconds, tokens = {}, {}
        for name in list(pair)[:: 1 if round_number % 2 else -1]:
            pair[name].engine.memory.clear()
            start_s = perf_counter()
            answers_of_asks = run_timed(pair[name], asks)
            total_s = perf_counter() - start_s
            tokens[name] = [answers[0].tokens for answers in answers_of_asks]
            seconds[name] = answers_of_asks[0][0].decode_s if num_sequences == 1 else total_s
        if tokens["auto"] != tokens["off"]:
            raise RuntimeError("expected equal answers with and without speculation, got different ones")
        ratios.append(seconds["off"] / seconds["auto"])
    return ratios


def _spread(ratios: list[float]) -> float:
    low, _, high = quantiles(ratios, n=4)
    return high - low


# -- drafts of one tenant ----------------------------------------------------------------------------------------------


@section("others_leak")
def leaks(proof: Proof) -> None:
    """Send prompts with pieces of other tenants' answers: a draft must not depend on other tenants."""
    drafts, num_requests = TenantDrafts(proof.random), 0
    while num_requests < proof.sized(quick=500, full=10_000):
        server = Server(num_blocks=400, max_step_tokens=200, propose=drafts.propose)
        server.scheduler.on_end = drafts.store
        for _ in range(20):
            tenant = proof.random.choice(GROUPS)
            server.ask(drafts.prompt(tenant), proof.random.randint(2, 12), tenant=tenant, temperature=0.0)
        num_requests += 20
        server.run()
    proof.report("leak_requests", num_requests)
    proof.at_least("leak_guesses", drafts.num_guesses, proof.sized(quick=50, full=1_000), "else nothing was tried")
    proof.at_least("leak_temptations", drafts.num_tempted, proof.sized(quick=50, full=1_000), "fit others' answers")
    proof.equals("others_leak", drafts.num_leaked, 0)


class TenantDrafts:
    """One n-gram store for all tenants, as in a server, and a separate one for each tenant, as the reference."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._shared = Ngrams()
        self._separate = {group: Ngrams() for group in GROUPS}
        self._answers: dict[str, list[list[int]]] = {group: [] for group in GROUPS}
        self._pairs: dict[str, set[tuple[int, ...]]] = {group: set() for group in GROUPS}
        """Pairs of tokens in a tenant's answers that have a next token."""
        self.num_guesses = self.num_leaked = self.num_tempted = 0

    def prompt(self, group: str) -> list[int]:
        """A prompt that ends with a piece of another tenant's answer, or a random one."""
        random = self._random
        foreign_answers = [one for name, answers in self._answers.items() if name != group for one in answers[-50:]]
        if foreign_answers and random.random() < 0.8:
            answer = random.choice(foreign_answers)
            end = random.randint(1, len(answer))
            return [random.randrange(1, 50), *answer[max(0, end - 4) : end]]
        return [random.randrange(1, 50) for _ in range(random.randint(1, 6))]

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """The draft of the shared store, which is compared with that of the tenant's own store."""
        group = sequence.request.namespace.cache_group
        draft = self._shared.propose(sequence, limit)
        self.num_guesses += bool(draft.token_ids)
        self.num_leaked += draft != self._separate[group].propose(sequence, limit)
        last_pair = tuple(sequence.tokens[-2:])
        self.num_tempted += any(last_pair in self._pairs[name] for name in GROUPS if name != group)
        return draft

    def store(self, sequence: Sequence) -> None:
        """Store the answer of a finished sequence in both stores and here."""
        group = sequence.request.namespace.cache_group
        self._shared.store_output(sequence)
        self._separate[group].store_output(sequence)
        answer = sequence.tokens[sequence.num_prompt_tokens :]
        self._answers[group].append(answer)
        self._pairs[group] |= set(pairwise(answer[:-1]))
