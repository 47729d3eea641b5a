"""Grammars on a real model: answers that end match their schemas, are the same in any circumstance, and cost few steps.

The judge is `jsonschema`, which knows nothing of the library that makes the masks. It takes formats for remarks, as the
standard has it; those that it would refuse if it looked at them are told apart.
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
from proofs.engine.worker import Ask, answer, until
from proofs.framework.proof import Proof, section
from proofs.steps.asked import BATCH, SETTINGS, GuidedAsk, HandRun, guided_asks, guided_model, run_by_hand
from proofs.steps.schemas import FIFTY, SchemaTask, bounded_schema
from quire.client.engines.llm import LLM
from quire.client.engines.opening import OpenedModel
from quire.client.engines.served import ServedModel, plan_worker

MIN_FORCED_SHARE = 0.30
N = 4
"""Answers to one question."""
MAX_ROUNDS = 12
"""Of answers that are preempted: a row that has just been is let alone for a while."""
LAST_KILL = 0.8
"""Of the tokens that are to come: behind it too few are left to be sure of a kill."""


# -- valid -------------------------------------------------------------------------------------------------------------


@cache
def _judges(name: str) -> tuple[Draft202012Validator, Draft202012Validator]:
    """What looks at an answer to this schema, without and with formats."""
    (task,) = (one for one in FIFTY if one.name == name)
    schema = bounded_schema(task.schema)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema), Draft202012Validator(schema, format_checker=FormatChecker())


def refusal_of(task: SchemaTask, text: str, *, with_formats: bool = False) -> str | None:
    """Why a text is no document of this schema; None: it is one."""
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    errors = list(_judges(task.name)[with_formats].iter_errors(document))
    return None if not errors else str(errors[0].message)


@section("invalid")
async def invalid_answers(proof: Proof) -> None:
    """All schemas in batches of sixteen; then some of the same questions at a worker that is killed again and again."""
    asks = guided_asks(proof.sized(quick=50, full=2_000), proof.random)
    opened = guided_model()
    stats = opened.engine.scheduler.stats
    num_forced, num_tokens = stats.num_forced_tokens, stats.num_output_tokens
    done = LLM(opened).generate([ask.prompt for ask in asks], [ask.params for ask in asks])
    num_forced, num_tokens = stats.num_forced_tokens - num_forced, stats.num_output_tokens - num_tokens
    stopped = [(ask, one.text) for ask, one in zip(asks, done, strict=True) if one.finish_reason == "stop"]
    ends = Counter(one.finish_reason for one in done)
    refused = [(ask, text) for ask, text in stopped if refusal_of(ask.task, text) is not None]
    for ask, text in refused[:10]:
        say(f"    {ask.task.name}, seed {ask.params.seed}: {refusal_of(ask.task, text)}: {text}")
    proof.report("invalid_requests", len(asks))
    proof.at_least("invalid_stopped", len(stopped), len(asks) // 2, "else few were looked at")
    proof.report("invalid_cut", ends["length"], "by max_tokens")
    proof.equals("invalid_errors", len(asks) - ends["stop"] - ends["length"], 0, "ended in no other way")
    formats = sum(refusal_of(ask.task, text, with_formats=True) is not None for ask, text in stopped) - len(refused)
    proof.report("invalid_formats", formats, "valid, but for a format's own rules")
    proof.equals("invalid", len(refused), 0, "refused by jsonschema")
    proof.report("forced_tokens", num_forced, f"of {num_tokens}")
    proof.at_least("forced_share", num_forced / num_tokens, MIN_FORCED_SHARE)
    chosen = proof.random.sample(range(len(asks)), proof.sized(quick=BATCH, full=100))
    asked = [Ask(asks[at].prompt, asks[at].params) for at in chosen]
    expected = [done[at].token_ids for at in chosen]
    told = await killed_guided(asked, expected, proof.sized(quick=1, full=10), proof.random)
    proof.report("killed_requests", len(chosen))
    proof.at_least("killed_kills", told.num_kills, proof.sized(quick=1, full=10))
    proof.report("killed_answers", told.num_replayed, "that a kill fell into")
    proof.equals("killed_restarts", told.num_restarts, told.num_kills)
    proof.equals("killed_tokens_unequal", told.num_unequal, 0, "tokens that differ")


# -- killed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GuidedKills:
    """What became of questions whose worker was killed."""

    num_kills: int
    num_restarts: int
    num_replayed: int
    num_unequal: int


@dataclass
class GuidedCrowd:
    """Questions that clients ask a model, sixteen at a time."""

    asked: list[Ask]
    waiting: list[Ask] = field(init=False)
    open: list[Ask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = list(self.asked)

    async def client(self, model: ServedModel) -> None:
        while self.waiting:
            ask = self.waiting.pop()
            self.open.append(ask)
            await answer(model, ask)
            self.open.remove(ask)

    async def moment(self, num_tokens: float) -> None:
        """When so many tokens have come, and one more for everybody who waits now: whoever had none between two crashes
        is a suspect, and then another rule of the house is tried than this one."""
        seen = [(ask, ask.num_tokens) for ask in self.open]
        await until(
            lambda: (
                sum(ask.num_tokens for ask in self.asked) >= num_tokens
                and all(ask.num_tokens > count or ask not in self.open for ask, count in seen)
            )
        )


async def killed_guided(
    asked: list[Ask], expected: Sequence[tuple[int, ...]], num_kills: int, random: Random
) -> GuidedKills:
    """Ask a worker, and kill it when so many tokens have come as the dice say."""
    crowd = GuidedCrowd(asked)
    kills, total = 0, sum(map(len, expected))
    async with ServedModel(plan_worker(str(smollm2_file()), SETTINGS)) as model:
        clients = [asyncio.create_task(crowd.client(model)) for _ in range(BATCH)]
        await until(lambda: bool(crowd.open))
        for num_tokens in sorted(random.uniform(0.0, LAST_KILL * total) for _ in range(num_kills)):
            await crowd.moment(num_tokens)
            if not crowd.open:
                break
            os.kill(model.supervisor.pid or 0, signal.SIGKILL)
            kills += 1
            await until(lambda: not model.is_ready)
            await until(lambda: model.is_ready)
        await asyncio.gather(*clients)
        num_restarts = model.supervisor.num_restarts
    for ask in crowd.asked:
        if ask.error:
            say(f"    lost: {ask.error}")
    answers = [() if one.done is None else one.done.token_ids for one in crowd.asked]
    num_replayed = sum(one.done is not None and one.done.num_replays > 0 for one in crowd.asked)
    unequal = sum(num_different(one, other) for one, other in zip(answers, expected, strict=True))
    return GuidedKills(kills, num_restarts, num_replayed, unequal)


def num_different(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Places where two answers differ; what only one of them has differs too."""
    pairs = zip(tokens, others, strict=False)
    return sum(one != other for one, other in pairs) + abs(len(tokens) - len(others))


# -- the same in any circumstance --------------------------------------------------------------------------------------


@section("guided_unequal")
def guided_unequal(proof: Proof) -> None:
    """Each question alone and cold; then in a batch, preempted, cached, and as one of four answers."""
    asks, opened = guided_asks(proof.sized(quick=10, full=100), proof.random), guided_model()
    alone = [_alone(opened, ask, 0) for ask in asks]
    opened.engine.memory.clear()
    batch = run_by_hand(opened, asks)
    cached = run_by_hand(opened, asks)
    scheduler, preempted = opened.engine.scheduler, list[HandRun]()
    num_before = scheduler.stats.num_preemptions
    while scheduler.stats.num_preemptions - num_before < len(asks) and len(preempted) < MAX_ROUNDS:
        opened.engine.memory.clear()
        preempted.append(run_by_hand(opened, asks, between=_every(3, scheduler.preempt_latest)))
    num_preemptions = scheduler.stats.num_preemptions - num_before
    several = asks[: len(asks) // 2]
    opened.engine.memory.clear()
    four = run_by_hand(opened, several, range(N))
    unequal = Counter(
        {
            name: sum(one != answers[0] for run in runs for one, answers in zip(alone, run.answers, strict=True))
            for name, runs in (("in a batch", [batch]), ("cached", [cached]), ("preempted", preempted))
        }
    )
    for at, (ask, answers) in enumerate(zip(several, four.answers, strict=True)):
        for index, tokens in answers.items():
            is_drawn = index > 0 and ask.params.temperature != 0.0
            unequal["one of four"] += tokens != (_alone(opened, ask, index) if is_drawn else alone[at])
    say(f"    {dict(unequal)}")
    proof.at_least("guided_pairs", (2 + len(preempted)) * len(asks) + N * len(several), proof.sized(quick=50, full=500))
    proof.at_least("guided_preemptions", num_preemptions, len(asks), "one for each question at least")
    proof.equals("guided_cached", sum(count > 0 for count in cached.num_cached), len(asks), "all found their prompts")
    proof.equals("guided_unequal", unequal.total(), 0)


def _alone(opened: OpenedModel, ask: GuidedAsk, index: int) -> tuple[int, ...]:
    """The answer of this index with nobody else around, and nothing computed before."""
    opened.engine.memory.clear()
    return run_by_hand(opened, [ask], [index]).answers[0][index]


def _every(count: int, act: Callable[[], None]) -> Callable[[], None]:
    """Something that acts every so many times it is called."""
    calls = itertools.count(1)
    return lambda: act() if next(calls) % count == 0 else None
