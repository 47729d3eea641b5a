"""The server's side of checking grammars: one process for a model, started when the first grammar comes.

What was found right lately is not looked at again. The process bounds what a check may take; should it not answer
within `CHECK_S` all the same, it is ended, the grammar is refused, and the next check starts another.
"""

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from quire.errors import CapacityError, CheckpointError, EngineDeadError, InvalidParameterError
from quire.text import grammar_wire as wire
from quire.text.chat.render_helpers import Helper, StoppedError
from quire.text.grammar import Grammar
from quire.text.grammar_wire import CheckGrammar, FromChecker, GrammarFine, GrammarRefused, LoadVocabulary

COMMAND = (sys.executable, "-m", "quire.text.grammar_process")
LOAD_S = 60.0
CHECK_S = 10.0
KEPT = 1024


class GrammarChecker:
    """Safe from several threads, which wait for each other. Close it."""

    def __init__(self, read_vocabulary: Callable[[], LoadVocabulary]) -> None:
        self._read_vocabulary = read_vocabulary
        self._lock = threading.Lock()
        self._helpers: list[Helper] = []
        """The one there is."""
        self._fine: OrderedDict[str, None] = OrderedDict()
        self.close = weakref.finalize(self, _kill, self._helpers)

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidParameterError, in the library's words, if no engine could follow this grammar."""
        with self._lock:
            if grammar.text in self._fine:
                self._fine.move_to_end(grammar.text)
                return
            answer = self._answer(grammar)
            if not isinstance(answer, GrammarFine):
                why = answer.message if isinstance(answer, GrammarRefused) else f"{answer!r} came of it"
                raise InvalidParameterError(f"{grammar.parameter} cannot be used: {why}", grammar.parameter)
            self._fine[grammar.text] = None
            if len(self._fine) > KEPT:
                self._fine.popitem(last=False)

    def _answer(self, grammar: Grammar) -> FromChecker:
        helper = self._helper()
        try:
            return helper.ask(wire.encode_frame(CheckGrammar(grammar.text)), wire.read_from_checker, CHECK_S)
        except StoppedError as error:
            self._helpers.clear()
            raise InvalidParameterError(
                f"{grammar.parameter} may take {CHECK_S:g} s to be checked, this one {error}; say it with fewer rules",
                grammar.parameter,
            ) from None

    def _helper(self) -> Helper:
        if not self.close.alive:
            raise EngineDeadError("the model is closed; open it again")
        if self._helpers and self._helpers[0].is_alive:
            return self._helpers[0]
        _kill(self._helpers)
        try:
            vocabulary = wire.encode_frame(self._read_vocabulary())
        except CheckpointError as error:
            raise InvalidParameterError(f"this model follows no grammars: {error}", "grammar") from error
        try:
            helper = Helper(COMMAND)
            answer = helper.ask(vocabulary, wire.read_from_checker, LOAD_S)
        except (OSError, StoppedError) as error:
            raise CapacityError(f"a grammar needs a process that checks it, none could be started: {error}") from None
        if isinstance(answer, GrammarRefused):
            helper.kill()
            raise InvalidParameterError(answer.message, "grammar")
        self._helpers.append(helper)
        return helper


def _kill(helpers: list[Helper]) -> None:
    while helpers:
        helpers.pop().kill()
