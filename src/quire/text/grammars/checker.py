"""The server's side of checking grammars: one process for a model, started when the first grammar comes.

    known? ─► turn ─► process ─► known from now on

What was found right, or wrong, lately is not looked at again, and is looked up without waiting for a check. Threads
with something to check take turns, first come first served: a request with more waits again behind the others. What a
check takes is charged to the request that it is for, and there is no more of it when that has had its share. The
process bounds what a check may take; should it not answer within `CHECK_S` all the same, it is killed, the grammar is
refused, and the next check starts another.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from quire.core.work_budget import WorkKind
from quire.errors import CapacityError, CheckpointError, InvalidParameterError
from quire.text.grammars.grammar import Grammar
from quire.text.sandboxed.grammar_messages import (
    CheckGrammar,
    FromChecker,
    GrammarFine,
    GrammarRefused,
    LoadVocabulary,
    VocabularyRefused,
    read_from_checker,
)
from quire.text.sandboxed.helper import StoppedError, encode_frame
from quire.text.sandboxed.pool import HelperPool, IdleHelpers, NotLoadedError
from quire.text.text_work import current_work

IDLE = IdleHelpers("quire.text.grammars.process", "to check the grammar")
"""None waits for another model: each holds a vocabulary."""
LOAD_S = 60.0
CHECK_S = 10.0
KEPT_BYTES = 4 << 20
"""Of texts of grammars of which it is known what came of them, the latest used."""
MESSAGE_BYTES = 400
"""What is kept of one beside its text, at the most."""
CHECK_CPU_S = 0.2
"""Processor time for one grammar: ordinary ones take a few milliseconds."""


class Verdicts:
    """What came of the latest grammars: None if nothing is wrong, else the library's words. Safe from several
    threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[str, str | None] = OrderedDict()
        self._num_bytes = 0

    def get(self, text: str) -> tuple[bool, str | None]:
        """Whether it is known, and what is wrong."""
        with self._lock:
            if text not in self._found:
                return False, None
            self._found.move_to_end(text)
            return True, self._found[text]

    def keep(self, text: str, why: str | None) -> None:
        """Remember it, in the place of what was not used for longest."""
        with self._lock:
            if text not in self._found:
                self._num_bytes += len(text) + MESSAGE_BYTES
            self._found[text] = why
            while self._num_bytes > KEPT_BYTES and len(self._found) > 1:
                self._num_bytes -= len(self._found.popitem(last=False)[0]) + MESSAGE_BYTES


class GrammarChecker:
    """Safe from several threads. Close it."""

    def __init__(self, read_vocabulary: Callable[[], LoadVocabulary]) -> None:
        self._helpers = HelperPool(IDLE, partial(_vocabulary_frame, read_vocabulary), read_from_checker, LOAD_S)
        self.verdicts = Verdicts()
        self.close = weakref.finalize(self, self._helpers.close)

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidParameterError, in the library's words, if no engine could follow this grammar;
        WorkBudgetError, if it cannot be known within what the request, or its tenant, has left."""
        is_known, why = self.verdicts.get(grammar.text)
        if not is_known:
            why = self._checked(grammar)
        if why is not None:
            sentence = f"{grammar.parameter} cannot be used: {why}"
            raise InvalidParameterError(sentence, grammar.parameter, code="unusable_grammar")

    def _checked(self, grammar: Grammar) -> str | None:
        """What is wrong with it, if anything is."""
        work = current_work()
        with self._helpers.turn():
            is_known, why = self.verdicts.get(grammar.text)  # perhaps since this one waits
            if is_known:
                return why
            if (refusal := work.refusal(WorkKind.GRAMMAR_CHECK)) is not None:
                raise refusal
            cpu_s = min(CHECK_CPU_S, work.left_s(WorkKind.GRAMMAR_CHECK))
            answer = self._answer(grammar, cpu_s)
        if isinstance(answer, VocabularyRefused):
            raise InvalidParameterError(answer.message, "grammar", code="unusable_tokenizer")
        if not isinstance(answer, GrammarFine | GrammarRefused):
            return f"unexpected response {answer!r}"
        why = answer.message if isinstance(answer, GrammarRefused) else None
        if isinstance(answer, GrammarFine) or not answer.took_all or cpu_s >= CHECK_CPU_S:
            self.verdicts.keep(grammar.text, why)  # what was stopped because others took its time may be right
            work.charge(WorkKind.GRAMMAR_CHECK, answer.spent_s)
        else:
            work.spend(WorkKind.GRAMMAR_CHECK, answer.spent_s)
        return why

    def _answer(self, grammar: Grammar, cpu_s: float) -> FromChecker:
        try:
            return self._helpers.request(encode_frame(CheckGrammar(grammar.text, cpu_s)), CHECK_S)
        except NotLoadedError as error:
            why = f"cannot start a process to check the grammar: it {error}; try again"
            raise CapacityError(why, code="process_not_started") from None
        except StoppedError as error:
            rule = f"expected {grammar.parameter} to be checked within {CHECK_S:g} s, it {error}; use fewer rules"
            raise InvalidParameterError(rule, grammar.parameter, code="grammar_check_stopped") from None


def _vocabulary_frame(read_vocabulary: Callable[[], LoadVocabulary]) -> bytes:
    try:
        return encode_frame(read_vocabulary())
    except CheckpointError as error:
        sentence = f"this model does not support grammars: {error}"
        raise InvalidParameterError(sentence, "grammar", code="grammars_not_supported") from error
