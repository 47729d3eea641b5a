"""What prompts have in common. Token ids are drawn from a small vocabulary where prefixes should meet by chance."""

from dataclasses import dataclass, field
from random import Random


def tokens(random: Random, length: int, vocabulary_size: int) -> tuple[int, ...]:
    """That many tokens, from 1 up: 0 is left to mean the end of a text."""
    return tuple(random.randrange(1, vocabulary_size) for _ in range(length))


def length_up_to(random: Random, longest: int) -> int:
    """A length from 1 to `longest`, short ones more often: the logarithm is even."""
    return max(1, int(longest ** random.random()))


@dataclass(slots=True)
class Prompts:
    """A source of prompts that share beginnings: system prompts, and conversations that grow."""

    random: Random
    vocabulary_size: int
    longest: int
    num_system_prompts: int = 4
    share_new: float = 0.3
    """How many prompts have nothing in common with others."""
    _systems: list[tuple[int, ...]] = field(init=False)
    _conversations: list[tuple[int, ...]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._systems = [
            tokens(self.random, max(1, self.random.randint(self.longest // 4, self.longest // 2)), self.vocabulary_size)
            for _ in range(self.num_system_prompts)
        ]

    def next(self) -> tuple[int, ...]:
        """A new prompt, a system prompt with a question, or a conversation one turn longer."""
        dice = self.random.random()
        if dice < self.share_new:
            return tokens(self.random, length_up_to(self.random, self.longest), self.vocabulary_size)
        if dice < 0.7 or not self._conversations:
            before = self.random.choice(self._systems)
        else:
            before = self.random.choice(self._conversations)
        turn = tokens(self.random, length_up_to(self.random, max(1, self.longest // 4)), self.vocabulary_size)
        prompt = (*before, *turn)[: self.longest]
        self._conversations = [*self._conversations[-15:], prompt]
        return prompt
