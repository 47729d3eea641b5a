"""Grammars are checked where they can be stopped: what takes long or breaks ends alone, and the next is checked."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import CapacityError, CheckpointError, EngineDeadError, InvalidParameterError
from quire.text.grammars import checker as grammar_checker
from quire.text.grammars import process as grammar_process
from quire.text.grammars.checker import GrammarChecker, Verdicts
from quire.text.grammars.grammar import Grammar
from quire.text.grammars.process import Checker
from quire.text.sandboxed.helper import NICENESS
from quire.text.sandboxed.messages import (
    CheckGrammar,
    GrammarFine,
    GrammarRefused,
    LoadVocabulary,
    VocabularyLoaded,
)
from tests.support.core.grammars import END_ID
from tests.support.errors import raises_code
from tests.support.machine.sandboxed import free_helpers
from tests.support.models.small_tokenizers import byte_level


def vocabulary() -> LoadVocabulary:
    library = byte_level().library
    return LoadVocabulary(library.to_str(), byte_level().vocabulary_size, (END_ID,))


@pytest.fixture
def checker() -> GrammarChecker:
    return GrammarChecker(vocabulary)


def test_what_can_be_followed_passes_and_is_not_looked_at_again(checker: GrammarChecker) -> None:
    checker.check(Grammar.json_object())
    free_helpers(checker)[0].kill()
    checker.check(Grammar.json_object())
    assert not free_helpers(checker)[0].is_alive


@pytest.mark.parametrize(("grammar", "words"), [
    (Grammar.json_schema({"type": "objekt"}, "response_format"), "objekt"),
    (Grammar.json_schema({"$ref": "#"}), ""),
    (Grammar.json_schema({"$ref": "http://example.com/x"}), ""),
    (Grammar.json_schema({"not": {"type": "string"}}), ""),
    (Grammar.regex("(?=a)b"), ""),
    (Grammar.lark("start: nobody"), ""),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_the_librarys_words(
    checker: GrammarChecker, grammar: Grammar, words: str
) -> None:
    with raises_code(InvalidParameterError, "unusable_grammar") as refused:
        checker.check(grammar)
    assert words in str(refused.value)
    assert refused.value.parameter == grammar.parameter
    checker.close()


def spin(_matcher: object) -> bytes:
    while True:
        pass


def crash(_matcher: object) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def odd(_matcher: object) -> bytes:
    raise ValueError("it is odd")


@pytest.mark.parametrize(("check", "sentence"), [
    (spin, "expected a check within 0.05 s of processor time, it took more; use fewer rules"),
    (crash, "the grammar checker crashed on it"),
    (lambda _matcher: 1 / 0, "it cannot be checked: ZeroDivisionError"),
    (odd, "it is odd"),
])  # fmt: skip
def test_a_check_that_takes_long_or_breaks_ends_alone(
    check: Callable[[object], bytes], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = Checker()
    assert isinstance(checker.answer(vocabulary()), VocabularyLoaded)
    with monkeypatch.context() as broken:
        broken.setattr(grammar_process, "first_mask", check)
        refused = checker.answer(CheckGrammar(Grammar.regex("a").text, 0.05))
    assert isinstance(refused, GrammarRefused)
    assert refused.message.startswith(sentence)
    assert refused.is_at_limit == (check is spin)
    assert isinstance(checker.answer(CheckGrammar(Grammar.regex("a").text, 60.0)), GrammarFine)


def test_a_check_that_never_answers_is_refused_and_the_next_is_made(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(Grammar.regex("a"))
    monkeypatch.setattr(grammar_checker, "CHECK_S", 0.5)
    os.kill(free_helpers(checker)[0].pid, signal.SIGSTOP)
    with raises_code(InvalidParameterError, "grammar_check_stopped"):
        checker.check(Grammar.regex("b"))
    monkeypatch.undo()
    checker.check(Grammar.regex("b"))
    checker.close()


def test_checks_yield_the_cores_to_the_worker(checker: GrammarChecker) -> None:
    checker.check(Grammar.regex("a"))
    (helper,) = free_helpers(checker)
    assert os.getpriority(os.PRIO_PROCESS, helper.pid) >= NICENESS
    session = Path(f"/proc/{helper.pid}/autogroup")
    assert not session.exists() or session.read_text().endswith(f"nice {NICENESS}\n")


def test_who_is_closed_checks_no_more(checker: GrammarChecker) -> None:
    checker.check(Grammar.regex("a"))
    (helper,) = free_helpers(checker)
    checker.close()
    assert not helper.is_alive
    with raises_code(EngineDeadError, "engine_dead"):
        checker.check(Grammar.regex("b"))


def test_a_process_that_cannot_be_started_is_the_servers_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker.IDLE_HELPERS, "command", (sys.executable, "-c", ""))
    with raises_code(CapacityError, "process_not_started"):
        checker.check(Grammar.regex("a"))


def test_a_tokenizer_that_grammars_cannot_use_is_said() -> None:
    checker = GrammarChecker(lambda: LoadVocabulary("{}", 10, (1,)))
    with raises_code(InvalidParameterError, "unusable_tokenizer"):
        checker.check(Grammar.regex("a"))


def test_a_tokenizer_that_cannot_be_read_refuses_the_grammar_alone() -> None:
    def unreadable() -> LoadVocabulary:
        raise CheckpointError("tokenizer.json is gone")

    with raises_code(InvalidParameterError, "grammars_not_supported"):
        GrammarChecker(unreadable).check(Grammar.regex("a"))


def test_the_latest_verdicts_are_remembered_as_far_as_their_texts_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "CACHE_BYTES", 2 * (grammar_checker.MAX_VERDICT_BYTES + 1))
    verdicts = Verdicts()
    for text, why in (("a", None), ("b", "wrong"), ("c", None)):
        verdicts.add(text, why)
    assert [verdicts.get(text) for text in "abc"] == [(False, None), (True, "wrong"), (True, None)]
