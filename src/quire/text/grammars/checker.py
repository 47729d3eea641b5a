"""The server's side of checking grammars: one process per model, started for the first grammar.

    in cache? ─► turn ─► process ─► cache

Recent verdicts are cached and looked up without waiting. Otherwise threads wait for a turn, in order of arrival; a
request with several grammars waits for each. A check's CPU time is charged to its request, which can check no more
grammars once its budget is exhausted. The process limits the time of each check itself. If it still does not respond
within `CHECK_S`, it is killed, the grammar is rejected, and the next check starts a new process.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from quire.errors import CapacityError, CheckpointError, InvalidParameterError
from quire.text.grammars.grammar import Grammar
from quire.text.sandboxed.helper import encode_frame
from quire.text.sandboxed.messages import (
    CheckGrammar,
    FromChecker,
    GrammarFine,
    GrammarRefused,
    LoadVocabulary,
    VocabularyRefused,
    read_from_checker,
)
from quire.text.sandboxed.pool import HelperPool, IdleHelpers, NotLoadedError, StoppedError
from quire.text.text_work import charge_work, spend_work, work_left_s, work_refusal

IDLE_HELPERS = IdleHelpers("quire.text.grammars.process", "to check the grammar")
"""Keeps no idle processes, because each has loaded one model's vocabulary and is useless for other models."""
LOAD_S = 60.0
CHECK_S = 10.0
CACHE_BYTES = 4 << 20
"""Size of the cache of verdicts by grammar text; the least recently used are evicted."""
MAX_VERDICT_BYTES = 400
"""Maximum size of a cached verdict in addition to the grammar's text."""
CHECK_CPU_S = 0.2
"""CPU time limit for one grammar; typical ones take a few milliseconds."""


class Verdicts:
    """LRU cache of verdicts by grammar text: None if valid, else the library's error message. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, str | None] = OrderedDict()
        self._num_bytes = 0

    def get(self, text: str) -> tuple[bool, str | None]:
        """Return whether the verdict is cached, and the verdict."""
        with self._lock:
            if text not in self._verdicts:
                return False, None
            self._verdicts.move_to_end(text)
            return True, self._verdicts[text]

    def add(self, text: str, message: str | None) -> None:
        """Cache a verdict and evict the least recently used ones beyond `CACHE_BYTES`."""
        with self._lock:
            if text not in self._verdicts:
                self._num_bytes += len(text) + MAX_VERDICT_BYTES
            self._verdicts[text] = message
            while self._num_bytes > CACHE_BYTES and len(self._verdicts) > 1:
                self._num_bytes -= len(self._verdicts.popitem(last=False)[0]) + MAX_VERDICT_BYTES


class GrammarChecker:
    """Checks grammars for one model. Thread-safe. The owner must call `close`."""

    def __init__(self, read_vocabulary: Callable[[], LoadVocabulary]) -> None:
        self._helpers = HelperPool(IDLE_HELPERS, partial(_vocabulary_frame, read_vocabulary), read_from_checker, LOAD_S)
        self.verdicts = Verdicts()
        self.close = weakref.finalize(self, self._helpers.close)

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidParameterError with the library's message if the grammar cannot be used, or WorkBudgetError if
        the budget of the request or of its tenant is exhausted."""
        is_cached, fault = self.verdicts.get(grammar.text)
        if not is_cached:
            fault = self._check_uncached(grammar)
        if fault is not None:
            message = f"{grammar.parameter} cannot be used: {fault}"
            raise InvalidParameterError(message, grammar.parameter, code="unusable_grammar")

    def _check_uncached(self, grammar: Grammar) -> str | None:
        """Check an uncached grammar and return the error message, or None if it is valid."""
        with self._helpers.reserve():
            is_cached, fault = self.verdicts.get(grammar.text)  # another thread may have checked it meanwhile
            if is_cached:
                return fault
            if (refusal := work_refusal("grammar_check")) is not None:
                raise refusal
            cpu_s = min(CHECK_CPU_S, work_left_s("grammar_check"))
            answer = self._answer(grammar, cpu_s)
        if isinstance(answer, VocabularyRefused):
            raise InvalidParameterError(answer.message, "grammar", code="unusable_tokenizer")
        if not isinstance(answer, GrammarFine | GrammarRefused):
            return f"unexpected response {answer!r}"
        fault = answer.message if isinstance(answer, GrammarRefused) else None
        if isinstance(answer, GrammarFine) or not answer.is_at_limit or cpu_s >= CHECK_CPU_S:
            self.verdicts.add(grammar.text, fault)  # not if a reduced time limit stopped it: the grammar may be valid
            charge_work("grammar_check", answer.spent_s)
        else:
            spend_work("grammar_check", answer.spent_s)
        return fault

    def _answer(self, grammar: Grammar, cpu_s: float) -> FromChecker:
        try:
            return self._helpers.request(encode_frame(CheckGrammar(grammar.text, cpu_s)), CHECK_S)
        except NotLoadedError as error:
            message = f"cannot start a process to check the grammar: it {error}; try again"
            raise CapacityError(message, code="process_not_started") from None
        except StoppedError as error:
            message = f"expected {grammar.parameter} to be checked within {CHECK_S:g} s, it {error}; use fewer rules"
            raise InvalidParameterError(message, grammar.parameter, code="grammar_check_stopped") from None


def _vocabulary_frame(read_vocabulary: Callable[[], LoadVocabulary]) -> bytes:
    try:
        return encode_frame(read_vocabulary())
    except CheckpointError as error:
        message = f"this model does not support grammars: {error}"
        raise InvalidParameterError(message, "grammar", code="grammars_not_supported") from error
