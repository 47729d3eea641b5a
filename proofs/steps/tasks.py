"""Prompts that measure speculation (edits, extractions, free talk), and a function that steps an engine by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import monotonic, perf_counter

from msgspec.structs import replace

from quire.client.engines.opening import OpenedModel
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.core.events import Refused, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, Request
from quire.core.step import TokenLogprobs

TASKS = ("edit", "extract", "chat")
PLACES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Cork", "Turin", "Perth", "Fargo", "Lyon", "Kyoto")
NAMES = ("Ada Price", "Omar Haddad", "Lena Berg", "Ivo Marsh", "Rosa Klein", "Tim Okoro", "Mei Lin", "Hugo Brandt")
GOODS = ("bicycles", "lamps", "violins", "kettles", "tents", "globes", "maps", "chairs")
STORY = (
    "The workshop of {name} stands near the old harbour of {place}. Every morning at {hour} the doors are opened, and "
    "by noon {count} {goods} have been packed into wooden boxes. A clerk writes the number of every box into a green "
    "book, and a second clerk checks it. In the evening the boxes are carried to the station, where the night train "
    "to {other} waits. Last year the workshop sold {total} {goods}, more than in any year before."
)
QUESTIONS = {
    "edit": "Repeat the following text word for word, but write {fresh} wherever it says {place}.\n\n{story}",
    "extract": "{story}\n\nRead the text above. Answer with a JSON object with the fields owner, city, opens_at, "
    "goods, boxes_by_noon, destination and sold_last_year, and then quote the sentence for each field.",
    "chat": "Tell me in a few sentences what you think of {goods} from {place}, and why somebody would want one.",
}


@dataclass(frozen=True, slots=True)
class TaskAsk:
    """A question, and its sampling parameters."""

    prompt: list[int]
    params: SamplingParams


def task_prompt(model: OpenedModel, task: str, random: Random) -> list[int]:
    """A question of this kind about random subjects, in the tokens of the model's template."""
    place, other_place, new_place = random.sample(PLACES, 3)
    goods = random.choice(GOODS)
    story = STORY.format(
        name=random.choice(NAMES), place=place, hour=f"{random.randint(5, 11)}:{random.randint(10, 59)}", goods=goods,
        count=random.randint(20, 400), other=other_place, total=f"{random.randint(2, 90)},{random.randint(100, 999)}",
    )  # fmt: skip
    question = QUESTIONS[task].format(story=story, place=place, fresh=new_place, goods=goods)
    return model.text.chat([{"role": "user", "content": question}])


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer with the time of its decoding."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    decode_s: float
    """From its first token to its last."""


class _EventCollector:
    """Collects the events of one request into its answers."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: dict[int, list[int]] = {one.index: list(one.produced) for one in request.continuations}
        self.logprobs: dict[int, list[TokenLogprobs | None]] = {index: [] for index in self.tokens}
        self.times_s: list[float] = []

    def add(self, event: RequestEvent) -> None:
        if isinstance(event, Token):
            self.tokens[event.sequence_index].append(event.token_id)
            self.logprobs[event.sequence_index].append(event.logprobs)
            self.times_s.append(perf_counter())
        elif isinstance(event, SequenceFinished) and event.error is not None:
            raise RuntimeError(f"an answer ended with {event.error}")

    def answers(self) -> list[TimedAnswer]:
        decode_s = self.times_s[-1] - self.times_s[0]
        return [TimedAnswer(tuple(self.tokens[i]), tuple(self.logprobs[i]), decode_s) for i in sorted(self.tokens)]


def run_timed(
    model: OpenedModel, asks: Sequence[TaskAsk], forgets: Callable[[], bool] = lambda: False
) -> list[list[TimedAnswer]]:
    """Ask all questions at once and step until every answer has ended; returns the answers of each question.

    `forgets` is called after each step. If it returns True, all requests are cancelled and the cache is emptied, as if
    the engine had died; then they are restored with the tokens that they already have.
    """
    engine = model.engine
    collectors: dict[str, _EventCollector] = {}
    for ask in asks:
        request = make_request(model.text, model.text.prompt(ask.prompt), ask.params)
        collectors[request.request_id] = _EventCollector(request)
        if isinstance(result := engine.submit(request), Refused):
            raise result.error
    order = list(collectors.values())
    while engine.has_work:
        for event in engine.step(monotonic):
            if event.request_id in collectors:
                collectors[event.request_id].add(event)
        if forgets():
            collectors = _restore_all(model, collectors)
    return [collector.answers() for collector in order]


def _restore_all(model: OpenedModel, collectors: dict[str, _EventCollector]) -> dict[str, _EventCollector]:
    """Cancel all live requests, empty the cache, and restore the requests with the tokens that they have."""
    engine, restored = model.engine, {}
    live = [collectors[name] for name in list(engine.scheduler.live) if name in collectors]
    for collector in live:
        engine.cancel(collector.request.request_id)
    while engine.has_work:
        engine.step(monotonic)
    engine.memory.clear()
    for number, collector in enumerate(live):
        continuations = tuple(Continuation(index, tuple(tokens)) for index, tokens in collector.tokens.items())
        request_id = f"{collector.request.request_id[:32]}-{monotonic()}-{number}"
        collector.request = replace(collector.request, request_id=request_id, continuations=continuations)
        engine.restore(collector.request)
        restored[collector.request.request_id] = collector
    return restored
