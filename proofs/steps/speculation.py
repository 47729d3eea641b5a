"""Speculation: the same bits in a chunk, the same answers with guesses, what they are worth, nobody else's words."""

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
from proofs.cpu.models import CONTEXT, NUM_BLOCKS, WORDS, kinds, tiny_file
from proofs.engine.worker import Ask
from proofs.framework.proof import Proof, section
from proofs.numerics.native_bits import Desk, Life
from proofs.steps.grammar import killed_guided
from proofs.steps.tasks import TASKS, TaskAsk, Told, task_prompt, told_by
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
"""How the test model is held: the file's 4 bits are computed in int8."""
LEAST = {
    "float32": {"edit": 2.3, "extract": 1.25, "chat": 0.98},
    "q4": {"edit": 1.6, "extract": 1.1, "chat": 0.97},
}
LEAST_OF_16 = 0.97
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
    """Every position of chunks of 2 to 17 tokens against single steps, in each format and arithmetic."""
    dice = np.random.default_rng(proof.random.getrandbits(64))
    num_rows = num_unequal = num_kinds = 0
    for name, kind in kinds():
        file = tiny_file(proof.folder, name, dice)
        settings = {"arithmetic": WORDS[kind]} if name not in ("F32", "F16", "BF16") else {}
        model = load_decoder(file, dtype="auto", max_sequence_tokens=CONTEXT, **settings)
        desk = Desk(proof.random, model, NUM_BLOCKS, "float32" if name == "F32" else "bfloat16")
        tokens = [proof.random.randrange(3, model.vocabulary_size) for _ in range(TEXT_TOKENS)]
        with desk.blocks(len(tokens)) as blocks:
            singly = Life(tokens, blocks).run(desk, 1).digests
        for size in proof.random.sample(CHUNKS, proof.sized(quick=2, full=len(CHUNKS))):
            with desk.blocks(len(tokens)) as blocks:
                found = Life(tokens, blocks).run(desk, size).digests
            num_rows += len(found)
            num_unequal += sum(one != other for one, other in zip(found, singly, strict=True))
        num_kinds += 1
    proof.report("chunk_kinds", num_kinds, "formats and their arithmetics")
    proof.at_least("chunk_rows", num_rows, proof.sized(quick=500, full=2_000))
    proof.equals("chunk_rows_unequal", num_unequal, 0)


# -- the same answers --------------------------------------------------------------------------------------------------


@contextmanager
def opened_pair(dtype: Dtype = "auto") -> Iterator[dict[str, OpenedModel]]:
    """The test model that guesses and the same that does not, until both have been asked."""
    plain = ModelSettings(memory_bytes=MEMORY_BYTES, max_sequence_tokens=1024, max_running=16, dtype=dtype)
    settings = {"auto": plain, "off": replace(plain, speculation="off")}
    pair = {name: open_model(str(smollm2_file()), given) for name, given in settings.items()}
    yield pair
    for opened in pair.values():
        opened.engine.close()


@section("speculated_unequal")
def unequal(proof: Proof) -> None:
    """Answers with guesses and without: tokens and log-probabilities, in every circumstance."""
    num_answers = num_unequal = num_forgotten = num_right = 0
    for dtype in KINDS.values():
        with opened_pair(dtype) as pair:
            for _ in range(proof.sized(quick=2, full=36)):
                asks = [_any_ask(pair["off"], proof.random) for _ in range(proof.random.randint(4, 14))]
                expected = told_by(pair["off"], asks)
                forget = NowAndThen(proof.random)
                found = told_by(pair["auto"], asks, forget)
                num_forgotten += forget.count
                pairs = [one for both in zip(found, expected, strict=True) for one in zip(*both, strict=True)]
                num_answers += len(pairs)
                num_unequal += sum(not _is_equal(*one) for one in pairs)
            num_right += pair["auto"].engine.scheduler.stats.num_accepted_tokens
    killed = asyncio.run(_killed(proof))
    proof.report("speculated_forgotten", num_forgotten, "times an engine began anew in the middle")
    proof.report("speculated_kills", killed[0], "of workers, by SIGKILL")
    proof.at_least("speculated_accepted", num_right, proof.sized(quick=100, full=5_000), "else nothing was tried")
    proof.at_least("speculated_answers", num_answers + killed[1], proof.sized(quick=20, full=1_000))
    proof.equals("speculated_unequal", num_unequal + killed[2], 0)


def _is_equal(found: Told, expected: Told) -> bool:
    """Log-probabilities of tokens told before an engine began anew are not told again."""
    kept = expected.logprobs[len(expected.logprobs) - len(found.logprobs) :]
    return found.tokens == expected.tokens and found.logprobs == kept


def _any_ask(opened: OpenedModel, random: Random) -> TaskAsk:
    given: dict[str, object] = {
        "temperature": random.choice([0.0, 0.7]),
        "top_p": random.choice([1.0, 0.9]),
        "max_tokens": random.choice([5, 40, 80]),
        "n": random.choice([1, 1, 1, 2, 4]),
        "seed": random.getrandbits(60),
    }
    given |= random.choice(
        [{}, {}, {"logprobs": 2}, {"grammar": Grammar.json_schema(SCHEMA)}, {"stop_token_ids": [28]},
         {"repetition_penalty": 1.1}, {"frequency_penalty": 0.3, "logprobs": 0}]
    )  # fmt: skip
    return TaskAsk(task_prompt(opened, random.choice(TASKS), random), SamplingParams(**given))  # type: ignore[arg-type]


class NowAndThen:
    """Says yes seldom, and counts it."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.count = 0

    def __call__(self) -> bool:
        is_now = self._random.random() < 0.02
        self.count += is_now
        return is_now


async def _killed(proof: Proof) -> tuple[int, int, int]:
    """Kills, answers, and tokens that differ from those of an engine that does not guess."""
    with opened_pair() as pair:
        prompts = [task_prompt(pair["off"], TASKS[at % 3], proof.random) for at in range(proof.sized(quick=6, full=60))]
        asks = [
            TaskAsk(prompt, SamplingParams(temperature=0.7 * (at % 2), max_tokens=60, seed=at))
            for at, prompt in enumerate(prompts)
        ]
        expected = [answers[0].tokens for answers in told_by(pair["off"], asks)]
    asked = [Ask(ask.prompt, ask.params) for ask in asks]
    found = await killed_guided(asked, expected, proof.sized(quick=1, full=8), proof.random)
    return found.num_kills, len(asks), found.num_unequal


# -- what they are worth -----------------------------------------------------------------------------------------------


@section("speculation_1: one sequence")
def one_sequence(proof: Proof) -> None:
    """Tokens a second of decoding, with guesses over without, turn about."""
    for kind, dtype in KINDS.items():
        with opened_pair(dtype) as pair:
            for task in TASKS:
                ratios = _ratios(proof, pair, task, 1)
                key = f"speculation_{task}_1_{kind}"
                proof.at_least(key, median(ratios), LEAST[kind][task], "tokens/s with guesses over without")
                proof.report(f"{key}_spread", _spread(ratios))
            stats = pair["auto"].engine.scheduler.stats
            share = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
            proof.report(f"speculation_accepted_{kind}", share, "of the tokens guessed")


@section("speculation_16: sixteen sequences")
def sixteen_sequences(proof: Proof) -> None:
    """The worst of the three tasks."""
    worst = 9.9
    for kind, dtype in KINDS.items():
        with opened_pair(dtype) as pair:
            for task in TASKS:
                ratio = median(_ratios(proof, pair, task, 16))
                proof.report(f"speculation_{task}_16_{kind}", ratio)
                worst = min(worst, ratio)
    proof.at_least("speculation_16", worst, LEAST_OF_16, "the worst of them")


@section("speculation of the coder")
def coder(proof: Proof) -> None:
    """The same of the 1.5B model in 4 bits, for one sequence."""
    file = coder_file()
    plain = ModelSettings(memory_bytes=6 << 30, max_sequence_tokens=1024, max_running=4)
    settings = {"auto": plain, "off": replace(plain, speculation="off")}
    pair = {name: open_model(str(file), given) for name, given in settings.items()}
    for task in TASKS:
        ratios = _ratios(proof, pair, task, 1, num_rounds=proof.sized(quick=1, full=3))
        proof.report(f"speculation_{task}_1_coder", median(ratios))


def _ratios(
    proof: Proof, pair: dict[str, OpenedModel], task: str, num_sequences: int, num_rounds: int | None = None
) -> list[float]:
    """Seconds without guesses over seconds with them, for the same tokens, round by round."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    ratios = []
    for turn in range(num_rounds or proof.sized(quick=3, full=9)):
        asks = [TaskAsk(task_prompt(pair["off"], task, proof.random), params) for _ in range(num_sequences)]
        taken_s, tokens = {}, {}
        for name in list(pair)[:: 1 if turn % 2 else -1]:
            pair[name].engine.memory.clear()
            started_s = perf_counter()
            found = told_by(pair[name], asks)
            whole_s = perf_counter() - started_s
            tokens[name] = [answers[0].tokens for answers in found]
            taken_s[name] = found[0][0].decode_s if num_sequences == 1 else whole_s
        if tokens["auto"] != tokens["off"]:
            raise RuntimeError("an answer with guesses is another than without")
        ratios.append(taken_s["off"] / taken_s["auto"])
    return ratios


def _spread(ratios: list[float]) -> float:
    low, _, high = quantiles(ratios, n=4)
    return high - low


# -- nobody else's words -----------------------------------------------------------------------------------------------


@section("others_leak")
def leaks(proof: Proof) -> None:
    """Tenants whose prompts hold pieces of each other's answers: a guess is what it would be had nobody else been."""
    groups, num_requests = Groups(proof.random), 0
    while num_requests < proof.sized(quick=500, full=10_000):
        server = Server(num_blocks=400, max_step_tokens=200, propose=groups.propose)
        server.scheduler.on_end = groups.ended
        for _ in range(20):
            tenant = proof.random.choice(GROUPS)
            server.ask(groups.prompt(tenant), proof.random.randint(2, 12), tenant=tenant, temperature=0.0)
        num_requests += 20
        server.run()
    proof.report("leak_requests", num_requests)
    proof.at_least("leak_guesses", groups.num_guesses, proof.sized(quick=50, full=1_000), "else nothing was tried")
    proof.at_least("leak_temptations", groups.num_tempted, proof.sized(quick=50, full=1_000), "others had words for it")
    proof.equals("others_leak", groups.num_leaked, 0)


class Groups:
    """One who guesses for all groups, as in a server, beside one for each group who never heard of the others."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._shared = Ngrams()
        self._apart = {group: Ngrams() for group in GROUPS}
        self._answers: dict[str, list[list[int]]] = {group: [] for group in GROUPS}
        self._followed: dict[str, set[tuple[int, ...]]] = {group: set() for group in GROUPS}
        """Pairs of tokens that something followed in a group's answers."""
        self.num_guesses = self.num_leaked = self.num_tempted = 0

    def prompt(self, group: str) -> list[int]:
        """A piece of another group's answer, so that its words could be taken up, or anything."""
        random = self._random
        others = [one for name, answers in self._answers.items() if name != group for one in answers[-50:]]
        if others and random.random() < 0.8:
            answer = random.choice(others)
            end = random.randint(1, len(answer))
            return [random.randrange(1, 50), *answer[max(0, end - 4) : end]]
        return [random.randrange(1, 50) for _ in range(random.randint(1, 6))]

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """As the server's, and looked at."""
        group = sequence.request.namespace.cache_group
        guess = self._shared.propose(sequence, limit)
        self.num_guesses += bool(guess.token_ids)
        self.num_leaked += guess != self._apart[group].propose(sequence, limit)
        last = tuple(sequence.tokens[-2:])
        self.num_tempted += any(last in self._followed[name] for name in GROUPS if name != group)
        return guess

    def ended(self, sequence: Sequence) -> None:
        """What was said is remembered: by the server's, by the group's own, and here."""
        group = sequence.request.namespace.cache_group
        self._shared.store_output(sequence)
        self._apart[group].store_output(sequence)
        said = sequence.tokens[sequence.num_prompt_tokens :]
        self._answers[group].append(said)
        self._followed[group] |= set(pairwise(said[:-1]))
