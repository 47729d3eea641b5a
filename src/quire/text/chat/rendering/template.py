"""Messages to the one text a model reads, by the Jinja template that came with it. Renders nothing itself.

A template comes from the checkpoint or from the operator, never from a request. Still it is a program, and its input
is a client's, so it runs in jinja's immutable sandbox, in a process of its own (`process`), and is bounded:

    by the system    memory; seconds: a process that renders for longer than two is ended, and with it that rendering
    by the sandbox   with better sentences: characters of output; rounds of loops and calls of macros, all together;
                     range(); the length of what one *, + or ~ makes; ** is refused; names of arguments, by a list

The prompt comes back with the spans that a client wrote, so that no client's text becomes a control token.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from quire.core.work_budget import WorkKind
from quire.errors import CapacityError, CheckpointError, InvalidTextError, QuireError, TemplateError
from quire.text.chat.rendering.messages import Message, prepare_messages
from quire.text.sandboxed.helper import StoppedError, encode_frame
from quire.text.sandboxed.pool import HelperPool, IdleHelpers, NotLoadedError
from quire.text.sandboxed.template_messages import (
    TOO_DEEP,
    Broken,
    LoadTemplate,
    Render,
    Rendered,
    TemplateLoaded,
    TemplateRefused,
    ToServer,
    read_to_server,
)
from quire.text.text_work import current_work

RENDER_S = 2.0
MAX_HELPERS = 2
"""The second is started when a request finds the first busy."""
IDLE = IdleHelpers("quire.text.chat.rendering.process", "for the chat template", most=2)
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


class TemplateArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a rendering."""

    add_generation_prompt: bool | None = None
    """End where the assistant begins. None: yes, unless the last message is continued."""
    continue_final_message: bool = False
    """End inside the last message, so that the model goes on with it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    enable_thinking: bool | None = None
    """None leaves it to the template."""
    extra: Mapping[str, Any] = {}
    """A client's `chat_template_kwargs`; names outside the allow-list are refused."""


NO_ARGUMENTS = TemplateArguments()


class ChatTemplate:
    """One model's template, compiled once. Rendering changes nothing: safe from several threads. Close it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_output_chars: int = MAX_OUTPUT_CHARS,
        extra_arguments: frozenset[str] = EXTRA_ARGUMENTS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        _check_source(source)
        self._extra_arguments = extra_arguments
        self._now = now
        self._source = source
        self._special_tokens = dict(special_tokens)
        load = encode_frame(LoadTemplate(source, self._special_tokens, max_output_chars, MAX_STEPS))
        self._helpers = HelperPool(IDLE, lambda: load, read_to_server, RENDER_S, MAX_HELPERS)
        self.close = weakref.finalize(self, self._helpers.close)
        """End its processes. They end, too, when the template is no longer referenced."""
        self.failure: QuireError | None = None
        """Why it cannot be used: it did too much when it was loaded. Its model is still good for completions."""
        self._loaded = self._load()

    @property
    def own_text(self) -> str:
        """All text the template may write of its own: its source, as it stands and as it is read, and its tokens."""
        return "\0".join((self._loaded.own_text, self._source, *self._special_tokens.values()))

    def render(self, messages: Sequence[Message], arguments: TemplateArguments = NO_ARGUMENTS) -> Rendered:
        """The prompt. Special tokens are written out in it: encode it without adding them again."""
        if self.failure is not None:
            raise self.failure
        is_continued, begins_answer = arguments.continue_final_message, arguments.add_generation_prompt
        add_generation_prompt = not is_continued if begins_answer is None else begins_answer
        if is_continued and add_generation_prompt:
            both = "expected a continued final message or a new one, got both; set add_generation_prompt to false"
            raise TemplateError(both, code="two_final_messages")
        prepared = prepare_messages(messages, wants_parts=self._loaded.wants_parts)
        request = Render(
            messages=_mark_end(prepared) if is_continued else prepared,
            tools=arguments.tools,
            documents=arguments.documents,
            extra=self._checked_extra(arguments),
            add_generation_prompt=add_generation_prompt,
            now=self._now().isoformat(),
        )
        rendered = self._run(request)
        return _cut_at_mark(rendered) if is_continued else rendered

    def _load(self) -> TemplateLoaded:
        try:
            answer = self._helpers.load()
        except NotLoadedError as error:
            self.failure = _not_loaded(error)
            return TemplateLoaded(wants_parts=False, own_text="")
        if isinstance(answer, Broken):
            raise CheckpointError(f"{answer.message}; choose another file", code="template_not_compiled")
        if not isinstance(answer, TemplateLoaded):
            raise CheckpointError(f"the chat template cannot be loaded: got {answer!r}; choose another file")
        return answer

    def _run(self, request: Render) -> Rendered:
        answer = self._answer(_encoded(request))
        if isinstance(answer, Rendered):
            return answer
        if isinstance(answer, TemplateRefused):
            raise TemplateError(answer.message, code=answer.code)
        nothing = "the model's chat template returned no prompt for these messages; use the completions endpoint"
        raise TemplateError(answer.message if isinstance(answer, Broken) else nothing)

    def _answer(self, frame: bytes) -> ToServer:
        work = current_work()
        if (refusal := work.refusal(WorkKind.TEMPLATE)) is not None:
            raise refusal
        try:
            with self._helpers.turn():
                answer = self._helpers.request(frame, RENDER_S)
        except NotLoadedError as error:
            raise _not_loaded(error) from None
        except StoppedError as error:
            work.charge(WorkKind.TEMPLATE, 0.0 if error.is_starved else RENDER_S)
            raise _not_rendered(error) from None
        if isinstance(answer, Rendered | TemplateRefused):
            work.charge(WorkKind.TEMPLATE, answer.spent_s)
        return answer

    def _checked_extra(self, arguments: TemplateArguments) -> dict[str, Any]:
        extra = dict(arguments.extra)
        unknown = sorted(set(extra) - self._extra_arguments)
        if unknown:
            allowed = ", ".join(sorted(self._extra_arguments))
            rule = f"expected template arguments of {allowed}, got {unknown[0]!r}; leave it out"
            raise TemplateError(rule, code="unknown_template_argument")
        thinking = arguments.enable_thinking
        return extra if thinking is None else {**extra, "enable_thinking": thinking}


def _check_source(source: object) -> None:
    if not isinstance(source, str):
        rule = f"expected the chat template to be a string, got {type(source).__name__}"
        raise CheckpointError(f"{rule}; name one of the model's templates", code="template_not_string")
    if len(source) > MAX_SOURCE_CHARS:
        rule = f"expected a chat template of at most {MAX_SOURCE_CHARS} characters, got {len(source)}"
        raise CheckpointError(f"{rule}; choose another template file", code="template_too_long")


def _not_loaded(error: NotLoadedError) -> TemplateError:
    rule = f"expected the chat template to load within {RENDER_S:g} s, it {error}"
    way_out = "use the completions endpoint with a plain prompt, or start the server with another template"
    return TemplateError(f"{rule}; {way_out}", code="loading_stopped")


def _not_rendered(error: StoppedError) -> QuireError:
    if error.is_starved:
        why = f"the chat template process got too little processor time within {RENDER_S:g} s and is replaced"
        return CapacityError(f"{why}; try again", code="renderer_starved")
    rule = f"expected the chat template to finish within {RENDER_S:g} s, it {error}"
    way_out = "send fewer or shorter messages, or use the completions endpoint"
    return TemplateError(f"{rule}; {way_out}", code="rendering_stopped")


def _encoded(request: Render) -> bytes:
    try:
        return encode_frame(request)
    except RecursionError:
        raise InvalidTextError(TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        rule = f"expected a chat of JSON values: {error}; send whole characters, numbers and lists"
        raise InvalidTextError(rule, code="not_json") from None


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
    raise InvalidTextError("expected text in the final message to continue, got none; add some")


def _cut_at_mark(rendered: Rendered) -> Rendered:
    """Everything before the mark; without trailing space if the template trims its messages."""
    before, mark, after = rendered.text.rpartition(CONTINUE_MARK)
    if not mark:
        sentence = "the model's chat template does not output the final message, so it cannot be continued"
        raise TemplateError(sentence, code="final_message_missing")
    text = before if after.startswith(" ") else before.rstrip()
    spans = ((start, min(stop, len(text))) for start, stop in rendered.client)
    sources = ((start, min(stop, len(text)), label) for start, stop, label in rendered.sources)
    return Rendered(
        text,
        tuple(span for span in spans if span[0] < span[1]),
        tuple(source for source in sources if source[0] < source[1]),
    )
