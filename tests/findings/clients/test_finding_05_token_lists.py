"""Lists of tokens were walked in Python for every row at every step: 49,000 stop tokens slowed everybody's down."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from quire.backends.protocol import Runner
from quire.core.request import ResolvedSampling
from tests.support.models import architectures
from tests.support.models.models import Ask, Machine, load_runner

NUM_TOKENS = 6
NUM_ANSWERS = 4
VOCABULARY = 131


class WalkedSet(frozenset[int]):
    """Counts how often it is gone through from the first to the last; asking whether something is in it is free."""

    num_walks = 0

    def __iter__(self) -> Iterator[int]:
        type(self).num_walks += 1
        return super().__iter__()


class WalkedTuple(tuple[Any, ...]):
    """The same for a list with an order."""

    num_walks = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).num_walks += 1
        return super().__iter__()


@cache
def small_runner() -> Runner:
    return load_runner(architectures.directory("llama"), memory_bytes=16 << 30, block_size=8, max_sequence_tokens=256)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("watched", "given"),
    [
        (WalkedSet, {"stop_token_ids": WalkedSet(range(5, VOCABULARY)), "min_tokens": 50}),
        (WalkedTuple, {"banned_token_ids": WalkedTuple(range(5, VOCABULARY))}),
        (WalkedTuple, {"logit_bias": WalkedTuple((token_id, -90.0) for token_id in range(5, VOCABULARY))}),
    ],
)
def test_a_list_of_tokens_is_not_walked_for_every_row_of_every_step(
    watched: type[WalkedSet] | type[WalkedTuple], given: dict[str, Any], temperature: float
) -> None:
    ask = Ask([7, 8, 9], ResolvedSampling(temperature=temperature, max_tokens=NUM_TOKENS, **given), n=NUM_ANSWERS)
    watched.num_walks = 0
    Machine(small_runner(), max_running=NUM_ANSWERS).run([ask])
    assert [len(tokens) for tokens in ask.answers.values()] == [NUM_TOKENS] * NUM_ANSWERS
    assert all(token_id < 5 for tokens in ask.answers.values() for token_id in tokens)
    # Twice, once for its ids and once for what is beside them, is as good as once; 24 tokens were chosen.
    assert watched.num_walks <= 2
