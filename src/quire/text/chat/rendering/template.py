"""Renders messages to a prompt with the model's Jinja chat template. A helper process does the rendering itself.

A template comes from the checkpoint or the operator, never from a request. But it is a program whose input comes from
clients, so it runs in jinja's immutable sandbox, in a separate process (`process`), with limits:

    of the process   memory; time: a process that renders for more than two seconds is killed
    of the sandbox   output characters; loop iterations plus macro calls; range(); the length of results of *, + and ~;
                     ** is rejected; template arguments must be in a list. Errors name the limit that was exceeded

The prompt is returned with the spans that the client wrote, so that client text never becomes a control token.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from quire.errors import CapacityError, CheckpointError, InvalidTextError, QuireError, TemplateError
from quire.text.chat.rendering.messages import Message, prepare_messages
from quire.text.sandboxed.helper import encode_frame
from quire.text.sandboxed.messages import (
    TOO_DEEP,
    LoadTemplate,
    Render,
    Rendered,
    TemplateFailed,
    TemplateLoaded,
    TemplateRefused,
    read_to_server,
)
from quire.text.sandboxed.pool import HelperPool, IdleHelpers, NotLoadedError, StoppedError
from quire.text.text_work import charge_work, work_refusal

RENDER_S = 2.0
MAX_HELPERS = 2
"""Helper processes per template; the second is started when the first is busy."""
IDLE_HELPERS = IdleHelpers("quire.text.chat.rendering.process", "for the chat template", max_idle=2)  # of all templates
MAX_SOURCE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 8_000_000
MAX_STEPS = 200_000
"""Maximum loop iterations plus macro calls in one rendering; a thousand messages need about ten thousand."""

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
"""The only names allowed in `chat_template_kwargs`: arguments of published templates. None of them replaces a message,
a special token or a function. All other arguments are fields of `TemplateArguments`."""

CONTINUE_MARK = "\ue000quire-continue\ue001"
"""Appended to the last message to find its end in the prompt. Private-use characters, which clients do not send."""


class TemplateArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Optional arguments of a rendering."""

    add_generation_prompt: bool | None = None
    """End the prompt with the start of an assistant message. None: true unless the last message is continued."""
    continue_final_message: bool = False
    """End the prompt inside the last message, so that the model continues it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    enable_thinking: bool | None = None
    """None: the template's default."""
    extra: Mapping[str, Any] = {}
    """The client's `chat_template_kwargs`; names outside the allow-list are rejected."""


class ChatTemplate:
    """One model's template, compiled once. Thread-safe. The owner must call `close`."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        _check_source(source)
        self._now = now
        self._source = source
        self._special_tokens = dict(special_tokens)
        load = encode_frame(LoadTemplate(source, self._special_tokens, MAX_OUTPUT_CHARS, MAX_STEPS))
        self._helpers = HelperPool(IDLE_HELPERS, lambda: load, read_to_server, RENDER_S, MAX_HELPERS)
        self.close = weakref.finalize(self, self._helpers.close)
        """Release the helper processes; also called when the template is garbage-collected."""
        self.failure: QuireError | None = None
        """Set if loading the template was stopped, for example at the time limit. Completions still work then."""
        self._loaded = self._load()

    @property
    def text(self) -> str:
        """All text that the template may write: its source, the parsed literals in it, and its special tokens."""
        return "\0".join((self._loaded.own_text, self._source, *self._special_tokens.values()))

    def render(self, messages: Sequence[Message], arguments: TemplateArguments | None = None) -> Rendered:
        """Return the prompt. It includes special tokens as text, so encode it without adding them again. Raises
        TemplateError, InvalidTextError, CapacityError or WorkBudgetError."""
        if self.failure is not None:
            raise self.failure
        arguments = arguments or TemplateArguments()
        is_continued, requested = arguments.continue_final_message, arguments.add_generation_prompt
        add_generation_prompt = not is_continued if requested is None else requested
        if is_continued and add_generation_prompt:
            message = "expected a continued final message or a new one, got both; set add_generation_prompt to false"
            raise TemplateError(message, code="two_final_messages")
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
        if isinstance(answer, TemplateFailed):
            raise CheckpointError(f"{answer.message}; choose another chat template", code="template_not_compiled")
        if not isinstance(answer, TemplateLoaded):
            raise CheckpointError(f"the chat template cannot be loaded: got {answer!r}; choose another template")
        return answer

    def _run(self, request: Render) -> Rendered:
        frame = _encoded(request)
        if (refusal := work_refusal("template")) is not None:
            raise refusal
        try:
            with self._helpers.reserve():
                answer = self._helpers.request(frame, RENDER_S)
        except NotLoadedError as error:
            raise _not_loaded(error) from None
        except StoppedError as error:
            charge_work("template", 0.0 if error.is_starved else RENDER_S)
            raise _not_rendered(error) from None
        if isinstance(answer, Rendered | TemplateRefused):
            charge_work("template", answer.spent_s)
        if isinstance(answer, Rendered):
            return answer
        if isinstance(answer, TemplateRefused):
            raise TemplateError(answer.message, code=answer.code)
        message = "the model's chat template returned no prompt for these messages; use the completions endpoint"
        raise TemplateError(answer.message if isinstance(answer, TemplateFailed) else message)

    def _checked_extra(self, arguments: TemplateArguments) -> dict[str, Any]:
        extra = dict(arguments.extra)
        unknown = sorted(set(extra) - EXTRA_ARGUMENTS)
        if unknown:
            allowed = ", ".join(sorted(EXTRA_ARGUMENTS))
            message = f"expected template arguments from this list: {allowed}; got {unknown[0]!r}; leave it out"
            raise TemplateError(message, code="unknown_template_argument")
        thinking = arguments.enable_thinking
        return extra if thinking is None else {**extra, "enable_thinking": thinking}


def _check_source(source: object) -> None:
    if not isinstance(source, str):
        message = f"expected the chat template to be a string, got {type(source).__name__}"
        raise CheckpointError(f"{message}; choose one of the model's templates", code="template_not_string")
    if len(source) > MAX_SOURCE_CHARS:
        message = f"expected a chat template of at most {MAX_SOURCE_CHARS} characters, got {len(source)}"
        raise CheckpointError(f"{message}; choose another template file", code="template_too_long")


def _not_loaded(error: NotLoadedError) -> TemplateError:
    message = f"expected the chat template to load within {RENDER_S:g} s, but its process {error}"
    hint = "use the completions endpoint with a plain prompt, or start the server with another template"
    return TemplateError(f"{message}; {hint}", code="loading_stopped")


def _not_rendered(error: StoppedError) -> QuireError:
    if error.is_starved:
        message = f"the chat template process got too little processor time within {RENDER_S:g} s and is replaced"
        return CapacityError(f"{message}; try again", code="renderer_starved")
    message = f"expected the chat template to finish within {RENDER_S:g} s, but its process {error}"
    hint = "send fewer or shorter messages, or use the completions endpoint"
    return TemplateError(f"{message}; {hint}", code="rendering_stopped")


def _encoded(request: Render) -> bytes:
    try:
        return encode_frame(request)
    except RecursionError:
        raise InvalidTextError(TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        message = f"expected a chat of JSON values: {error}; send only JSON values, without lone surrogates"
        raise InvalidTextError(message, code="not_json") from None


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the mark to the last message's text."""
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
    """Return the prompt up to the mark, without trailing white space if the template trims messages."""
    before, mark, after = rendered.text.rpartition(CONTINUE_MARK)
    if not mark:
        message = "the model's chat template does not output the final message, so it cannot be continued"
        raise TemplateError(message, code="final_message_missing")
    text = before if after.startswith(" ") else before.rstrip()
    spans = ((start, min(stop, len(text))) for start, stop in rendered.client_spans)
    labeled = ((start, min(stop, len(text)), label) for start, stop, label in rendered.labeled_spans)
    return Rendered(
        text,
        tuple(span for span in spans if span[0] < span[1]),
        tuple(span for span in labeled if span[0] < span[1]),
    )
