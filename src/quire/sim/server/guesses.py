"""Draft tokens for simulations (guesses): the correct continuation, with random errors.

Pure: equal sequences with equal tokens get equal drafts, so that a seed reproduces a run. Tokens after the end of an
output are drafted too, so that some outputs end in the middle of their drafts.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from quire.backends.oracle import answer_alone
from quire.core.request import ResolvedSampling
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Guesser:
    """Proposes at most `longest` draft tokens, each of which is correct with probability `hit_rate`."""

    seed: int
    vocabulary_size: int
    hit_rate: float
    longest: int

    @staticmethod
    def choose(seed: int, vocabulary_size: int) -> "Guesser":
        """Return a guesser with a random hit rate and length."""
        random = Random(f"guesses {seed}")
        return Guesser(seed, vocabulary_size, random.choice((0.3, 0.7, 0.95)), random.choice((1, 3, 8)))

    def __call__(self, sequence: Sequence, limit: int) -> Draft:
        request, num_output = sequence.request, sequence.num_output_tokens
        random = Random(f"{self.seed} {request.request_id} {sequence.index} {num_output}")
        num_drafts = min(limit, random.randint(0, self.longest))
        output = _answer(request.prompt, request.params, request.seed, self.vocabulary_size, sequence.index)
        noise = (random.randrange(self.vocabulary_size) for _ in range(num_drafts))
        correct = (*output[num_output : num_output + num_drafts], *noise)
        return Draft(
            tuple(
                token_id if random.random() < self.hit_rate else random.randrange(self.vocabulary_size)
                for token_id in correct[:num_drafts]
            )
        )


@lru_cache(maxsize=1024)
def _answer(prompt: tuple[int, ...], params: ResolvedSampling, seed: int, size: int, index: int) -> Tokens[int]:
    return answer_alone(prompt, params, seed, size, index)
