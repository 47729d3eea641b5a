"""Finding A3: a grammar of 30 characters made every step of a model take seconds, for everybody, and a crash on top of
it held the next step for most of a minute: all tokens of all its answers were followed again at once."""

import threading
from pathlib import Path
from typing import Any

import pytest

from quire.core.request import FinishReason
from quire.core.step import GRAMMAR_FAILED
from quire.engine import grammar_thread, guides
from quire.engine.guides import CATCH_UP_TOKENS, GrammarMatchers
from quire.engine.trace_recorder import TraceSettings
from quire.errors import WorkBudgetError
from quire.observe.trace_file import make_trace_file
from quire.sim.replay.replay import replay
from quire.text.grammars.grammar import Grammar
from quire.text.grammars.process import Checker
from quire.text.sandboxed.messages import CheckGrammar, GrammarRefused
from tests.unit.engine.test_guides import World, alone, grammar
from tests.unit.text.grammars.test_checker import vocabulary

A3 = 'start: e\ne: e e | e e e | "a"'
LETTERS = Grammar.lark("start: /[a-y]{60,70}/").text


def test_a_grammar_whose_tokens_take_ever_longer_is_refused_at_the_door() -> None:
    checker = Checker()
    checker.answer(vocabulary())
    answer = checker.answer(CheckGrammar(Grammar.lark(A3).text, 10.0))
    assert isinstance(answer, GrammarRefused)
    assert "slower and slower" in answer.message or "Too many items" in answer.message


class Clock:
    """Processor time that passes in pieces of this length, whatever they are."""

    def __init__(self, piece_s: float) -> None:
        self.now_s, self.piece_s = 0.0, piece_s

    def __call__(self) -> float:
        self.now_s += self.piece_s
        return self.now_s


CUT = (FinishReason.ERROR, WorkBudgetError.code)


@pytest.mark.parametrize("piece_s", [0.3, 0.05])
def test_a_sequence_that_takes_more_than_its_budget_ends_and_its_neighbour_loses_nothing(
    piece_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone()
    world = World()
    world.ask("r", LETTERS)
    for _ in range(3):
        world.step()
    monkeypatch.setattr(grammar_thread, "thread_time", Clock(piece_s))
    world.run()
    monkeypatch.undo()
    assert world.ends["r", 0] == CUT
    assert world.guides.budget.num_cut.keys() == {"grammar_mask"}
    world.ask("neighbour", grammar())
    world.run()
    assert world.tokens["neighbour", 0] == expected


def test_what_masks_take_is_charged_to_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(grammar_thread, "thread_time", Clock(0.015))
    world.ask("r", LETTERS, max_tokens=40)
    world.run()
    service = world.engine.scheduler.queue.tenants["default"].service
    assert service >= 3 + 4 * 40 + 15 * 35
    assert world.guides.mask_s >= 0.015 * 35


def slow_guides(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A mask that takes until it may go on; the first event is its beginning."""
    begun, goes_on, make_mask = threading.Event(), threading.Event(), guides.GrammarMatcher.make_mask

    def wait_and_make(guide: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        make_mask(guide)

    monkeypatch.setattr(guides.GrammarMatcher, "make_mask", wait_and_make)
    return begun, goes_on


def test_a_mask_that_takes_long_holds_its_own_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone()
    begun, goes_on = slow_guides(monkeypatch)
    world = World()
    world.ask("r", grammar())
    while not begun.is_set():
        world.step()
    world.ask("plain", None, max_tokens=30)
    while len(world.tokens["plain", 0]) < 30:
        world.step()
    num_tokens = len(world.tokens["r", 0])
    goes_on.set()
    world.run()
    assert num_tokens < len(expected)
    assert world.tokens["r", 0] == expected


def test_a_cut_a_hold_and_a_charge_are_the_same_in_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, path = World(), tmp_path / "trace.jsonl"
    make_trace_file(path)
    world.engine.record(TraceSettings(str(path), 1 << 30, bytes(range(32))), 0.0)
    world.ask("r", LETTERS)
    world.ask("neighbour", grammar())
    world.ask("plain", None, max_tokens=30)
    monkeypatch.setattr(grammar_thread, "thread_time", Clock(0.05))
    world.run()
    world.engine.close()
    monkeypatch.undo()
    assert world.ends["r", 0] == CUT
    text = path.read_text()
    assert '"work_tokens":' in text
    assert '"held":[' in text
    assert f'"code":"{WorkBudgetError.code}"' in text
    (session,) = replay(path).sessions
    assert session.difference is None, session.difference


def test_after_a_crash_known_tokens_are_followed_in_pieces_between_the_steps_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = World()
    whole.ask("r", LETTERS)
    whole.run()
    produced, pieces = whole.tokens["r", 0][:-5], list[int]()
    consume = guides.GrammarMatcher.consume

    def counted(guide: Any, tokens: Any) -> None:
        pieces.append(len(tokens))
        consume(guide, tokens)

    monkeypatch.setattr(guides.GrammarMatcher, "consume", counted)
    begun, goes_on = slow_guides(monkeypatch)
    world = World()
    world.ask("r", LETTERS, [produced])
    world.ask("plain", None, max_tokens=30)
    while len(world.tokens["plain", 0]) < 30:
        world.step()
    assert sum(pieces) <= len(produced)
    goes_on.set()
    world.run()
    assert max(pieces) <= CATCH_UP_TOKENS
    assert world.tokens["r", 0] == whole.tokens["r", 0]
    assert begun.is_set()


def test_following_again_what_was_within_the_budget_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = World()
    whole.ask("r", LETTERS)
    whole.run()
    world = World()
    monkeypatch.setattr(grammar_thread, "thread_time", Clock(0.019))
    world.ask("r", LETTERS, [whole.tokens["r", 0][:-5]])
    world.run()
    assert world.tokens["r", 0] == whole.tokens["r", 0]


def test_a_matcher_that_fails_in_the_thread_ends_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_guide: Any) -> None:
        raise RuntimeError("the library broke")

    world = World()
    world.ask("r", LETTERS)
    monkeypatch.setattr(guides.GrammarMatcher, "make_mask", fail)
    world.run()
    assert world.ends["r", 0] == (FinishReason.ERROR, GRAMMAR_FAILED)


def test_a_client_that_leaves_while_its_grammar_is_compiled_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line of section B: grammars were compiled in the loop, between two steps of everybody."""
    compiled, goes_on = GrammarMatchers.compile_text, threading.Event()

    def wait(one: Any, text: str) -> Any:
        assert goes_on.wait(60)
        return compiled(one, text)

    monkeypatch.setattr(GrammarMatchers, "compile_text", wait)
    world = World()
    request = world.request("r", grammar())
    assert world.engine.enter(request, is_restored=False) == []
    world.ask("plain", None, max_tokens=5)
    while len(world.tokens["plain", 0]) < 5:
        world.step()
    world.engine.cancel("r")
    goes_on.set()
    world.run()
    assert world.ends["r", 0] == (FinishReason.CANCELLED, None)
