"""What the proofs about grammars ask the test model, and an engine that is stepped by hand to answer it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from time import monotonic

from msgspec.structs import replace

from benchmarks.test_model import smollm2_file
from proofs.steps.schemas import FIFTY, SchemaTask, bounded_schema
from quire.client.engines.opening import OpenedModel, open_model
from quire.client.request.params import Grammar, SamplingParams
from quire.client.request.requests import make_request
from quire.config import ModelSettings
from quire.core.events import FirstToken, Refused, SequenceFinished, Token
from quire.core.request import Continuation

BATCH = 16
MAX_TOKENS = 160
TEMPERATURES = (0.0, 0.8)
SETTINGS = ModelSettings(memory_bytes=2 << 30, max_sequence_tokens=512, max_running=BATCH)
PROMPT = (
    "You are given a subject and a wish, and you answer with one JSON document, short and without any other words. "
    "Invent what you do not know.\nSubject: {subject}\nWish: {wanted}\nJSON: "
)
"""Longer than a block of the memory, so that there is something to be found in it."""
SUBJECTS = (
    "a harbour in winter", "Marie Curie", "the river Nile", "a broken bicycle", "tomato soup", "the planet Mars",
    "an old library", "a football match", "Ludwig van Beethoven", "a late delivery", "the city of Lima", "green tea",
    "a lost umbrella", "the first computer", "a garden in spring", "an angry customer", "a wooden chair",
    "the history of paper", "a night train", "seven black cats",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GuidedAsk:
    """One question whose answer must match a schema."""

    task: SchemaTask
    prompt: str
    params: SamplingParams


@cache
def schema_grammar(name: str) -> Grammar:
    """The grammar of one of the fifty schemas, as it is asked for."""
    (task,) = (one for one in FIFTY if one.name == name)
    return Grammar.json_schema(bounded_schema(task.schema))


def guided_asks(count: int, random: Random) -> list[GuidedAsk]:
    """So many, over all schemas in turn and both temperatures, each about something else."""
    asks = []
    for at in range(count):
        task, turn = FIFTY[at % len(FIFTY)], at // len(FIFTY)
        temperature = TEMPERATURES[(at + turn) % len(TEMPERATURES)]
        params = SamplingParams(
            grammar=schema_grammar(task.name),
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=random.getrandbits(60),
        )
        asks.append(GuidedAsk(task, PROMPT.format(subject=random.choice(SUBJECTS), wanted=task.wanted), params))
    return asks


@cache
def guided_model() -> OpenedModel:
    """The test model in this process, which several sections ask."""
    return open_model(str(smollm2_file()), SETTINGS)


# -- stepped by hand ---------------------------------------------------------------------------------------------------

Answered = dict[int, tuple[int, ...]]
"""The tokens of each answer to one question, by its index."""


@dataclass(frozen=True, slots=True)
class HandRun:
    """What came of some questions."""

    answers: list[Answered]
    """In the order of the questions."""
    num_cached: list[int]
    """Prompt tokens that each of them found computed."""


def run_by_hand(
    opened: OpenedModel,
    asks: Sequence[GuidedAsk],
    indices: Sequence[int] = (0,),
    between: Callable[[], None] = lambda: None,
) -> HandRun:
    """Ask all at once for the answers of these indices, and step until each has ended; `between` comes after each step.

    Raises RuntimeError for an answer that did not end by itself or by its length.
    """
    engine = opened.engine
    order: dict[str, int] = {}
    answers: list[Answered] = [dict.fromkeys(indices, ()) for _ in asks]
    num_cached = [0] * len(asks)
    for at, ask in enumerate(asks):
        request = make_request(opened.text, opened.text.prompt(ask.prompt), ask.params)
        request = replace(request, continuations=tuple(Continuation(index) for index in indices))
        told = engine.submit(request)
        if isinstance(told, Refused):
            raise told.error
        order[request.request_id] = at
    while engine.has_work:
        for event in engine.step(monotonic):
            at = order[event.request_id]
            if isinstance(event, Token):
                answers[at][event.sequence_index] += (event.token_id,)
            elif isinstance(event, FirstToken):
                num_cached[at] = event.num_cached_tokens
            elif isinstance(event, SequenceFinished) and event.error is not None:
                raise RuntimeError(f"an answer to {asks[at].task.name} ended with {event.error}")
        between()
    return HandRun(answers, num_cached)
