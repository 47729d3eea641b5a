"""Grammars on a real model: complete answers match their schemas, are equal in any circumstance, and cost few steps.

The judge is `jsonschema`, which is independent of the library that makes the masks. By the standard it ignores formats;
answers that violate only a format are counted apart.
"""

import asyncio
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped]

from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from proofs.engine.worker import Ask, run_request, until
from proofs.framework.proof import Proof, section
from proofs.steps.asked import BATCH, SETTINGS, GuidedAsk, HandRun, guided_asks, guided_model, run_by_hand
from proofs.steps.schemas import FIFTY, SchemaTask, bounded_schema
from quire.client.engines.llm import LLM
from quire.client.engines.opening import OpenedModel
from quire.client.engines.served import ServedModel, plan_worker

MIN_FORCED_SHARE = 0.30
NUM_ANSWERS = 4
"""Answers to one question, where it has several."""
MAX_ROUNDS = 12
"""Rounds with preemptions: several are needed, because a row is not preempted again for a while."""
LAST_KILL = 0.8
"""Share of all tokens up to which kills happen: after it, too few tokens remain for a kill to hit an answer."""


# -- valid -------------------------------------------------------------------------------------------------------------


@cache
def _validators(name: str) -> tuple[Draft202012Validator, Draft202012Validator]:
    """Validators of answers to this schema, without and with formats."""
    (task,) = (task for task in FIFTY if task.name == name)
    schema = bounded_schema(task.schema)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema), Draft202012Validator(schema, format_checker=FormatChecker())


def refusal_of(task: SchemaTask, text: str, *, with_formats: bool = False) -> str | None:
    """The reason why a text is no document of this schema; None if it is one."""
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    errors = list(_validators(task.name)[with_formats].iter_errors(document))
    return None if not errors else str(errors[0].message)


@section("invalid")
async def invalid_answers(proof: Proof) -> None:
    """Answer all schemas in batches of sixteen; then repeat some questions with a worker that is killed repeatedly."""
    asks = guided_asks(proof.sized(quick=50, full=2_000), proof.random)
    model = guided_model()
    stats = model.engine.scheduler.stats
    num_forced, num_tokens = stats.num_forced_tokens, stats.num_output_tokens
    completions = LLM(model).generate([ask.prompt for ask in asks], [ask.params for ask in asks])
    num_forced, num_tokens = stats.num_forced_tokens - num_forced, stats.num_output_tokens - num_tokens
    complete = [(a, c.text) for a, c in zip(asks, completions, strict=True) if c.finish_reason == "stop"]
    reasons = Counter(answer.finish_reason for answer in completions)
    invalid = [(ask, text) for ask, text in complete if refusal_of(ask.task, text) is not None]
    for ask, text in invalid[:10]:
        say(f"    {ask.task.name}, seed {ask.params.seed}: {refusal_of(ask.task, text)}: {text}")
    proof.report("invalid_requests", len(asks))
    proof.at_least("invalid_stopped", len(complete), len(asks) // 2, "else few answers were checked")
    proof.report("invalid_cut", reasons["length"], "by max_tokens")
    proof.equals("invalid_errors", len(asks) - reasons["stop"] - reasons["length"], 0, "ended for another reason")
    num_refused = sum(refusal_of(ask.task, text, with_formats=True) is not None for ask, text in complete)
    proof.report("invalid_formats", num_refused - len(invalid), "valid, but for a format's own rules")
    proof.equals("invalid", len(invalid), 0, "refused by jsonschema")
    proof.report("forced_tokens", num_forced, f"of {num_tokens}")
    proof.at_least("forced_share", num_forced / num_tokens, MIN_FORCED_SHARE)
    indices = proof.random.sample(range(len(asks)), proof.sized(quick=BATCH, full=100))
    questions = [Ask(asks[index].prompt, asks[index].params) for index in indices]
    expected = [completions[index].token_ids for index in indices]
    kills = await killed_guided(questions, expected, proof.sized(quick=1, full=10), proof.random)
    proof.report("killed_requests", len(indices))
    proof.at_least("killed_kills", kills.num_kills, proof.sized(quick=1, full=10))
    proof.report("killed_answers", kills.num_replayed, "that a kill interrupted")
    proof.equals("killed_restarts", kills.num_restarts, kills.num_kills)
    proof.equals("killed_tokens_unequal", kills.num_unequal, 0, "tokens that differ")


# -- killed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GuidedKills:
    """The results of questions whose worker was killed."""

    num_kills: int
    num_restarts: int
    num_replayed: int
    num_unequal: int


@dataclass
class GuidedClients:
    """Clients that ask a model, sixteen questions at a time."""

    questions: list[Ask]
    waiting: list[Ask] = field(init=False)
    open: list[Ask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = list(self.questions)

    async def client(self, model: ServedModel) -> None:
        while self.waiting:
            ask = self.waiting.pop()
            self.open.append(ask)
            await run_request(model, ask)
            self.open.remove(ask)

    async def wait_for_tokens(self, num_tokens: float) -> None:
        """Wait for so many tokens in all, and for one more token of every open request: one without a token between two
        crashes would be suspected of causing them, and be tested alone."""
        counts = [(ask, ask.num_tokens) for ask in self.open]
        await until(
            lambda: (
                sum(ask.num_tokens for ask in self.questions) >= num_tokens
                and all(ask.num_tokens > count or ask not in self.open for ask, count in counts)
            )
        )


async def killed_guided(
    questions: list[Ask], expected: Sequence[tuple[int, ...]], num_kills: int, random: Random
) -> GuidedKills:
    """Send questions to a worker, and kill it at random numbers of tokens."""
    queue = GuidedClients(questions)
    num_kills_done, total = 0, sum(map(len, expected))
    async with ServedModel(plan_worker(str(smollm2_file()), SETTINGS)) as model:
        clients = [asyncio.create_task(queue.client(model)) for _ in range(BATCH)]
        await until(lambda: bool(queue.open))
        for num_tokens in sorted(random.uniform(0.0, LAST_KILL * total) for _ in range(num_kills)):
            await queue.wait_for_tokens(num_tokens)
            if not queue.open:
                break
            os.kill(model.supervisor.pid or 0, signal.SIGKILL)
            num_kills_done += 1
            await until(lambda: not model.is_ready)
            await until(lambda: model.is_ready)
        await asyncio.gather(*clients)
        num_restarts = model.supervisor.num_restarts
    for ask in queue.questions:
        if ask.error:
            say(f"    lost: {ask.error}")
    answers = [() if ask.completion is None else ask.completion.token_ids for ask in queue.questions]
    num_replayed = sum(ask.completion is not None and ask.completion.num_replays > 0 for ask in queue.questions)
    num_unequal = sum(num_different(tokens, wanted) for tokens, wanted in zip(answers, expected, strict=True))
    return GuidedKills(num_kills_done, num_restarts, num_replayed, num_unequal)


def num_different(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The number of positions where two answers differ; positions that only one of them has differ too."""
    pairs = zip(tokens, others, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(tokens) - len(others))


# -- equal in any circumstance -----------------------------------------------------------------------------------------


@section("guided_unequal")
def guided_unequal(proof: Proof) -> None:
    """Answer each question alone without a cache; then in a batch, cached, preempted, and as one of four answers."""
    asks, model = guided_asks(proof.sized(quick=10, full=100), proof.random), guided_model()
    alone = [_answer_alone(model, ask, 0) for ask in asks]
    model.engine.memory.clear()
    batch, cached = run_by_hand(model, asks), run_by_hand(model, asks)  # the second finds its prompts in the cache
    scheduler, preempted = model.engine.scheduler, list[HandRun]()
    num_before = scheduler.stats.num_preemptions
    while scheduler.stats.num_preemptions - num_before < len(asks) and len(preempted) < MAX_ROUNDS:
        model.engine.memory.clear()
        preempted.append(run_by_hand(model, asks, after_step=_every(3, scheduler.preempt_latest)))
    num_preemptions = scheduler.stats.num_preemptions - num_before
    model.engine.memory.clear()
    half = asks[: len(asks) // 2]
    run_of_four = run_by_hand(model, half, range(NUM_ANSWERS))
    unequal = Counter(
        {
            name: sum(single != answers[0] for run in runs for single, answers in zip(alone, run.answers, strict=True))
            for name, runs in (("in a batch", [batch]), ("cached", [cached]), ("preempted", preempted))
        }
    )
    for number, (ask, answers) in enumerate(zip(half, run_of_four.answers, strict=True)):
        for index, tokens in answers.items():
            is_drawn = index > 0 and ask.params.temperature != 0.0
            unequal["one of four"] += tokens != (_answer_alone(model, ask, index) if is_drawn else alone[number])
    say(f"    {dict(unequal)}")
    num_pairs = (2 + len(preempted)) * len(asks) + NUM_ANSWERS * len(half)
    proof.at_least("guided_pairs", num_pairs, proof.sized(quick=50, full=500))
    proof.at_least("guided_preemptions", num_preemptions, len(asks), "at least one for each question")
    proof.equals("guided_cached", sum(count > 0 for count in cached.num_cached), len(asks), "all found their prompts")
    proof.equals("guided_unequal", unequal.total(), 0)


def _answer_alone(model: OpenedModel, ask: GuidedAsk, index: int) -> tuple[int, ...]:
    """The answer of this index, alone and with an empty cache."""
    model.engine.memory.clear()
    return run_by_hand(model, [ask], [index]).answers[0][index]


def _every(count: int, act: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `act` at every `count`-th call."""
    calls = itertools.count(1)
    return lambda: act() if next(calls) % count == 0 else None
