"""Bugs on an answer's way out and of errors: pieces, batches, bytes, names; one small change each."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/client/test_pieces.py",
    "tests/unit/client/test_named_parameters.py",
    "tests/unit/worker/test_messages.py",
    "tests/unit/config/test_settings.py",
    "tests/api/dialects/test_dialects.py",
    "tests/property/test_loops.py",
)

OUTPUTS = "client/reply/outputs.py"
ANSWERING = "api/dialects/answering.py"
FORMATS = "api/dialects/error_formats.py"
OPENAI = "api/dialects/openai"
ERRORS = "api/http/errors.py"
LOOPS = "client/reply/loops.py"

MUTANTS = [
    # -- pieces --
    Mutant("thoughts and text are joined", OUTPUTS, "_by_part", 'attrgetter("part")', 'attrgetter("index")'),
    Mutant("a joined piece is text again", OUTPUTS, "_join", "part=last.part,", ""),
    Mutant(
        "log-probabilities weigh nothing",
        OUTPUTS,
        "Piece.__post_init__",
        "LOGPROB_BYTES * entries",
        "LOGPROB_BYTES * len(self.logprobs)",
    ),
    Mutant(
        "a thought is the chat's content",
        f"{OPENAI}/chat.py",
        "_delta",
        'return {"reasoning": piece.delta, "reasoning_content": piece.delta}',
        'return {"content": piece.delta}',
    ),
    # -- loops --
    Mutant("a forced token is chosen", LOOPS, "LoopDetector.push", "+= not is_forced", "+= 1"),
    Mutant("a wrong token is passed over", LOOPS, "LoopDetector.push", "self._period = 0", "pass"),
    Mutant(
        "a loop begins where it was found",
        LOOPS,
        "LoopDetector._search",
        "while first and tokens[first - 1] == tokens[first - 1 + period]:",
        "while False:",
    ),
    Mutant("loops are searched too rarely", LOOPS, "SEARCH_TOKENS", "64", "128"),
    # -- batches and streams --
    Mutant(
        "a stream that ended with its last piece is waited for",
        ANSWERING,
        "StreamResponse.__anext__",
        "if not self._ready.is_set() and not self._is_over:",
        "if not self._ready.is_set():",
    ),
    Mutant(
        "a pause is never noticed",
        ANSWERING,
        "StreamResponse._check_silence",
        "self._is_silent, left_s = True,",
        "self._is_silent, left_s = False,",
    ),
    Mutant(
        "one pause is all there is",
        ANSWERING,
        "StreamResponse.__anext__",
        "if batch or self._is_silent or self._has_new_progress():",
        "if batch:",
    ),
    Mutant(
        "a stream that may stay silent is opened",
        ANSWERING,
        "StreamResponse.__init__",
        "if first_byte_s else None",
        "",
    ),
    Mutant(
        "a whole response gets keep-alives",
        ANSWERING,
        "StreamResponse.begin",
        "if not request.is_streamed:",
        "if False:",
    ),
    Mutant(
        "a stream has no beginning",
        ANSWERING,
        "StreamResponse._write_part",
        "data = self._writer.begin(self._replies) + data",
        "pass",
    ),
    Mutant(
        "the client that waits for a model gets nothing",
        ANSWERING,
        "StreamResponse.while_waiting",
        "if self._due_s is None:",
        "if True:",
    ),
    Mutant(
        "progress is sent although it has not moved",
        ANSWERING,
        "StreamResponse._keep_alive",
        "self._shown_progress = _num_processed(replies)",
        "pass",
    ),
    Mutant(
        "tokens are counted for one batch only",
        ANSWERING,
        "TokenMeter.count",
        "self._set_total(self._num_counted + sum(counts.values()))",
        "self._set_total(sum(counts.values()))",
    ),
    Mutant(
        "usage is never the last chunk",
        f"{OPENAI}/writer.py",
        "OpenAIWriter.end",
        "+ DONE if self._with_usage else DONE",
        "+ DONE if False else DONE",
    ),
    # -- errors --
    Mutant(
        "below its path an API is not heard", FORMATS, "ErrorFormats.of_path", 'or path.startswith(f"{owned}/")', ""
    ),
    Mutant(
        "an API owns its neighbours",
        FORMATS,
        "ErrorFormats.of_path",
        'path.startswith(f"{owned}/")',
        "path.startswith(owned)",
    ),
    Mutant(
        "errors tell of the machine",
        ERRORS,
        "ApiError.__post_init__",
        "self.message = _clean(self.message)",
        "self.message = str(self.message)",
    ),
    Mutant(
        "when to come back is not told",
        ERRORS,
        "ErrorFormat.answer",
        "if error.retry_after_s is not None:",
        "if False:",
    ),
    Mutant(
        "a parameter's name is lost between processes",
        "core/events.py",
        "_DETAILS",
        'InvalidParameterError: ("message", "parameter"),',
        'InvalidParameterError: ("message",),',
    ),
    Mutant(
        "settings are looked for by the wrong name",
        "config/sources.py",
        "_create",
        "if setting.field_name in error.settings",
        "if setting.name in error.settings",
    ),
]
