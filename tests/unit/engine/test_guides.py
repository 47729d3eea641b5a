"""Grammars on an oracle that says whatever it may: answers match, and are the same alone, in a batch, after a crash."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from quire.core.events import Refused, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, FinishReason, Request, ResolvedSampling
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import GRAMMAR_FAILED, RowResult, StepResult
from quire.engine import guides
from quire.engine.engine import Engine, ModelIdentity
from quire.engine.guides import GrammarMatchers
from quire.errors import CheckpointError, InvalidParameterError
from quire.text.grammars.grammar import Grammar
from tests.support.core.grammars import END_ID, small_vocabulary
from tests.support.models.small_tokenizers import byte_level

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "height": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "height"],
    "additionalProperties": False,
}


def grammar(schema: Any = PERSON) -> str:
    return Grammar.json_schema(schema).text


class World:
    """An engine on an oracle, and what was said of every request."""

    def __init__(self, num_blocks: int = 200) -> None:
        size = byte_level().vocabulary_size
        runner = OracleRunner(Capacity(num_blocks, 4, 1 << 20, 64, size, 32))
        self.guides = GrammarMatchers(small_vocabulary)
        config = SchedulerConfig(max_step_tokens=64, max_running=8)
        self.engine = Engine(runner, config, ModelIdentity("oracle", "slots"), bytes(32), guides=self.guides)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], tuple[FinishReason, str | None]] = {}

    @property
    def num_steps(self) -> int:
        return self.engine.scheduler.stats.num_steps

    def ask(
        self, name: str, grammar: str | None, produced: Sequence[Sequence[int]] = ((),), **params: Any
    ) -> RequestEvent:
        for index, one in enumerate(produced):
            self.tokens[name, index] = list(one)
        request = self.request(name, grammar, produced, **params)
        return self.engine.restore(request) if any(produced) else self.engine.submit(request)

    def request(
        self, name: str, grammar: str | None, produced: Sequence[Sequence[int]] = ((),), **params: Any
    ) -> Request:
        sampling = ResolvedSampling(**{"max_tokens": 80, "stop_token_ids": frozenset({END_ID}), **params})
        answers = tuple(Continuation(index, tuple(one)) for index, one in enumerate(produced))
        namespace = self.engine.info.namespace("group")
        return Request(name, (5, 6, 7), namespace, 0.0, sampling, 9, continuations=answers, grammar=grammar)

    def step(self) -> None:
        for event in self.engine.step(lambda: 0.0):
            if isinstance(event, Token):
                self.tokens[event.request_id, event.sequence_index].append(event.token_id)
            elif isinstance(event, SequenceFinished):
                self.ends[event.request_id, event.sequence_index] = event.reason, event.code

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        while self.engine.has_work:
            self.step()
            between()

    def text(self, name: str, index: int = 0) -> str:
        return byte_level().decode([token for token in self.tokens[name, index] if token != END_ID])


def alone(**params: Any) -> list[int]:
    world = World()
    world.ask("r", grammar(), **params)
    world.run()
    return world.tokens["r", 0]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"logprobs": 2}])
def test_an_answer_matches_its_schema_and_ends(params: dict[str, Any]) -> None:
    world = World()
    world.ask("r", grammar(), **params)
    world.run()
    person = json.loads(world.text("r"))
    assert set(person) == {"name", "height"}
    assert len(person["name"]) <= 5
    assert 0 <= person["height"] <= 999
    assert world.ends["r", 0] == (FinishReason.STOP, None)


def test_what_is_forced_and_the_end_of_an_answer_cost_no_step() -> None:
    world = World()
    world.ask("r", grammar())
    world.run()
    num_tokens = len(world.tokens["r", 0])
    assert world.guides.num_forced_tokens == world.engine.scheduler.stats.num_forced_tokens >= 15
    assert world.num_steps == num_tokens - world.guides.num_forced_tokens


def test_nothing_is_forced_where_log_probabilities_are_owed() -> None:
    world = World()
    world.ask("r", grammar(), logprobs=1)
    world.run()
    assert world.guides.num_forced_tokens == 0
    assert world.num_steps == len(world.tokens["r", 0])


def test_an_answer_is_the_same_in_company_and_after_a_preemption() -> None:
    world = World()
    for at in range(4):
        world.ask(f"other {at}", grammar() if at % 2 else None)
    world.ask("r", grammar())
    world.run(between=world.engine.scheduler.preempt_latest)
    assert world.tokens["r", 0] == alone()


def test_an_answer_goes_on_after_a_crash_wherever_it_was() -> None:
    whole = alone()
    for cut in range(1, len(whole)):
        world = World()
        world.ask("r", grammar(), [whole[:cut]])
        world.run()
        assert world.tokens["r", 0] == whole, cut


def test_every_one_of_several_answers_has_a_matcher_of_its_own() -> None:
    world = World()
    world.ask("r", grammar(), [(), (), (), ()])
    world.run()
    assert len({world.text("r", index) for index in range(4)}) > 1
    assert all(set(json.loads(world.text("r", index))) == {"name", "height"} for index in range(4))


def test_nothing_is_kept_of_answers_that_have_ended() -> None:
    world = World()
    world.ask("long", grammar())
    world.ask("short", grammar(), max_tokens=3)
    world.step()
    world.engine.cancel("long")
    world.run()
    assert world.guides.guides == {}
    assert {reason for reason, _ in world.ends.values()} == {FinishReason.LENGTH, FinishReason.CANCELLED}


@pytest.mark.parametrize("text", ["", "start: (", '{"grammars": [{"json_schema": {"type": "objekt"}}]}'])
def test_what_is_no_grammar_is_refused_in_words(text: str) -> None:
    told = World().ask("r", text)
    assert isinstance(told, Refused)
    assert isinstance(told.error, InvalidParameterError)
    assert told.error.parameter == "grammar"


def test_a_model_whose_tokens_no_grammar_can_use_refuses_grammars_and_answers_others() -> None:
    def unreadable() -> Any:
        raise CheckpointError("its tokenizer is strange")

    world = World()
    world.guides.read_vocabulary = unreadable
    told = world.ask("r", grammar())
    assert isinstance(told, Refused)
    assert "does not support grammars: its tokenizer is strange" in str(told.error)
    world.ask("plain", None, max_tokens=3)
    world.run()
    assert len(world.tokens["plain", 0]) == 3


def test_a_matcher_that_fails_ends_its_own_answer_alone() -> None:
    world = World()
    world.ask("bad", grammar())
    world.ask("good", grammar())
    world.step()
    world.guides.guides["bad", 0].matcher.consume_tokens([END_ID])
    world.run()
    assert world.ends["bad", 0] == (FinishReason.ERROR, GRAMMAR_FAILED)
    assert world.ends["good", 0] == (FinishReason.STOP, None)


def test_the_latest_grammars_are_kept_compiled_as_far_as_their_texts_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    texts = [grammar({"const": number}) for number in range(10, 20)]
    monkeypatch.setattr(guides, "MAX_CACHED_BYTES", 4 * len(texts[0]))
    for at, text in enumerate(texts):
        world.ask(f"r{at}", text)
    assert list(world.guides.grammars) == texts[6:]
    world.run()
    assert all(reason is FinishReason.STOP for reason, _ in world.ends.values())


# -- grammars and guesses ----------------------------------------------------------------------------------------------


def guessing(world: World, guess: Callable[[Any, int], tuple[int, ...]]) -> None:
    world.engine.scheduler.propose = lambda sequence, limit: Draft(guess(sequence, limit))


def right_for_a_while(answer: Sequence[int], length: int, wrong: int) -> Callable[[Any, int], tuple[int, ...]]:
    """What the answer will be, and behind so many tokens something else."""

    def guess(sequence: Any, limit: int) -> tuple[int, ...]:
        said = sequence.num_output_tokens
        return (*answer[said : said + length], *(wrong,) * 3)[:limit]

    return guess


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"logprobs": 1}])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 80])
@pytest.mark.parametrize("wrong", [5, END_ID])
def test_an_answer_with_guesses_is_the_answer_without(params: dict[str, Any], length: int, wrong: int) -> None:
    expected = alone(**params)
    world = World()
    guessing(world, right_for_a_while(expected, length, wrong))
    world.ask("r", grammar(), **params)
    world.run()
    assert world.tokens["r", 0] == expected
    assert world.ends["r", 0] == (FinishReason.STOP, None)
    assert length == 0 or world.engine.scheduler.stats.num_accepted_tokens > 0


THOUGHT = '%llguidance {}\nstart: thought "</think>" /[a-z]{1,6}/\nthought[max_tokens=7]: /[^<]*/\n'


@pytest.mark.parametrize("length", [0, 1, 3, 80])
@pytest.mark.parametrize("wrong", [5, END_ID])
def test_guesses_in_a_rule_that_counts_tokens_change_nothing(length: int, wrong: int) -> None:
    plain, world = World(), World()
    plain.ask("r", THOUGHT)
    plain.run()
    expected = plain.tokens["r", 0]
    assert "</think>" in plain.text("r")
    guessing(world, right_for_a_while(expected, length, wrong))
    world.ask("r", THOUGHT)
    world.run()
    assert world.tokens["r", 0] == expected
    assert world.ends["r", 0] == (FinishReason.STOP, None)
    assert length == 0 or world.engine.scheduler.stats.num_accepted_tokens > 0


def chosen_with_guesses(world: World, drafts: tuple[int, ...], chosen: tuple[int, ...]) -> RowResult:
    """What counts of a step in which these were guessed and those chosen."""
    guessing(world, lambda _sequence, limit: drafts[:limit])
    scheduler = world.engine.scheduler
    plan = scheduler.plan(0.0, world.guides.must_wait)
    world.guides.masks(plan, scheduler.planned)
    (item,) = plan.items
    result = StepResult(plan.step, {item.sequence_id: RowResult(chosen)})
    return world.guides.apply(plan, scheduler.planned, result).rows[item.sequence_id]


def spelled(text: str) -> tuple[int, ...]:
    """One token for each letter: a spelling that grammars allow and do not force."""
    return tuple(byte_level().encode(letter, add_special_tokens=False)[0] for letter in text)


def forced_by(letter: str) -> tuple[int, ...]:
    """What follows this letter when nothing was guessed."""
    world = World()
    world.ask("r", EITHER)
    row = chosen_with_guesses(world, (), spelled(letter))
    assert row.token_ids == spelled(letter)
    return row.forced


EITHER = Grammar.choice(["athe same text", "bthe same text"]).text


@pytest.mark.parametrize("length", [1, 2, 5])
def test_where_a_grammar_forces_a_spelling_another_that_was_chosen_does_not_count(length: int) -> None:
    forced = forced_by("a")
    assert forced[0] != spelled("t")[0]
    assert forced[-1] == END_ID
    chosen = spelled("athe same text")[: length + 1]
    world = World()
    world.ask("r", EITHER)
    row = chosen_with_guesses(world, chosen[:-1], chosen)
    assert (row.token_ids, row.forced) == (chosen[:1], forced)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_what_was_chosen_as_it_had_to_be_counts_as_chosen(length: int) -> None:
    forced = forced_by("b")
    right = (*spelled("b"), *forced)
    world = World()
    world.ask("r", EITHER)
    row = chosen_with_guesses(world, right[: length + 1], (*right[: length + 1], *spelled("x")))
    assert (row.token_ids, row.forced) == (right[: length + 1], forced[length:])
    assert row.forced_at == tuple(range(1, length + 1)), "so a draft does not change which tokens are forced"


def test_nothing_counts_behind_an_end_that_was_guessed() -> None:
    right = (*spelled("b"), *forced_by("b"))
    world = World()
    world.ask("r", EITHER)
    row = chosen_with_guesses(world, (*right, 5), (*right, 5, 6))
    assert (row.token_ids, row.forced) == (right, ())


def test_guesses_save_steps_of_guided_answers() -> None:
    expected = alone()
    plain, world = World(), World()
    guessing(world, right_for_a_while(expected, 80, 5))
    for one in (plain, world):
        one.ask("r", grammar())
        one.run()
    assert world.num_steps < plain.num_steps / 2
