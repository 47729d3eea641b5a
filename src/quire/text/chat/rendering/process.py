"""The process that runs a model's chat template: `python -m quire.text.chat.rendering.process`, a helper.

A template is a program from a downloaded file, and its input is a client's. Whatever it does (a number squared sixty
times, a text replaced by a thousand of itself) it does here, within the bounds of a helper (`sandboxed`). Imports
jinja2 and little else, so that it starts quickly.
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
from quire.text.sandboxed.template_messages import (
    TOO_DEEP,
    Broken,
    LoadTemplate,
    Render,
    Rendered,
    TemplateLoaded,
    TemplateRefused,
    ToProcess,
    ToServer,
    read_to_process,
)

MEMORY_BYTES = 512 * 1024 * 1024
"""Address space: the interpreter takes a tenth of it, a prompt of a million tokens another."""
PROBE = "quire-probe"
MAX_DEPTH = 128
"""A rendering that failed of messages nested deeper did so for that."""


class Program:
    """One compiled template."""

    def __init__(self, load: LoadTemplate) -> None:
        self._load = load
        self._template, self.own_text = TemplateSandbox().compiled(load.source)

    def loaded(self) -> TemplateLoaded:
        """What is known of it."""
        return TemplateLoaded(self._finds_parts_only(), self.own_text)

    def render(self, request: Render) -> Rendered:
        """The prompt. Raises TemplateError for whatever the template does wrong."""
        clock = datetime.fromisoformat(request.now)

        def strftime_now(layout: str) -> str:
            return clock.strftime(layout)

        context = {
            **mark(request.extra),
            "messages": [_marked_message(message, f"m{at}") for at, message in enumerate(request.messages)],
            "tools": _marked_tools(request.tools),
            "documents": mark(request.documents),
            "add_generation_prompt": request.add_generation_prompt,
            "strftime_now": strftime_now,
        }
        text = self._run(context)
        if not isinstance(text, MarkedText):
            return Rendered(text, ())
        return Rendered(str.__str__(text), text.client, text.sources)

    def _run(self, context: dict[str, Any]) -> str:
        """Collect the output piece by piece, so that too much of it is noticed while there is little."""
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
            rule = f"expected the chat template to use at most {MEMORY_BYTES:,} bytes, these messages need more"
            way_out = "send fewer or shorter ones, or use the completions endpoint"
            raise TemplateError(f"{rule}; {way_out}", code="memory_exceeded") from None
        except Exception as error:  # whatever a template does wrong, its messages are refused and the server goes on
            message = str(error) or type(error).__name__
            raise TemplateError(f"the model's chat template rejected these messages: {message}") from error

    def _finds_parts_only(self) -> bool:
        """Whether the template shows a message's text only if it comes as a list of parts. It is tried, once."""
        now = datetime(2000, 1, 1).isoformat()
        for content in (PROBE, [{"type": "text", "text": PROBE}]):
            try:
                shown = self.render(Render([{"role": "user", "content": content}], None, None, {}, True, now)).text
            except TemplateError:
                continue
            if PROBE in shown:
                return isinstance(content, list)
        return False


def _marked_message(message: dict[str, Any], label: str) -> dict[str, Any]:
    """All of it is the client's but the role: that is one of a few names."""
    return {mark(name, label): value if name == "role" else mark(value, label) for name, value in message.items()}


def _marked_tools(tools: Any) -> Any:
    if not isinstance(tools, list):
        return mark(tools)
    return [mark(tool, f"t{at}") for at, tool in enumerate(tools)]


def _is_deep(value: Any) -> bool:
    """Whether lists and objects stand inside one another beyond what any template writes out in good order."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return any(isinstance(one, dict | list) for one in level)


class Renderer:
    """Answers messages, one after the other."""

    def __init__(self) -> None:
        self._program: Program | None = None

    def answer(self, message: ToProcess) -> ToServer:
        """Whatever the template does wrong is an answer."""
        try:
            if isinstance(message, LoadTemplate):
                self._program = None
                self._program = Program(message)
                return self._program.loaded()
            if self._program is None:
                return TemplateRefused("no template is loaded")
            return self._rendered(self._program, message)
        except TemplateError as error:
            return TemplateRefused(str(error), code=error.code)
        except Exception as error:  # a template may break the compiler in many ways
            line = getattr(error, "lineno", None)
            why = str(error) or type(error).__name__
            return Broken(f"the chat template does not compile{f' at line {line}' if line else ''}: {why}")

    @staticmethod
    def _rendered(program: Program, request: Render) -> ToServer:
        """The template compiled: what fails now is of these messages."""
        try:
            return program.render(request)
        except (RecursionError, TemplateError) as error:
            is_recursion = isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)
            if is_recursion and _is_deep([request.messages, request.tools, request.documents, request.extra]):
                return TemplateRefused(TOO_DEEP)
            raise


def answer_render(renderer: Renderer, frame: bytes) -> bytes:
    """The same in bytes, with what it cost."""
    message = read_to_process(frame)
    started_s = process_time()
    answer = renderer.answer(message)
    if isinstance(answer, Rendered | TemplateRefused):
        answer = replace(answer, spent_s=process_time() - started_s)
    try:
        return encode_frame(answer)
    except UnicodeEncodeError:
        sentence = "the model's chat template returned an incomplete character; use the completions endpoint"
        return encode_frame(TemplateRefused(sentence))
    except MemoryError:
        rule = f"expected the chat template to use at most {MEMORY_BYTES:,} bytes, its prompt needs more"
        return encode_frame(TemplateRefused(rule, code="memory_exceeded"))


if __name__ == "__main__":
    serve(partial(answer_render, Renderer()), MEMORY_BYTES)
