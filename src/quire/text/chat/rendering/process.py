"""The process that runs a model's chat template: `python -m quire.text.chat.rendering.process`.

A template is a program from a downloaded file, and its input comes from clients. Excessive work (repeated squaring of a
number, repeated `replace` of a text) is confined to this process, within the limits of package `sandboxed`. Imports
jinja2 and little else, to start quickly.
"""

from datetime import datetime
from functools import partial
from time import process_time
from typing import Any

from msgspec.structs import replace

from quire.errors import TemplateError
from quire.text.chat.rendering.marked_text import MarkedText, concat, mark
from quire.text.chat.rendering.metering import METER, WorkMeter
from quire.text.chat.rendering.sandbox import TemplateSandbox
from quire.text.sandboxed.helper import encode_frame, serve
from quire.text.sandboxed.messages import (
    TOO_DEEP,
    LoadTemplate,
    Render,
    Rendered,
    TemplateFailed,
    TemplateLoaded,
    TemplateRefused,
    ToProcess,
    ToServer,
    read_to_process,
)

MEMORY_BYTES = 512 * 1024 * 1024
"""Limit of the address space. The interpreter takes a tenth of it, a prompt of a million tokens another tenth."""
PROBE_TEXT = "quire-probe"
MAX_DEPTH = 128
"""If a rendering fails by recursion and its input is nested deeper than this, the nesting is reported as the cause."""


class Program:
    """One compiled template."""

    def __init__(self, load: LoadTemplate) -> None:
        self._load = load
        self._template, self.own_text = TemplateSandbox().build_template(load.source)

    def render(self, request: Render) -> Rendered:
        """Return the prompt. Raises TemplateError for any failure of the template, RecursionError for deep nesting."""
        clock, tools = datetime.fromisoformat(request.now), request.tools

        def strftime_now(layout: str) -> str:
            return clock.strftime(layout)

        context = {
            **mark(request.extra),
            "messages": [_marked_message(message, f"m{index}") for index, message in enumerate(request.messages)],
            "tools": [mark(tool, f"t{index}") for index, tool in enumerate(tools)]
            if isinstance(tools, list)
            else mark(tools),
            "documents": mark(request.documents),
            "add_generation_prompt": request.add_generation_prompt,
            "strftime_now": strftime_now,
        }
        text = self._run(context)
        if not isinstance(text, MarkedText):
            return Rendered(text, ())
        return Rendered(str.__str__(text), text.client_spans, text.labeled_spans)

    def _run(self, context: dict[str, Any]) -> str:
        """Collect the output piece by piece, to stop at the limit instead of after the whole output."""
        meter = WorkMeter(self._load.max_steps, self._load.max_output_chars)
        pieces: list[str] = []
        try:
            for piece in self._template.generate({**self._load.special_tokens, **context, METER: meter}):
                meter.count_output(len(piece))
                pieces.append(piece)
            return concat(pieces)
        except TemplateError:
            raise
        except MemoryError:
            limit = f"expected the chat template to use at most {MEMORY_BYTES:,} bytes, these messages need more"
            hint = "send fewer or shorter ones, or use the completions endpoint"
            raise TemplateError(f"{limit}; {hint}", code="memory_exceeded") from None
        except Exception as error:  # any failure of a template rejects the messages, and the process continues
            message = str(error) or type(error).__name__
            raise TemplateError(f"the model's chat template rejected these messages: {message}") from error

    def needs_parts(self) -> bool:
        """Render test messages to find whether the template shows a text only if it comes as a list of parts."""
        now = datetime(2000, 1, 1).isoformat()
        for content in (PROBE_TEXT, [{"type": "text", "text": PROBE_TEXT}]):
            try:
                shown = self.render(Render([{"role": "user", "content": content}], None, None, {}, True, now)).text
            except TemplateError:
                continue
            if PROBE_TEXT in shown:
                return isinstance(content, list)
        return False


def _marked_message(message: dict[str, Any], label: str) -> dict[str, Any]:
    """Mark all of a message as client text, except the value of `role`, which is one of `messages.ROLES`."""
    return {mark(name, label): value if name == "role" else mark(value, label) for name, value in message.items()}


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return any(isinstance(value, dict | list) for value in level)


class Renderer:
    """Responds to the server's messages, one at a time."""

    def __init__(self) -> None:
        self._program: Program | None = None

    def answer(self, message: ToProcess) -> ToServer:
        """Return the response to one message. Failures of the template are responses, not exceptions."""
        try:
            if isinstance(message, LoadTemplate):
                self._program = None
                self._program = Program(message)
                return TemplateLoaded(self._program.needs_parts(), self._program.own_text)
            if self._program is None:
                return TemplateRefused("no template is loaded")
            return self._render(self._program, message)
        except TemplateError as error:
            return TemplateRefused(str(error), code=error.code)
        except Exception as error:  # a template may break the compiler in many ways
            line = getattr(error, "lineno", None)
            fault = str(error) or type(error).__name__
            return TemplateFailed(f"the chat template does not compile{f' at line {line}' if line else ''}: {fault}")

    @staticmethod
    def _render(program: Program, request: Render) -> ToServer:
        """Render with a compiled template; a RecursionError on deeply nested messages is reported as such."""
        try:
            return program.render(request)
        except (RecursionError, TemplateError) as error:
            is_recursion = isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)
            if is_recursion and _is_deep([request.messages, request.tools, request.documents, request.extra]):
                return TemplateRefused(TOO_DEEP)
            raise


def answer_render(renderer: Renderer, frame: bytes) -> bytes:
    """Handle one frame and return the encoded response with its CPU time."""
    message = read_to_process(frame)
    started_s = process_time()
    answer = renderer.answer(message)
    if isinstance(answer, Rendered | TemplateRefused):
        answer = replace(answer, spent_s=process_time() - started_s)
    try:
        return encode_frame(answer)
    except UnicodeEncodeError:
        fault = "the model's chat template returned an incomplete character; use the completions endpoint"
        return encode_frame(TemplateRefused(fault))
    except MemoryError:
        fault = f"expected the chat template to use at most {MEMORY_BYTES:,} bytes, its prompt needs more"
        return encode_frame(TemplateRefused(fault, code="memory_exceeded"))


if __name__ == "__main__":
    serve(partial(answer_render, Renderer()), MEMORY_BYTES)
