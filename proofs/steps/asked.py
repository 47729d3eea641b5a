"""Questions with grammars for the test model, and a function that steps an engine by hand to answer them."""

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
    "Invent what you do not know.\nSubject: {subject}\nWish: {wish}\nJSON: "
)
"""Longer than a block of the KV memory, so that a part of it can be found in the cache."""
SUBJECTS = (
    "a harbour in winter", "Marie Curie", "the river Nile", "a broken bicycle", "tomato soup", "the planet Mars",
    "an old library", "a football match", "Ludwig van Beethoven", "a late delivery", "the city of Lima", "green tea",
    "a lost umbrella", "the first computer", "a garden in spring", "an angry customer", "a wooden chair",
    "the history of paper", "a night train", "seven black cats",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GuidedAsk:
    """A question whose answer must match a schema."""

    task: SchemaTask
    prompt: str
    params: SamplingParams


@cache
def schema_grammar(name: str) -> Grammar:
    """The grammar of one of the fifty schemas."""
    (task,) = (task for task in FIFTY if task.name == name)
    return Grammar.json_schema(bounded_schema(task.schema))


def guided_asks(count: int, random: Random) -> list[GuidedAsk]:
    """Questions over all schemas in turn and both temperatures, each with a random subject."""
    asks = []
    for number in range(count):
        task, turn = FIFTY[number % len(FIFTY)], number // len(FIFTY)
        temperature = TEMPERATURES[(number + turn) % len(TEMPERATURES)]
        params = SamplingParams(
            grammar=schema_grammar(task.name),
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=random.getrandbits(60),
        )
        asks.append(GuidedAsk(task, PROMPT.format(subject=random.choice(SUBJECTS), wish=task.wish), params))
    return asks


@cache
def guided_model() -> OpenedModel:
    """The test model in this process, shared by several sections."""
    return open_model(str(smollm2_file()), SETTINGS)


# -- stepped by hand ---------------------------------------------------------------------------------------------------

AnswersByIndex = dict[int, tuple[int, ...]]
"""Index of an answer to one question -> its tokens."""


@dataclass(frozen=True, slots=True)
class HandRun:
    """The results of some questions."""

    answers: list[AnswersByIndex]
    """In the order of the questions."""
    num_cached: list[int]
    """Prompt tokens that each question found in the cache."""


def run_by_hand(
    model: OpenedModel,
    asks: Sequence[GuidedAsk],
    indices: Sequence[int] = (0,),
    after_step: Callable[[], None] = lambda: None,
) -> HandRun:
    """Ask all questions at once for the answers of these indices, and step until all end; each step calls `after_step`.

    Raises RuntimeError for an answer that did not end by itself or by its length.
    """
    engine = model.engine
    ask_numbers: dict[str, int] = {}
    answers: list[AnswersByIndex] = [dict.fromkeys(indices, ()) for _ in asks]
    num_cached = [0] * len(asks)
    for number, ask in enumerate(asks):
        request = make_request(model.text, model.text.prompt(ask.prompt), ask.params)
        request = replace(request, continuations=tuple(Continuation(index) for index in indices))
        result = engine.submit(request)
        if isinstance(result, Refused):
            raise result.error
        ask_numbers[request.request_id] = number
    while engine.has_work:
        for event in engine.step(monotonic):
            number = ask_numbers[event.request_id]
            if isinstance(event, Token):
                answers[number][event.sequence_index] += (event.token_id,)
            elif isinstance(event, FirstToken):
                num_cached[number] = event.num_cached_tokens
            elif isinstance(event, SequenceFinished) and event.error is not None:
                raise RuntimeError(f"an answer to {asks[number].task.name} ended with {event.error}")
        after_step()
    return HandRun(answers, num_cached)
