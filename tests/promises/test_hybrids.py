"""Promises about models that keep a state: what is found of a conversation, and what is told when it is not."""

from collections.abc import Iterator
from random import Random

import pytest

from quire import LLM, ModelSettings, SamplingParams
from tests.support.machine.process_memory import budget_bytes
from tests.support.models.tiny_hybrids import make_hybrid

BLOCK = 32
ONE = SamplingParams(max_tokens=1)
DICE = Random("hybrids")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_hybrid(tmp_path_factory.mktemp("hybrid") / "model")
    settings = ModelSettings(memory_bytes=budget_bytes(1 << 30), max_sequence_tokens=256, max_running=2, num_threads=1)
    with LLM(str(folder), settings) as llm:
        yield llm


def tokens(count: int) -> list[int]:
    """Tokens nobody has sent before."""
    return [DICE.randrange(10, 250) for _ in range(count)]


def test_the_next_turn_of_a_conversation_goes_on_from_the_state_of_the_last(hybrid: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = tokens(70)
    answer = hybrid.generate([prompt], params)[0].token_ids
    following = [*prompt, *answer, *tokens(20)]
    # Of the answer all but the last token was computed: three blocks are full, and the third carries a state.
    num_cached = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
    assert (num_cached, hybrid.explain(following).num_cached_tokens) == (3 * BLOCK, 3 * BLOCK)
    assert hybrid.generate([following], params)[0].num_cached_tokens == num_cached


def test_blocks_that_are_there_without_their_state_are_told_apart(hybrid: LLM) -> None:
    prompt = tokens(3 * BLOCK + 1)
    hybrid.generate([prompt], ONE)
    assert hybrid.explain(prompt).reason == "too_short", "blocks and state are there"
    for _ in range(60):
        if hybrid.explain(prompt).reason != "too_short":
            break
        hybrid.generate([tokens(BLOCK + 1)], ONE)
    told = hybrid.explain(prompt)
    assert (told.num_cached_tokens, told.reason) == (0, "state_missing")
    hybrid.generate([prompt], ONE)
    assert hybrid.explain(prompt).num_cached_tokens == 3 * BLOCK, "computed again, and kept again"
