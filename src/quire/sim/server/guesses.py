"""Who proposes drafts in a simulation: somebody who knows the answers and is wrong now and then, by a seed.

Pure: the same sequence with the same tokens gets the same guesses, so a run is replayed by its seed. What stands after
an answer's end is guessed as well, so that ends come in the middle of a result.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from quire.backends.oracle import answer_alone
from quire.core.request import ResolvedSampling
from quire.core.scheduling.chances import Guess
from quire.core.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Guesser:
    """Proposes up to `longest` tokens; each is right with a chance of `hit_rate`."""

    seed: int
    vocabulary_size: int
    hit_rate: float
    longest: int

    @staticmethod
    def drawn(seed: int, vocabulary_size: int) -> "Guesser":
        """One that is nearly always right, seldom, or in between."""
        random = Random(f"guesses {seed}")
        return Guesser(seed, vocabulary_size, random.choice((0.3, 0.7, 0.95)), random.choice((1, 3, 8)))

    def __call__(self, sequence: Sequence, limit: int) -> Guess:
        """What may follow the tokens this sequence knows."""
        request, said = sequence.request, sequence.num_output_tokens
        random = Random(f"{self.seed} {request.request_id} {sequence.index} {said}")
        count = min(limit, random.randint(0, self.longest))
        answer = _answer(request.prompt, request.params, request.seed, self.vocabulary_size, sequence.index)
        right = (*answer[said : said + count], *(random.randrange(self.vocabulary_size) for _ in range(count)))
        return Guess(
            tuple(
                token_id if random.random() < self.hit_rate else random.randrange(self.vocabulary_size)
                for token_id in right[:count]
            )
        )


@lru_cache(maxsize=1024)
def _answer(prompt: tuple[int, ...], params: ResolvedSampling, seed: int, size: int, index: int) -> Tokens[int]:
    return answer_alone(prompt, params, seed, size, index)
