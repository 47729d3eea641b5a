"""From messages and tools to an engine's request: the prompt, the grammar of its answer, and how to read that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from msgspec import structs

from quire.client.request.params import SamplingParams
from quire.client.request.text_model import NO_ARGUMENTS, Messages, TemplateArguments, TextModel
from quire.errors import InvalidParameterError, WorkBudgetError
from quire.text.chat.answer_formats import ModelFormats
from quire.text.chat.canonical import canonical
from quire.text.chat.prompt_parts import (
    NumberedMessages as NumberedMessages,  # noqa: PLC0414 - for the API, too
)
from quire.text.chat.prompt_parts import PromptPart, PromptParts, TemplateParts, message_parts, num_system
from quire.text.chat.stable_prefix import NOTHING_LISTED as NOTHING_LISTED  # noqa: PLC0414 - for the API, too
from quire.text.chat.stable_prefix import RemovedLine as RemovedLine  # noqa: PLC0414
from quire.text.chat.stable_prefix import StablePrefix as StablePrefix  # noqa: PLC0414
from quire.text.chat.tools import NO_TOOLS
from quire.text.chat.tools import Tool as Tool  # noqa: PLC0414 - for the API, too
from quire.text.chat.tools import ToolMode as ToolMode  # noqa: PLC0414
from quire.text.chat.tools import ToolUse as ToolUse  # noqa: PLC0414
from quire.text.chat.tools import checked_tool as checked_tool  # noqa: PLC0414
from quire.text.chat.tools import tool_mode as tool_mode  # noqa: PLC0414
from quire.text.chat.tools import tools_of as tools_of  # noqa: PLC0414
from quire.text.chat.written_tools import with_written_tools
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
    """A conversation in tokens, and how its answer is read."""

    ids: list[int]
    form: AnswerFormat
    """What the answer's parts look like."""
    parts: PromptParts
    """Where its messages and tools lie."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as an engine takes it."""

    prompt: ChatPrompt
    grammar: Grammar | None

    @property
    def ids(self) -> list[int]:
        return self.prompt.ids

    def applied(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what the answer must match and how it is read."""
        return replace(params, grammar=self.grammar, answer_format=self.prompt.form)


def chat_prompt(
    model: TextModel, messages: Messages, use: ToolUse = NO_TOOLS, arguments: TemplateArguments = NO_ARGUMENTS
) -> ChatPrompt:
    """A conversation as the model's template writes it, tools and all. No grammar is made for it."""
    formats, tools = model.formats(), use.callable
    form = _tool_form(model, formats) if tools else None
    parts = message_parts(messages)
    if tools and formats.tools is not None:
        arguments = structs.replace(arguments, tools=[tool.shown for tool in use.tools])
    elif tools:
        # Tools and the system's text become one text: which of them a token is cannot be determined.
        num_first = num_system(messages)
        messages = with_written_tools(messages, use.tools)
        parts = [*[None] * num_system(messages), *parts[num_first:]]
    canonical_messages = canonical(messages, formats.spelling)
    table = TemplateParts(parts[len(parts) - len(canonical_messages) :], _tool_parts(use))
    rendered = model.rendered(canonical_messages, arguments)
    answer = AnswerFormat(
        reasoning=formats.reasoning,
        is_thinking=formats.reasoning is not None and formats.reasoning.is_open(rendered.text),
        tools=form,
        text_keys={tool.name: text_keys(tool.schema) for tool in tools},
        shown_token_ids=_shown(formats, form),
    )
    ids, spans = model.encoded_parts(rendered, table)
    return ChatPrompt(ids, answer, spans)


def _tool_parts(use: ToolUse) -> list[PromptPart]:
    return [PromptPart("tool", at, tool.name) for at, tool in enumerate(use.tools)]


def converse(
    model: TextModel,
    messages: Messages,
    use: ToolUse = NO_TOOLS,
    grammar: Grammar | None = None,
    max_thought_tokens: int | None = None,
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> Conversation:
    """A conversation for one model: with tools, with an answer that must match a grammar, or with both."""
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
        return Conversation(prompt, _Tools(model, formats, prompt.form.tools, use, rules).grammar())
    if reasoning is None or (grammar is None and budget is None):
        return Conversation(prompt, grammar)
    if grammar is not None and schema is None:
        if budget is None:
            return Conversation(prompt, grammar)
        both = f"expected a thinking budget or {grammar.parameter}, got both; leave one out"
        raise InvalidParameterError(both, BUDGET, code="budget_beside_grammar")
    return Conversation(prompt, _grammar(rules, formats, BUDGET if grammar is None else "response_format"))


def _budget(requested: int | None, formats: ModelFormats) -> int | None:
    """Of a thought's tokens. A model that has no thoughts needs none."""
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
    """Arguments of a conversation in Python: those of the template, and how tools are used."""

    tool_choice: str | Mapping[str, Any] | None = None
    """`auto`, `none`, `required`, or an object of type function with a function's name."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "ConversationArguments":
        """Arguments as a caller wrote them. Raises InvalidParameterError for an unknown one."""
        unexpected = sorted(set(arguments).difference(cls.__struct_fields__))
        if unexpected:
            names = ", ".join(cls.__struct_fields__)
            raise InvalidParameterError(f"expected template arguments {names}, got {unexpected[0]!r}")
        return cls(**arguments)


def chat_inputs(
    model: TextModel, messages: Messages, params: SamplingParams | None, **arguments: Any
) -> tuple[list[int], SamplingParams]:
    """A conversation's tokens, and the parameters with what its answer must match and how it is read. `arguments` are
    those of `ConversationArguments`."""
    params, wanted = params or SamplingParams(), ConversationArguments.of(arguments)
    mode, only = tool_mode(wanted.tool_choice)
    use = ToolUse(tools_of(wanted.tools or ()), mode, only, wanted.parallel_tool_calls)
    conversation = converse(model, messages, use, params.grammar, arguments=structs.replace(wanted, tools=None))
    return conversation.ids, conversation.applied(params)


class ToolFit(Enum):
    """What came of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"
    """The request has no time left to find out."""


class _Tools:
    """The grammar of a request's tools; a schema that no grammar can express in full is expressed in part."""

    def __init__(
        self, model: TextModel, formats: ModelFormats, form: ToolFormat, use: ToolUse, rules: AnswerRules
    ) -> None:
        self._model, self._formats, self._form, self._use, self._rules = model, formats, form, use, rules

    def grammar(self) -> Grammar:
        """Of all tools; where that cannot be, or cannot be tested within the request's budget, of each as far as it
        can. Each tool's schema is tested alone, so that what came of it is known wherever the tool comes again."""
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
    """Tokens that are not shown elsewhere and that mark a thought or a call here."""
    texts = [] if formats.reasoning is None else [formats.reasoning.begin, formats.reasoning.end]
    if form is not None:
        texts += [form.begin, form.name_end, form.call_end, form.again or "", form.end]
    return frozenset(number for mark, number in formats.marks.items() if any(mark in text for text in texts))
