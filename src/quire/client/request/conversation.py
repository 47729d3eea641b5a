"""Convert messages and tools to a prompt, the grammar of the answer, and the format for parsing the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from msgspec import structs

from quire.client.request.params import SamplingParams
from quire.client.request.text_model import Messages, TemplateArguments, TextModel
from quire.errors import InvalidParameterError, WorkBudgetError
from quire.text.chat.answer_formats import ModelFormats
from quire.text.chat.canonical import canonical
from quire.text.chat.prompt_parts import (
    NumberedMessages as NumberedMessages,  # noqa: PLC0414 - re-exported for the API
)
from quire.text.chat.prompt_parts import PromptParts, message_parts, num_system
from quire.text.chat.stable_prefix import RemovedLine as RemovedLine  # noqa: PLC0414 - re-exported for the API
from quire.text.chat.stable_prefix import StablePrefix as StablePrefix  # noqa: PLC0414
from quire.text.chat.stable_prefix import without_lines as without_lines  # noqa: PLC0414
from quire.text.chat.tools import NO_TOOLS, with_written_tools
from quire.text.chat.tools import Tool as Tool  # noqa: PLC0414 - re-exported for the API
from quire.text.chat.tools import ToolMode as ToolMode  # noqa: PLC0414
from quire.text.chat.tools import ToolUse as ToolUse  # noqa: PLC0414
from quire.text.chat.tools import checked_tool as checked_tool  # noqa: PLC0414
from quire.text.chat.tools import tool_mode as tool_mode  # noqa: PLC0414
from quire.text.chat.tools import tools_of as tools_of  # noqa: PLC0414
from quire.text.grammars.answer_grammar import (
    AnswerRules,
    CallableTool,
    ToolRules,
    answer_grammar,
    schema_grammar,
    text_keys,
)
from quire.text.grammars.grammar import Grammar, bounded_schema
from quire.text.parsers.reader import AnswerFormat
from quire.text.parsers.tool_format import HERMES, ToolFormat

BUDGET = "thinking_token_budget"
MAX_BUDGET = 1 << 20
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids, and the format of its answer."""

    ids: list[int]
    form: AnswerFormat
    """The syntax of reasoning and tool calls in the answer."""
    parts: PromptParts
    """The token ranges of messages and tools."""
    grammar: Grammar | None = None
    """A grammar that constrains the answer."""

    def applied(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with this prompt's grammar and answer format."""
        return replace(params, grammar=self.grammar, answer_format=self.form)


def chat_prompt(
    model: TextModel, messages: Messages, use: ToolUse = NO_TOOLS, arguments: TemplateArguments | None = None
) -> ChatPrompt:
    """Render and tokenize a conversation with its tools. The result has no grammar."""
    formats, tools = model.formats(), use.callable
    form = _tool_form(model, formats) if tools else None
    parts = message_parts(messages)
    if tools and formats.tools is not None:
        arguments = structs.replace(arguments or TemplateArguments(), tools=[tool.shown for tool in use.tools])
    elif tools:
        # Tools and system text are merged into one message, so its tokens cannot be assigned to either.
        num_first = num_system(messages)
        messages = with_written_tools(messages, use.tools)
        parts = [*[None] * num_system(messages), *parts[num_first:]]
    canonical_messages = canonical(messages, formats.spelling)
    rendered = model.rendered(canonical_messages, arguments)
    answer = AnswerFormat(
        reasoning=formats.reasoning,
        is_thinking=formats.reasoning is not None and formats.reasoning.is_open(rendered.text),
        tools=form,
        text_keys={tool.name: text_keys(tool.schema) for tool in tools},
        shown_token_ids=_shown(formats, form),
    )
    numbered = NumberedMessages(canonical_messages, parts[len(parts) - len(canonical_messages) :])
    ids, spans = model.encoded_parts(rendered, numbered, [tool.name for tool in use.tools])
    return ChatPrompt(ids, answer, spans)


def converse(
    model: TextModel,
    messages: Messages,
    use: ToolUse = NO_TOOLS,
    grammar: Grammar | None = None,
    max_thought_tokens: int | None = None,
    arguments: TemplateArguments | None = None,
) -> ChatPrompt:
    """Build a conversation's prompt, and the grammar for its tools, a requested grammar, or both combined."""
    schema = None if grammar is None else grammar.schema
    if use.callable and grammar is not None and schema is None:
        raise InvalidParameterError(
            f"expected a JSON schema with tools, got {grammar.parameter}; leave it out, or leave tools out",
            grammar.parameter,
        )
    prompt, formats = chat_prompt(model, messages, use, arguments), model.formats()
    reasoning, is_thinking = formats.reasoning, prompt.form.is_thinking
    budget = _budget(max_thought_tokens, formats)
    rules = AnswerRules(schema=schema, reasoning=reasoning, is_thinking=is_thinking, max_thought_tokens=budget)
    if prompt.form.tools is not None:
        return replace(prompt, grammar=_Tools(model, formats, prompt.form.tools, use, rules).grammar())
    if reasoning is None or (grammar is None and budget is None):
        return replace(prompt, grammar=grammar)
    if grammar is not None and schema is None:
        if budget is None:
            return replace(prompt, grammar=grammar)
        both = f"expected a thinking budget or {grammar.parameter}, got both; leave one out"
        raise InvalidParameterError(both, BUDGET, code="budget_beside_grammar")
    return replace(prompt, grammar=_grammar(rules, formats, BUDGET if grammar is None else "response_format"))


def _budget(requested: int | None, formats: ModelFormats) -> int | None:
    """Return the validated limit of reasoning tokens; None for a model without reasoning."""
    if requested is None or formats.reasoning is None:
        return None
    if not 1 <= requested <= MAX_BUDGET:
        rule = f"expected a thinking budget of 1 to {MAX_BUDGET} tokens, got {requested}"
        raise InvalidParameterError(rule, BUDGET, code="budget_out_of_range")
    if not any(formats.reasoning.end.startswith(mark) for mark in formats.marks):
        rule = "a thinking budget needs a model that ends thoughts with a special token"
        sentence = f"{rule}, this one ends them with {formats.reasoning.end!r} in plain text; leave the budget out"
        raise InvalidParameterError(sentence, BUDGET, code="budget_not_supported")
    return requested


class ConversationArguments(TemplateArguments, frozen=True, kw_only=True):
    """Arguments of `chat` in Python: the template's arguments, and the use of tools."""

    tool_choice: str | Mapping[str, Any] | None = None
    """`auto`, `none`, `required`, or `{"type": "function", "function": {"name": ...}}`."""
    parallel_tool_calls: bool = True
    """Whether an answer may contain several tool calls."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "ConversationArguments":
        """Convert a caller's keyword arguments. Raises InvalidParameterError for an unknown argument."""
        unexpected = sorted(set(arguments).difference(cls.__struct_fields__))
        if unexpected:
            names = ", ".join(cls.__struct_fields__)
            raise InvalidParameterError(f"expected template arguments {names}, got {unexpected[0]!r}")
        return cls(**arguments)


def chat_inputs(
    model: TextModel, messages: Messages, params: SamplingParams | None, **arguments: Any
) -> tuple[list[int], SamplingParams]:
    """Return the token ids of a conversation, and the sampling parameters with its grammar and answer format.
    `arguments` are the fields of `ConversationArguments`."""
    params, wanted = params or SamplingParams(), ConversationArguments.of(arguments)
    mode, only = tool_mode(wanted.tool_choice)
    use = ToolUse(tools_of(wanted.tools or ()), mode, only, wanted.parallel_tool_calls)
    conversation = converse(model, messages, use, params.grammar, arguments=structs.replace(wanted, tools=None))
    return conversation.ids, conversation.applied(params)


class ToolFit(Enum):
    """The result of checking a grammar."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"
    """The request's time budget was used up before the check finished."""


class _Tools:
    """Builds the grammar of a request's tools; a schema that cannot be compiled is relaxed to any JSON object."""

    def __init__(
        self, model: TextModel, formats: ModelFormats, form: ToolFormat, use: ToolUse, rules: AnswerRules
    ) -> None:
        self._model, self._formats, self._form, self._use, self._rules = model, formats, form, use, rules

    def grammar(self) -> Grammar:
        """Return a grammar with the schemas of all tools. If it is invalid, or its check exceeds the request's budget,
        each schema is checked alone, so that results are cached by tool, and invalid schemas are relaxed."""
        tools = [(tool, CallableTool(tool.name, _schema(tool), tool.is_strict)) for tool in self._use.callable]
        whole = self._of([one for _, one in tools])
        if self._found(whole) is ToolFit.RIGHT:
            return whole
        fit = self._of([one if self._is_fit(tool, one) else CallableTool(tool.name, ANY_OBJECT) for tool, one in tools])
        if self._found(fit) is not ToolFit.WRONG:
            return fit
        return self._of([CallableTool(tool.name, ANY_OBJECT) for tool, _ in tools])

    def _of(self, tools: Sequence[CallableTool]) -> Grammar:
        use = self._use
        must_call = use.mode is ToolMode.REQUIRED or use.only is not None
        calls = ToolRules(self._form, tools, must_call, use.is_parallel and use.only is None)
        return _grammar(replace(self._rules, calls=calls), self._formats, "tools")

    def _is_fit(self, tool: Tool, callable_tool: CallableTool) -> bool:
        if self._found(Grammar.lark(schema_grammar(callable_tool), "tools")) is ToolFit.RIGHT:
            return True
        if tool.is_strict:
            why = "no grammar can express its schema, or not within a request's time"
            sentence = f"tool {tool.name} is strict, and {why}; leave strict out, or simplify the schema"
            raise InvalidParameterError(sentence, "tools", code="strict_schema_unsupported")
        return False

    def _found(self, grammar: Grammar) -> ToolFit:
        try:
            self._model.checked(grammar)
        except WorkBudgetError as error:
            if error.retry_after_s:
                raise
            return ToolFit.UNKNOWN
        except InvalidParameterError:
            return ToolFit.WRONG
        return ToolFit.RIGHT


def _schema(tool: Tool) -> Mapping[str, Any]:
    made: Mapping[str, Any] = bounded_schema(tool.schema, "tools")
    return made


def _grammar(rules: AnswerRules, formats: ModelFormats, parameter: str) -> Grammar:
    return Grammar.lark(answer_grammar(rules, formats.marks), parameter)


def _tool_form(model: TextModel, formats: ModelFormats) -> ToolFormat:
    if formats.tools is None and model.writes_tools:
        return HERMES
    if formats.tools is None:
        raise InvalidParameterError(
            f"tools need a model whose chat template has tool calls, the template of {model.name} has none; leave tools"
            " out, use another model, or start the server with --tool-format hermes",
            "tools",
        )
    return formats.tools


def _shown(formats: ModelFormats, form: ToolFormat | None) -> frozenset[int]:
    """Return the special tokens that delimit reasoning or tool calls; the parser needs them in the text."""
    texts = [] if formats.reasoning is None else [formats.reasoning.begin, formats.reasoning.end]
    if form is not None:
        texts += [form.begin, form.name_end, form.call_end, form.again or "", form.end]
    return frozenset(number for mark, number in formats.marks.items() if any(mark in text for text in texts))
