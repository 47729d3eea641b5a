"""Section `computed_after_end`: how much of an answer is computed after it has ended.

A real `quire serve`, asked over HTTP for several answers with stop strings. What was computed is the worker's own
count of tokens fed to its steps (`num_step_tokens` of the admin socket's `/stats`: over all steps and all workers). Of
that, a request owes its prompt less what was cached; each answer but the first owes the prompt's last token once more,
because every answer samples from it for itself; and each answer owes every token it shows but the last, which nobody
needs to feed. All else was computed after an answer had ended:

    late = computed - (prompt - cached) - (answers - 1) - (shown - answers)

Requests of eight answers, of two kinds in turn. In the first, one answer has a stop string that no other meets: `late`
is that answer's own. In the second, several answers meet stop strings at several places: `late` is shared by those
that a stop string ended. The texts to stop at come from the same request without stop strings: the same seed gives the
same answers. The real model is asked one request at a time, so that counts are its own; an oracle, with steps of 30 ms,
eight at a time, so that 64 answers run at once.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import say
from benchmarks.test_model import smollm2_directory
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section

MAX_LATE = 2
NUM_ANSWERS = 8
NUM_STOPS = 4
STOP_CHARACTERS = 6
PROMPTS = (
    "Once upon a time there was a",
    "The three most important things about a garden are",
    "Dear Sir, I am writing to you because",
    "def main(arguments):\n    ",
    "The weather in the north of the country is",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What one server is asked."""

    model: str
    max_tokens: int
    num_requests: int
    num_at_once: int


@dataclass(frozen=True, slots=True)
class Question:
    """One request."""

    prompt: str
    seed: int
    stops: tuple[str, ...] = ()


@dataclass(slots=True)
class Late:
    """Tokens computed after an end: of the one answer it was the only one of, and for each of several."""

    alone: list[int] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    num_ends: int = 0

    @property
    def worst(self) -> float:
        return max([*self.alone, *self.shared], default=0.0)


class Requester:
    """Asks one server, and looks at its worker's count before and after."""

    def __init__(self, server: Server, shape: Shape, dice: Random) -> None:
        self._server = server
        self._shape = shape
        self._dice = dice
        self.late = Late()

    def all(self) -> Late:
        """Every request of the shape, twice: to see its answers, and with stop strings taken from them."""
        with ThreadPoolExecutor(self._shape.num_at_once) as pool:
            for at in range(0, self._shape.num_requests, self._shape.num_at_once):
                numbers = range(at, at + self._shape.num_at_once)
                plain = [self._question(number) for number in numbers]
                answers = list(pool.map(self._ask, plain))
                stopped = [
                    replace(one, stops=self._stops(number, told))
                    for number, one, told in zip(numbers, plain, answers, strict=True)
                ]
                self._measure(pool, [one for one in stopped if one.stops])
        return self.late

    def _question(self, number: int) -> Question:
        prompt = f"{self._dice.getrandbits(24):x} {PROMPTS[number % len(PROMPTS)]}"
        return Question(prompt, self._dice.getrandbits(31))

    def _stops(self, number: int, told: Any) -> tuple[str, ...]:
        texts = [choice["text"] for choice in told["choices"]]
        return _unique_stop(texts, self._dice) if number % 2 else _common_stops(texts, self._dice)

    def _measure(self, pool: ThreadPoolExecutor, questions: list[Question]) -> None:
        before = self._num_computed()
        told = list(pool.map(self._ask, questions))
        late = self._num_computed() - before - sum(_num_owed(one["usage"]) for one in told)
        choices = [choice for one in told for choice in one["choices"]]
        num_ends = sum(choice["finish_reason"] == "stop" and bool(choice["stop_reason"]) for choice in choices)
        if late < 0 or num_ends < len(questions):
            raise RuntimeError(f"{late} tokens late for {num_ends} of {len(choices)} answers: {told}")
        self.late.num_ends += num_ends
        if num_ends == 1:
            self.late.alone.append(late)
        elif num_ends:
            self.late.shared.append(late / num_ends)

    def _ask(self, question: Question) -> Any:
        body = {"model": self._shape.model, "prompt": question.prompt, "seed": question.seed, "n": NUM_ANSWERS}
        body |= {"max_tokens": self._shape.max_tokens, "stop": question.stops or None, "temperature": 1.0}
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=300)
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        told = json.loads(response.read())
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {told}")
        return told

    def _num_computed(self) -> int:
        return sum(int(model["engine"]["num_step_tokens"]) for model in self._server.admin("/stats")["models"])


def _num_owed(usage: dict[str, Any]) -> int:
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    num_owed: int = usage["prompt_tokens"] - num_cached + usage["completion_tokens"] - 1
    return num_owed


def _piece(text: str, dice: Random) -> str:
    """A few characters from the first half of an answer."""
    first = dice.randrange(1, max(2, len(text) // 2))
    return text[first : first + STOP_CHARACTERS]


def _unique_stop(texts: list[str], dice: Random) -> tuple[str, ...]:
    """What ends one answer alone; nothing if the dice find none."""
    for _ in range(50):
        piece = _piece(dice.choice(texts), dice)
        if sum(piece in text for text in texts) == 1:
            return (piece,)
    return ()


def _common_stops(texts: list[str], dice: Random) -> tuple[str, ...]:
    """What ends several answers, each somewhere else."""
    return tuple({_piece(text, dice) for text in dice.sample(texts, NUM_STOPS)} - {""})


@section("computed after end")
def computed_after_end(proof: Proof) -> None:
    """The real model with eight answers, and an oracle with eight times as many at once."""
    dice = Random(7)
    model = smollm2_directory()
    with TemporaryDirectory(prefix="quire-findings-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        shape = Shape(model.name, 32, proof.sized(quick=4, full=60), 1)
        words = (str(model), "--memory", "4GiB", "--max-model-len", "1024")
        with started(folder, *words, module="quire serve") as server:
            real = Requester(server, shape, dice).all()
        shape = Shape("oracle", 60, proof.sized(quick=24, full=400), 8)
        with started(folder, "--step-s", "0.03", "--running", "64") as server:
            many = Requester(server, shape, dice).all()
    say(f"  of one answer alone {sorted(real.alone)} and {sorted(many.alone)}")
    _report(proof, "computed_after_end", real)
    _report(proof, "computed_after_end_many", many)


def _report(proof: Proof, key: str, late: Late) -> None:
    proof.at_least(f"{key}_answers", late.num_ends, 1, "ended by a stop string")
    proof.at_most(key, float(late.worst), MAX_LATE, "for each answer")
