"""Messages to the one text a model reads, by the Jinja template that came with it. May touch `jinja2`, no tokenizer.

A template comes from the checkpoint or from the operator, never from a request. Still it is a program, and its input
is a client's, so it runs in jinja's immutable sandbox and is bounded:

    bounded       characters of output; rounds of loops and calls of macros, all together; range(); the length of what
                  one *, + or ~ makes; ** is refused; the names of arguments, by an allow-list
    not bounded   seconds; the work of one filter, method or % (`indent`, `replace`, `join`); the length of one value
                  written out, before it is counted

So render beside the event loop, not on it. An operator who does not trust a template should not run its model.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

import jinja2

from quire.engine.chat_messages import Message, prepare_messages
from quire.engine.template_steps import METER, AddCounting, GenerationTag, Meter, MeteredSandbox
from quire.errors import CheckpointError, InvalidTextError, TemplateError

MAX_SOURCE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 8_000_000
MAX_STEPS = 200_000
"""Rounds of loops and calls of macros in one rendering: a thousand messages need some ten thousand."""

EXTRA_ARGUMENTS = frozenset(
    {
        "builtin_tools",
        "clear_thinking",
        "controls",
        "custom_tools",
        "date_string",
        "enable_thinking",
        "model_identity",
        "preserve_thinking",
        "python_tools",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "tools_in_user_message",
        "xml_tools",
    }
)
"""What clients may hand to a template besides the arguments named in `TemplateArguments`: names that published
templates read. None of them can stand for a message, a special token or a function."""

CONTINUE_MARK = "\ue000quire-continue\ue001"
"""Put after the last message to see where a template writes its end. Private-use characters: no text of a client's."""


class TemplateArguments(TypedDict, total=False):
    """What a rendering may be told."""

    add_generation_prompt: bool
    """End where the assistant begins. True unless the last message is continued."""
    continue_final_message: bool
    """End inside the last message, so that the model goes on with it."""
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool | None
    """None leaves it to the template."""
    extra: Mapping[str, Any]
    """A client's `chat_template_kwargs`; names outside the allow-list are refused."""


class ChatTemplate:
    """One model's template, compiled once. Rendering changes nothing: safe from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_output_chars: int = MAX_OUTPUT_CHARS,
        extra_arguments: frozenset[str] = EXTRA_ARGUMENTS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.max_output_chars = max_output_chars
        self._extra_arguments = extra_arguments
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source, now)
        self._wants_parts = self._finds_parts_only()

    def render(self, messages: Sequence[Message], **arguments: Unpack[TemplateArguments]) -> str:
        """The prompt. Special tokens are written out in it: encode it without adding them again."""
        is_continued = arguments.get("continue_final_message", False)
        add_generation_prompt = arguments.get("add_generation_prompt", not is_continued)
        if is_continued and add_generation_prompt:
            raise TemplateError(
                "a final message is continued or a new one is begun, not both; set add_generation_prompt to false"
            )
        prepared = prepare_messages(messages, wants_parts=self._wants_parts)
        if is_continued:
            prepared = _mark_end(prepared)
        context = {
            **self._special_tokens,
            **self._checked_extra(arguments),
            "messages": prepared,
            "tools": arguments.get("tools"),
            "documents": arguments.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(context)
        return _cut_at_mark(text) if is_continued else text

    def _checked_extra(self, arguments: TemplateArguments) -> dict[str, Any]:
        extra = dict(arguments.get("extra", {}))
        unknown = sorted(set(extra) - self._extra_arguments)
        if unknown:
            allowed = ", ".join(sorted(self._extra_arguments))
            raise TemplateError(f"template arguments may be {allowed}; {unknown[0]!r} given; leave it out")
        thinking = arguments.get("enable_thinking")
        return extra if thinking is None else {**extra, "enable_thinking": thinking}

    def _run(self, context: Mapping[str, Any]) -> str:
        """Collect the output piece by piece, so that too much of it is noticed while there is little."""
        meter = Meter(MAX_STEPS, self.max_output_chars)
        pieces: list[str] = []
        try:
            for piece in self._template.generate({**context, METER: meter}):
                meter.count_output(len(piece))
                pieces.append(piece)
        except TemplateError:
            raise
        except Exception as error:  # whatever a template does wrong, its messages are refused and the server goes on
            message = str(error) or type(error).__name__
            raise TemplateError(f"the model's chat template refused these messages: {message}") from error
        return "".join(pieces)

    def _finds_parts_only(self) -> bool:
        """Whether the template shows a message's text only if it comes as a list of parts. It is tried, once."""
        word = "quire-probe"
        for content in (word, [{"type": "text", "text": word}]):
            context = {**self._special_tokens, "messages": [{"role": "user", "content": content}], "tools": None}
            try:
                text = self._run({**context, "documents": None, "add_generation_prompt": True})
            except TemplateError:
                continue
            if word in text:
                return isinstance(content, list)
        return False


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template, or an error that says what to do without one."""
    if template is None:
        raise TemplateError(
            "chat needs a chat template, this model has none; use the completions endpoint with a plain prompt,"
            " or start the server with a template file"
        )
    return template


def _compile(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    if not isinstance(source, str):
        raise CheckpointError(
            f"a chat template must be one text, a {type(source).__name__} given; name one of the model's templates"
        )
    if len(source) > MAX_SOURCE_CHARS:
        raise CheckpointError(
            f"a chat template may have {MAX_SOURCE_CHARS} characters, {len(source)} given; give another template file"
        )
    environment = MeteredSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    try:
        return environment.from_string(AddCounting().visit(environment.parse(source)))
    except (jinja2.TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        raise CheckpointError(f"the chat template does not compile{where}: {error}; give another file") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As published templates expect it: jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a mark after the last message's text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    # The space shows whether the template trims messages; see `_cut_at_mark`.
    mark = CONTINUE_MARK + " "
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + mark}]
    if isinstance(content, list) and content:
        final_part = {**content[-1], "text": content[-1]["text"] + mark}
        return [*messages[:-1], {**last, "content": [*content[:-1], final_part]}]
    raise InvalidTextError("a final message can be continued if it has text, this one has none; give it some")


def _cut_at_mark(text: str) -> str:
    """Everything before the mark; without trailing space if the template trims its messages."""
    before, mark, after = text.rpartition(CONTINUE_MARK)
    if not mark:
        raise TemplateError("the model's chat template does not show the final message, so it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()
