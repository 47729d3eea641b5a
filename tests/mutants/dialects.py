"""Bugs on an answer's way out and of errors: pieces, batches, bytes, names; one small change each."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/client/test_pieces.py",
    "tests/unit/client/test_named_parameters.py",
    "tests/unit/worker/test_messages.py",
    "tests/unit/config/test_settings.py",
    "tests/api/dialects/test_dialects.py",
)

OUTPUTS = "client/reply/outputs.py"
ANSWERING = "api/dialects/answering.py"
FORMATS = "api/dialects/error_formats.py"
OPENAI = "api/dialects/openai"
ERRORS = "api/http/errors.py"

MUTANTS = [
    # -- pieces --
    Mutant("thoughts and text are joined", OUTPUTS, 'attrgetter("part")', 'attrgetter("index")'),
    Mutant("a joined piece is text again", OUTPUTS, "        part=last.part,\n", ""),
    Mutant("log-probabilities weigh nothing", OUTPUTS, "LOGPROB_BYTES * entries", "LOGPROB_BYTES * len(self.logprobs)"),
    Mutant(
        "a thought is the chat's content",
        f"{OPENAI}/chat.py",
        'return {"reasoning": piece.delta, "reasoning_content": piece.delta}',
        'return {"content": piece.delta}',
    ),
    # -- batches and streams --
    Mutant(
        "a stream that ended with its last piece is waited for",
        ANSWERING,
        "if not self._ready.is_set() and not self._is_over:",
        "if not self._ready.is_set():",
    ),
    Mutant(
        "a pause is never noticed", ANSWERING, "self._is_silent, left_s = True,", "self._is_silent, left_s = False,"
    ),
    Mutant("one pause is all there is", ANSWERING, "self._came_s, self._is_silent = self._loop.time(), False", "pass"),
    Mutant(
        "a keep-alive opens a stream",
        ANSWERING,
        "            elif self._has_begun:\n                await self._write(writer.keep_alive)\n",
        "            elif True:\n                await self._write_part(writer.keep_alive)\n",
    ),
    Mutant("a stream has no beginning", ANSWERING, "data = self._writer.begin(self._replies) + data", "pass"),
    Mutant(
        "tokens are counted for one batch only",
        ANSWERING,
        "self._count(self._num_counted + sum(counts.values()))",
        "self._count(sum(counts.values()))",
    ),
    Mutant(
        "usage is never the last chunk",
        f"{OPENAI}/writer.py",
        "+ DONE if self.with_usage else DONE",
        "+ DONE if False else DONE",
    ),
    # -- errors --
    Mutant("below its path an API is not heard", FORMATS, ' or path.startswith(f"{owned}/")', ""),
    Mutant("an API owns its neighbours", FORMATS, 'path.startswith(f"{owned}/")', "path.startswith(owned)"),
    Mutant(
        "errors tell of the machine", ERRORS, "self.message = _clean(self.message)", "self.message = str(self.message)"
    ),
    Mutant("when to come back is not told", ERRORS, "if error.retry_after_s is not None:", "if False:"),
    Mutant(
        "a parameter's name is lost between processes",
        "core/events.py",
        'InvalidParameterError: ("message", "parameter"),',
        'InvalidParameterError: ("message",),',
    ),
    Mutant(
        "settings are looked for by the wrong name",
        "config/sources.py",
        "if setting.field_name in error.settings",
        "if setting.name in error.settings",
    ),
]
