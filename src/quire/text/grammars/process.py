"""The process that checks grammars: `python -m quire.text.grammars.process`, a helper process of package `sandboxed`.

Grammars come from clients, and the cost of compiling one cannot be predicted. So each grammar is compiled here, in a
forked child, before a worker receives it. Excessive time, excessive memory or a crash ends only that child, and the
vocabulary in the parent stays intact. Loading the vocabulary holds the GIL for most of a second, which would also block
a server's event loop.
"""

import os
import signal
from typing import TYPE_CHECKING, NoReturn

from quire.checkpoints.grammar_vocabulary import first_mask, follow, grammar_vocabulary, matcher_of
from quire.errors import CheckpointError
from quire.text.sandboxed.helper import encode_frame, lower_priority, serve
from quire.text.sandboxed.messages import (
    CheckGrammar,
    FromChecker,
    GrammarFine,
    GrammarRefused,
    LoadVocabulary,
    ToChecker,
    VocabularyLoaded,
    VocabularyRefused,
    read_to_checker,
)

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MEMORY_BYTES = 2 << 30
"""Limit of the address space. A vocabulary of 130,000 tokens takes 150 MB, the largest accepted grammar a few MB."""
TRIAL_SHARE = 0.4
"""Share of a check's time limit for trying tokens on the compiled grammar. Typical grammars take a few milliseconds."""


class Checker:
    """Responds to the server's messages, one at a time."""

    def __init__(self) -> None:
        self._vocabulary: LLTokenizer | VocabularyRefused = VocabularyRefused("no vocabulary is loaded")

    def answer(self, message: ToChecker) -> FromChecker:
        """Return the response to one message. If the vocabulary was rejected, every check returns that."""
        if isinstance(message, LoadVocabulary):
            return self._load(message)
        if isinstance(self._vocabulary, VocabularyRefused):
            return self._vocabulary
        return self._check(message, self._vocabulary)

    def _load(self, message: LoadVocabulary) -> FromChecker:
        try:
            self._vocabulary = grammar_vocabulary(message.tokenizer_json, message.vocabulary_size, message.end_tokens)
        except CheckpointError as error:
            self._vocabulary = VocabularyRefused(str(error))
            return self._vocabulary
        return VocabularyLoaded()

    @staticmethod
    def _check(message: CheckGrammar, vocabulary: "LLTokenizer") -> FromChecker:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            _check_and_end(message, vocabulary, write_end)
        os.close(write_end)
        with open(read_end, "rb") as answer:
            error = answer.read().decode()
        _, status, usage = os.wait4(child, 0)
        spent_s = usage.ru_utime + usage.ru_stime
        if os.WIFSIGNALED(status):
            is_at_limit = os.WTERMSIG(status) == signal.SIGPROF
            timeout = f"expected a check within {message.cpu_s:.2g} s of processor time, it took more"
            fault = f"{timeout}; use fewer rules" if is_at_limit else "the grammar checker crashed on it"
            return GrammarRefused(fault, spent_s, is_at_limit)
        return GrammarRefused(error, spent_s) if error else GrammarFine(spent_s)


def _check_and_end(message: CheckGrammar, vocabulary: "LLTokenizer", write_end: int) -> NoReturn:
    """In the forked child: write the error message, if any, to the pipe. SIGPROF kills it at the CPU limit."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, message.cpu_s)
        matcher = matcher_of(vocabulary, message.grammar)
        first_mask(matcher)
        follow(matcher, vocabulary, message.cpu_s * TRIAL_SHARE)
    except ValueError as error:
        os.write(write_end, (str(error) or "it cannot be used").encode())
    except BaseException as error:
        os.write(write_end, f"it cannot be checked: {error!r}"[:300].encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    lower_priority()
    checker = Checker()
    serve(lambda frame: encode_frame(checker.answer(read_to_checker(frame))), MEMORY_BYTES)
