"""What proof-steps judges with: schemas that compile, documents that match, and judges that can say no."""

import json
from random import Random
from typing import Any

import pytest

from proofs.steps.asked import guided_asks, schema_grammar
from proofs.steps.grammar import num_different, refusal_of
from proofs.steps.hostile import TrialResult
from proofs.steps.hostile_schemas import TABLE, hostile_grammar
from proofs.steps.schemas import FIFTY, TEN, bounded_schema
from quire.checkpoints.grammar_vocabulary import first_mask, matcher_of
from tests.support.core.grammars import small_vocabulary

PERSON = TEN[0]


def test_fifty_schemas_have_names_of_their_own_and_compile() -> None:
    assert len({task.name for task in FIFTY}) == 50
    for task in FIFTY:
        assert first_mask(matcher_of(small_vocabulary(), schema_grammar(task.name).text)), task.name


def test_every_document_matches_its_schema() -> None:
    for task in TEN:
        assert refusal_of(task, json.dumps(task.document), with_formats=True) is None, task.name


@pytest.mark.parametrize(
    ("change", "why"), [({"age": 151}, "151"), ({"age": "36"}, "36"), ({"more": 1}, "more"), ({"name": "x" * 25}, "x")]
)
def test_the_judge_says_no(change: dict[str, Any], why: str) -> None:
    told = refusal_of(PERSON, json.dumps({**PERSON.document, **change}))
    assert told is not None
    assert why in told


def test_what_was_cut_is_no_document() -> None:
    assert str(refusal_of(PERSON, '{"name": "Ada')).startswith("no JSON")


def test_formats_are_looked_at_when_they_are_asked_for() -> None:
    text = json.dumps({**PERSON.document, "email": "nobody"})
    assert refusal_of(PERSON, text) is None
    assert refusal_of(PERSON, text, with_formats=True) is not None


def test_texts_and_lists_get_ends_and_keep_those_they_have() -> None:
    given = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": ["string", "null"], "maxLength": 99}]}}
    made = bounded_schema(given)
    assert (made["maxItems"], [one["maxLength"] for one in made["items"]["anyOf"]]) == (2, [24, 99])
    assert bounded_schema({"type": "array", "minItems": 3})["maxItems"] == 3
    assert bounded_schema({"type": "string", "format": "uuid"}) == {"type": "string", "format": "uuid"}


def test_questions_go_through_all_schemas_at_both_temperatures() -> None:
    asks = guided_asks(100, Random(1))
    assert {(ask.task.name, ask.params.temperature) for ask in asks} == {
        (task.name, temperature) for task in FIFTY for temperature in (0.0, 0.8)
    }


@pytest.mark.parametrize(
    ("tokens", "others", "count"), [((1, 2), (1, 2), 0), ((1, 2), (3, 2), 1), ((), (1, 2), 2), ((1, 2, 3), (1,), 2)]
)
def test_tokens_that_differ_are_counted_one_by_one(tokens: list[int], others: list[int], count: int) -> None:
    assert num_different(tokens, others) == count


def test_a_seed_makes_the_same_hostile_grammar_again() -> None:
    made = [hostile_grammar(seed) for seed in range(50)]
    assert made == [hostile_grammar(seed) for seed in range(50)]
    assert len({one.name.partition(",")[0] for one in made}) > 10
    assert all(json.loads(one.body(prompt="x"))["prompt"] == "x" for one in made)
    assert len({one.name for one in TABLE}) == len(TABLE)


@pytest.mark.parametrize("changed", [{"status": 500}, {"check_ms": 251.0}, {"was_ended": True}])
def test_what_fails_is_not_fine(changed: dict[str, Any]) -> None:
    fine = {"name": "x", "status": 400, "text": "", "check_ms": 249.0, "worker_ms": 1.0, "was_ended": False}
    assert TrialResult(**fine).is_fine  # type: ignore[arg-type]
    assert not TrialResult(**{**fine, **changed}).is_fine
