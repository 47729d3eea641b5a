"""The plans that show how much memory a step takes at most: every row it may have, with all that can be asked of
logits, and the longest sequences."""

from collections.abc import Callable

from quire.backends import memory_plan
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, Scoring, StepPlan, WorkItem

TAIL_TOKENS = 32
"""Of a prompt that stand at the end of the longest sequence."""


def worst_plans(settings: ModelSettings, longest: int, decode_tokens: int) -> tuple[StepPlan, StepPlan]:
    """A step of prompts and one of decoding sequences, all in block 1; each but the first of these so long."""
    num_fed, tail = min(settings.max_step_tokens, longest), min(TAIL_TOKENS, longest)
    table = (1,) * -(-longest // settings.block_size)
    prompts = [_scored(0, num_fed, 0, table)]
    if num_fed > tail:
        prompts = [_scored(0, num_fed - tail, 0, table), _scored(1, tail, longest - tail, table)]
    if settings.max_running == 1:
        prompts = prompts[:1]  # there may be one state slot and no more
    params = ResolvedSampling(
        top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5
    )
    decoding = [
        WorkItem(
            at,
            (1,),
            position,
            table,
            Sampling(params, 1, 0, position + 1, 1, (1,) * (position + 1)),
            state_slot=at + 1,
        )
        for at in range(settings.max_running)
        for position in [longest - 1 if at == 0 else min(longest, decode_tokens) - 1]
    ]
    return StepPlan(0, (), tuple(prompts)), StepPlan(1, (), tuple(decoding))


def measured_bytes(run: Callable[[StepPlan], object], plans: tuple[StepPlan, ...]) -> int:
    """The most that these steps took beside what was held before."""
    memory_plan.forget_peak()
    before = memory_plan.resident_bytes()
    for plan in plans:
        run(plan)
    return max(0, memory_plan.peak_bytes() - before)


def _scored(sequence_id: int, num_tokens: int, first: int, table: tuple[int, ...]) -> WorkItem:
    """An item of which all is wanted that can be of a prompt."""
    tokens = (1,) * num_tokens
    scoring = Scoring(first + 1, tokens, 5)
    return WorkItem(sequence_id, tokens, first, table, scoring=scoring, state_slot=sequence_id + 1)
