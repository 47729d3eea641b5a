"""What is asked to see what guesses are worth: edits, extractions and free talk, and an engine stepped by hand."""

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
ASKED = {
    "edit": "Repeat the following text word for word, but write {fresh} wherever it says {place}.\n\n{story}",
    "extract": "{story}\n\nRead the text above. Answer with a JSON object with the fields owner, city, opens_at, "
    "goods, boxes_by_noon, destination and sold_last_year, and then quote the sentence for each field.",
    "chat": "Tell me in a few sentences what you think of {goods} from {place}, and why somebody would want one.",
}


@dataclass(frozen=True, slots=True)
class TaskAsk:
    """One question, and how it is to be answered."""

    prompt: list[int]
    params: SamplingParams


def task_prompt(opened: OpenedModel, task: str, random: Random) -> list[int]:
    """A question of this kind about something else every time, in the tokens of the model's template."""
    place, other, fresh = random.sample(PLACES, 3)
    goods = random.choice(GOODS)
    story = STORY.format(
        name=random.choice(NAMES), place=place, hour=f"{random.randint(5, 11)}:{random.randint(10, 59)}", goods=goods,
        count=random.randint(20, 400), other=other, total=f"{random.randint(2, 90)},{random.randint(100, 999)}",
    )  # fmt: skip
    asked = ASKED[task].format(story=story, place=place, fresh=fresh, goods=goods)
    return opened.text.chat([{"role": "user", "content": asked}])


@dataclass(frozen=True, slots=True)
class Told:
    """One answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    decode_s: float
    """From its first token to its last."""


class _Listener:
    """What is said of one request's answers."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: dict[int, list[int]] = {one.index: list(one.produced) for one in request.continuations}
        self.logprobs: dict[int, list[TokenLogprobs | None]] = {index: [] for index in self.tokens}
        self.times_s: list[float] = []

    def hear(self, event: RequestEvent) -> None:
        if isinstance(event, Token):
            self.tokens[event.sequence_index].append(event.token_id)
            self.logprobs[event.sequence_index].append(event.logprobs)
            self.times_s.append(perf_counter())
        elif isinstance(event, SequenceFinished) and event.error is not None:
            raise RuntimeError(f"an answer ended with {event.error}")

    def told(self) -> list[Told]:
        spent_s = self.times_s[-1] - self.times_s[0]
        return [Told(tuple(self.tokens[at]), tuple(self.logprobs[at]), spent_s) for at in sorted(self.tokens)]


def told_by(
    opened: OpenedModel, asks: Sequence[TaskAsk], between: Callable[[], bool] = lambda: False
) -> list[list[Told]]:
    """Ask all at once and step until every answer has ended; for each question its answers.

    `between` comes after each step. Where it says so the engine forgets everything, as one does that died, and goes on
    with the tokens that were told.
    """
    engine = opened.engine
    heard: dict[str, _Listener] = {}
    for ask in asks:
        request = make_request(opened.text, opened.text.prompt(ask.prompt), ask.params)
        heard[request.request_id] = _Listener(request)
        if isinstance(told := engine.submit(request), Refused):
            raise told.error
    order = list(heard.values())
    while engine.has_work:
        for event in engine.step(monotonic):
            if event.request_id in heard:
                heard[event.request_id].hear(event)
        if between():
            heard = _restored(opened, heard)
    return [one.told() for one in order]


def _restored(opened: OpenedModel, heard: dict[str, _Listener]) -> dict[str, _Listener]:
    """All that live are cancelled, the cache is emptied, and they are asked again with what they have."""
    engine, again = opened.engine, {}
    alive = [heard[name] for name in list(engine.scheduler.live) if name in heard]
    for one in alive:
        engine.cancel(one.request.request_id)
    while engine.has_work:
        engine.step(monotonic)
    engine.memory.clear()
    for number, one in enumerate(alive):
        produced = tuple(Continuation(index, tuple(tokens)) for index, tokens in one.tokens.items())
        one.request = replace(
            one.request, request_id=f"{one.request.request_id[:32]}-{monotonic()}-{number}", continuations=produced
        )
        engine.restore(one.request)
        again[one.request.request_id] = one
    return again
