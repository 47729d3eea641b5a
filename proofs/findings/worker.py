"""Section `computed_after_end`: how much of an answer is computed after it has ended.

A real `quire serve` computes several answers with stop strings. The worker counts the tokens fed to its steps
(`num_step_tokens` of the admin socket's `/stats`: over all steps and all workers). Of these tokens a request needs its
prompt without the cached part; each answer but the first needs the prompt's last token once more, because every answer
samples from it; and each answer needs every token it shows but the last, which is never fed. All other tokens were
computed after an answer had ended:

    late = computed - (prompt - cached) - (answers - 1) - (shown - answers)

Requests have eight answers and are of two kinds in turn. In the first kind, only one answer contains the stop string:
`late` belongs to that answer. In the second kind, several answers contain stop strings in several places: `late` is
divided by their number. The stop strings are pieces of the answers to the same request without stop strings: the same
seed gives the same answers. The real model gets one request at a time; an *oracle*, a simulated model whose steps take
30 ms, gets eight at a time, so that 64 answers run at once.
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
    """The model and the load of one server."""

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
    """Tokens computed after an end: of the one answer that was stopped, and the mean where several were stopped."""

    alone: list[int] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    num_ends: int = 0

    @property
    def worst(self) -> float:
        return max([*self.alone, *self.shared], default=0.0)


class Requester:
    """Sends requests to one server, and reads its worker's count before and after."""

    def __init__(self, server: Server, shape: Shape, dice: Random) -> None:
        self._server = server
        self._shape = shape
        self._dice = dice
        self.late = Late()

    def run(self) -> Late:
        """Send each request of the shape twice: without stop strings, then with stop strings taken from its answers."""
        with ThreadPoolExecutor(self._shape.num_at_once) as pool:
            for first in range(0, self._shape.num_requests, self._shape.num_at_once):
                numbers = range(first, first + self._shape.num_at_once)
                plain = [self._question(number) for number in numbers]
                answers = list(pool.map(self._ask, plain))
                with_stops = [
                    replace(question, stops=self._stops(number, answer))
                    for number, question, answer in zip(numbers, plain, answers, strict=True)
                ]
                self._measure(pool, [question for question in with_stops if question.stops])
        return self.late

    def _question(self, number: int) -> Question:
        prompt = f"{self._dice.getrandbits(24):x} {PROMPTS[number % len(PROMPTS)]}"
        return Question(prompt, self._dice.getrandbits(31))

    def _stops(self, number: int, answer: Any) -> tuple[str, ...]:
        texts = [choice["text"] for choice in answer["choices"]]
        return _unique_stop(texts, self._dice) if number % 2 else _common_stops(texts, self._dice)

    def _measure(self, pool: ThreadPoolExecutor, questions: list[Question]) -> None:
        num_before = self._num_computed()
        answers = list(pool.map(self._ask, questions))
        late = self._num_computed() - num_before - sum(_num_needed(answer["usage"]) for answer in answers)
        choices = [choice for answer in answers for choice in answer["choices"]]
        num_ends = sum(choice["finish_reason"] == "stop" and bool(choice["stop_reason"]) for choice in choices)
        if late < 0 or num_ends < len(questions):
            raise RuntimeError(f"{late} tokens late for {num_ends} of {len(choices)} answers: {answers}")
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
        answer = json.loads(response.read())
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"expected status 200, got {response.status}: {answer}")
        return answer

    def _num_computed(self) -> int:
        return sum(int(model["engine"]["num_step_tokens"]) for model in self._server.admin("/stats")["models"])


def _num_needed(usage: dict[str, Any]) -> int:
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    num_needed: int = usage["prompt_tokens"] - num_cached + usage["completion_tokens"] - 1
    return num_needed


def _piece(text: str, dice: Random) -> str:
    """A few characters from the first half of an answer."""
    first = dice.randrange(1, max(2, len(text) // 2))
    return text[first : first + STOP_CHARACTERS]


def _unique_stop(texts: list[str], dice: Random) -> tuple[str, ...]:
    """A piece that only one of the texts contains; nothing if 50 random pieces have none."""
    for _ in range(50):
        piece = _piece(dice.choice(texts), dice)
        if sum(piece in text for text in texts) == 1:
            return (piece,)
    return ()


def _common_stops(texts: list[str], dice: Random) -> tuple[str, ...]:
    """Pieces of several texts, which end these answers in different places."""
    return tuple({_piece(text, dice) for text in dice.sample(texts, NUM_STOPS)} - {""})


@section("computed after end")
def computed_after_end(proof: Proof) -> None:
    """The real model with 8 answers at once, and an oracle with 64."""
    dice = Random(7)
    model = smollm2_directory()
    with TemporaryDirectory(prefix="quire-findings-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        shape = Shape(model.name, 32, proof.sized(quick=4, full=60), 1)
        words = (str(model), "--memory", "4GiB", "--max-model-len", "1024")
        with started(folder, *words, module="quire serve") as server:
            real = Requester(server, shape, dice).run()
        shape = Shape("oracle", 60, proof.sized(quick=24, full=400), 8)
        with started(folder, "--step-s", "0.03", "--running", "64") as server:
            many = Requester(server, shape, dice).run()
    say(f"  where one answer was stopped: {sorted(real.alone)}, of 64 at once {sorted(many.alone)}")
    _report(proof, "computed_after_end", real)
    _report(proof, "computed_after_end_many", many)


def _report(proof: Proof, key: str, late: Late) -> None:
    proof.at_least(f"{key}_answers", late.num_ends, 1, "ended by a stop string")
    proof.at_most(key, float(late.worst), MAX_LATE, "for each answer")
