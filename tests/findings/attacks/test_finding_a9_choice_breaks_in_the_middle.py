"""Finding A9: `choice` took 10,000 texts by its bound and broke at 2,001 in the middle of an answer; other grammars of
that kind passed the check, were queued and computed, and failed at their second token."""

import json

import pytest

from quire.checkpoints.grammar_vocabulary import first_mask, follow, matcher_of
from quire.core.request import FinishReason
from quire.text.grammars.grammar import Grammar
from tests.support.core.grammars import small_vocabulary
from tests.unit.engine.test_guides import World

CHOICES = [f"c{number}" for number in range(10_000)]


def test_ten_thousand_texts_are_a_choice() -> None:
    world = World()
    world.ask("r", Grammar.choice(CHOICES).text)
    world.run()
    assert world.ends["r", 0] == (FinishReason.STOP, None)
    assert world.text("r") in set(CHOICES)


def test_a_grammar_that_fails_behind_its_first_token_fails_at_the_door() -> None:
    matcher = matcher_of(
        small_vocabulary(), Grammar.lark("start: " + " | ".join(map(json.dumps, CHOICES[:2_100]))).text
    )
    first_mask(matcher)
    with pytest.raises(ValueError, match="2101 items"):
        follow(matcher, small_vocabulary(), within_s=60.0)
