"""Convert messages and tools to a prompt, the grammar of the answer, and the format for parsing the answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from msgspec import structs

from quire.client.request.params import SamplingParams
from quire.client.request.text_model import Messages, TemplateArguments, TextModel
from quire.errors import InvalidParameterError, InvariantError, TemplateError, WorkBudgetError
from quire.text.chat.answer_formats import ModelFormats
from quire.text.chat.canonical import canonical
from quire.text.chat.prompt_parts import (
    NumberedMessages as NumberedMessages,  # noqa: PLC0414 - re-exported for the API
)
from quire.text.chat.prompt_parts import PromptPart, PromptParts, message_parts, num_system
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
from quire.text.chat.written_calls import NumberedMessage, forms, has_calls
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
from quire.text.sandboxed.messages import Rendered

BUDGET_PARAMETER = "thinking_token_budget"
MAX_BUDGET = 1 << 20
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """A limit of reasoning tokens."""

    max_tokens: int
    is_required: bool = True
    """Whether a request is rejected if its model or its grammar does not support budgets."""

    @classmethod
    def of(cls, requested: int | None, effort: object, limits: Mapping[str, int]) -> "ThoughtBudget | None":
        """Return the budget that a client requested, else the operator's limit for its effort, if any."""
        if requested is not None:
            return cls(requested)
        limit = limits.get(effort) if isinstance(effort, str) else None
        return None if limit is None else cls(limit, is_required=False)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids, with the format of its answer and a grammar that constrains it."""

    ids: list[int]
    answer_format: AnswerFormat
    """The syntax of reasoning and tool calls in the answer."""
    parts: PromptParts
    """The token ranges of messages and tools."""
    grammar: Grammar | None = None

    def apply_to(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters with this prompt's grammar and answer format."""
        return replace(params, grammar=self.grammar, answer_format=self.answer_format)


def chat_prompt(
    model: TextModel, messages: Messages, use: ToolUse = NO_TOOLS, arguments: TemplateArguments | None = None
) -> ChatPrompt:
    """Render and tokenize a conversation with its tools, without a grammar."""
    formats, tools = model.formats(), use.callable
    tool_format = _require_tool_format(model, formats) if tools else None
    parts, may_be_broken = message_parts(messages), has_calls(messages)
    if tools and formats.tools is not None:
        arguments = structs.replace(arguments or TemplateArguments(), tools=[tool.declaration for tool in use.tools])
    elif tools:
        # Tools and system text are merged into one message, so its tokens cannot be attributed to either.
        num_leading = num_system(messages)
        messages = with_written_tools(messages, use.tools)
        parts = [*[None] * num_system(messages), *parts[num_leading:]]
    candidates = forms(messages) if may_be_broken else iter([[*enumerate(messages)]])
    rendered, numbered_messages = _rendered(model, candidates, parts, arguments)
    answer_format = AnswerFormat(
        reasoning=formats.reasoning,
        is_thinking=formats.reasoning is not None and formats.reasoning.is_open(rendered.text),
        tools=tool_format,
        text_keys={tool.name: text_keys(tool.schema) for tool in tools},
        shown_token_ids=_delimiter_ids(formats, tool_format),
    )
    ids, spans = model.encoded_parts(rendered, numbered_messages, [tool.name for tool in use.tools])
    return ChatPrompt(ids, answer_format, spans)


def _rendered(
    model: TextModel,
    candidates: Iterator[list[NumberedMessage]],
    parts: Sequence[PromptPart | None],
    arguments: TemplateArguments | None,
) -> tuple[Rendered, NumberedMessages]:
    """Render a conversation in the first form that the template accepts; return it with the messages of that form."""
    rejection: TemplateError | None = None
    for form in candidates:
        canonical_messages = canonical([message for _, message in form], model.formats().support)
        try:
            rendered = model.rendered(canonical_messages, arguments)
        except TemplateError as error:
            if error.code != TemplateError.code:
                raise
            rejection = rejection or error
            continue
        form_parts = [parts[index] for index, _ in form]
        return rendered, NumberedMessages(canonical_messages, form_parts[len(form) - len(canonical_messages) :])
    raise rejection or InvariantError("a conversation has no form")


def summary_prompt(
    model: TextModel, messages: Messages, request: str, use: ToolUse, arguments: TemplateArguments
) -> ChatPrompt:
    """Build the prompt for a summary of a conversation: the same tokens as its next answer would have, then a request.
    So it is found in the cache, although the answer is text without calls."""
    parts = message_parts(messages)
    extended = [dict(message) for message in messages]
    if extended and extended[-1].get("role") == "user":
        extended[-1]["content"] = f"{extended[-1]['content']}\n\n{request}"
    else:
        extended.append({"role": "user", "content": request})
    numbered = NumberedMessages(extended, [*parts, *[None] * (len(extended) - len(parts))])
    prompt = chat_prompt(model, numbered, use, arguments)
    return replace(prompt, answer_format=replace(prompt.answer_format, tools=None))


def converse(
    model: TextModel,
    messages: Messages,
    use: ToolUse = NO_TOOLS,
    grammar: Grammar | None = None,
    thought_budget: ThoughtBudget | None = None,
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
    reasoning, is_thinking = formats.reasoning, prompt.answer_format.is_thinking
    budget = None if thought_budget is None else _budget(thought_budget, formats, grammar)
    rules = AnswerRules(schema=schema, reasoning=reasoning, is_thinking=is_thinking, max_thought_tokens=budget)
    if prompt.answer_format.tools is not None:
        return replace(prompt, grammar=_ToolGrammar(model, formats, prompt.answer_format.tools, use, rules).grammar())
    if reasoning is None or (grammar is None and budget is None):
        return replace(prompt, grammar=grammar)
    if grammar is not None and schema is None:
        return replace(prompt, grammar=grammar)
    return replace(prompt, grammar=_grammar(rules, formats, BUDGET_PARAMETER if grammar is None else "response_format"))


def _budget(budget: ThoughtBudget, formats: ModelFormats, grammar: Grammar | None) -> int | None:
    """Return the limit of reasoning tokens; None for a model without reasoning, and where an optional budget is not
    supported."""
    if formats.reasoning is None:
        return None
    problem = _budget_problem(budget.max_tokens, formats.reasoning.end, formats.marks, grammar)
    if problem is None:
        return budget.max_tokens
    if budget.is_required:
        raise problem
    return None


def _budget_problem(
    max_tokens: int, reasoning_end: str, marks: Mapping[str, int], grammar: Grammar | None
) -> InvalidParameterError | None:
    """Return the reason why a budget is not possible, if any."""
    if not 1 <= max_tokens <= MAX_BUDGET:
        message = f"expected a thinking budget of 1 to {MAX_BUDGET} tokens, got {max_tokens}"
        return InvalidParameterError(message, BUDGET_PARAMETER, code="budget_out_of_range")
    if not any(reasoning_end.startswith(mark) for mark in marks):
        expected = "expected a model that ends reasoning with a special token for a thinking budget"
        message = f"{expected}, got one that ends it with the text {reasoning_end!r}; leave the budget out"
        return InvalidParameterError(message, BUDGET_PARAMETER, code="budget_not_supported")
    if grammar is not None and grammar.schema is None:
        message = f"expected a thinking budget or {grammar.parameter}, got both; leave one out"
        return InvalidParameterError(message, BUDGET_PARAMETER, code="budget_beside_grammar")
    return None


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
    """Return a conversation's token ids and sampling parameters. `arguments`: the fields of `ConversationArguments`."""
    params, fields = params or SamplingParams(), ConversationArguments.of(arguments)
    mode, tool_name = tool_mode(fields.tool_choice)
    use = ToolUse(tools_of(fields.tools or ()), mode, tool_name, fields.parallel_tool_calls)
    conversation = converse(model, messages, use, params.grammar, arguments=structs.replace(fields, tools=None))
    return conversation.ids, conversation.apply_to(params)


class GrammarCheck(Enum):
    """The result of checking a grammar."""

    VALID = "valid"
    INVALID = "invalid"
    UNKNOWN = "unknown"
    """The request's CPU time budget was exhausted before the check finished."""


class _ToolGrammar:
    """Builds the grammar of a request's tools; a schema that cannot be compiled is relaxed to any JSON object."""

    def __init__(
        self, model: TextModel, formats: ModelFormats, tool_format: ToolFormat, use: ToolUse, rules: AnswerRules
    ) -> None:
        self._model, self._formats, self._tool_format, self._use, self._rules = model, formats, tool_format, use, rules

    def grammar(self) -> Grammar:
        """Return a grammar with the schemas of all tools. If it is invalid, or its check exceeds the request's budget,
        each schema is checked alone, so that results are cached by tool, and invalid schemas are relaxed."""
        tools = [(tool, CallableTool(tool.name, _schema(tool), tool.is_strict)) for tool in self._use.callable]
        complete = self._build([one for _, one in tools])
        if self._check(complete) is GrammarCheck.VALID:
            return complete
        relaxed = self._build(
            [one if self._is_valid_tool(tool, one) else CallableTool(tool.name, ANY_OBJECT) for tool, one in tools]
        )
        if self._check(relaxed) is not GrammarCheck.INVALID:
            return relaxed
        return self._build([CallableTool(tool.name, ANY_OBJECT) for tool, _ in tools])

    def _build(self, tools: Sequence[CallableTool]) -> Grammar:
        use = self._use
        must_call = use.mode is ToolMode.REQUIRED or use.only is not None
        calls = ToolRules(self._tool_format, tools, must_call, use.is_parallel and use.only is None)
        return _grammar(replace(self._rules, calls=calls), self._formats, "tools")

    def _is_valid_tool(self, tool: Tool, callable_tool: CallableTool) -> bool:
        if self._check(Grammar.lark(schema_grammar(callable_tool), "tools")) is GrammarCheck.VALID:
            return True
        if tool.is_strict:
            reason = "its schema cannot be compiled, or not within a request's time limit"
            message = f"tool {tool.name} is strict, but {reason}; leave strict out, or simplify the schema"
            raise InvalidParameterError(message, "tools", code="strict_schema_unsupported")
        return False

    def _check(self, grammar: Grammar) -> GrammarCheck:
        try:
            self._model.validate_grammar(grammar)
        except WorkBudgetError as error:
            if error.retry_after_s:
                raise
            return GrammarCheck.UNKNOWN
        except InvalidParameterError:
            return GrammarCheck.INVALID
        return GrammarCheck.VALID


def _schema(tool: Tool) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = bounded_schema(tool.schema, "tools")
    return schema


def _grammar(rules: AnswerRules, formats: ModelFormats, parameter: str) -> Grammar:
    return Grammar.lark(answer_grammar(rules, formats.marks), parameter)


def _require_tool_format(model: TextModel, formats: ModelFormats) -> ToolFormat:
    if formats.tools is None and model.writes_tools:
        return HERMES
    if formats.tools is None:
        raise InvalidParameterError(
            f"expected a model whose chat template has tool calls, got {model.name} without them; leave tools"
            " out, use another model, or start the server with --tool-format hermes",
            "tools",
        )
    return formats.tools


def _delimiter_ids(formats: ModelFormats, fmt: ToolFormat | None) -> frozenset[int]:
    """Return the ids of special tokens that delimit reasoning or tool calls; the parser needs them in the text."""
    texts = [] if formats.reasoning is None else [formats.reasoning.begin, formats.reasoning.end]
    if fmt is not None:
        texts += [fmt.begin, fmt.name_end, fmt.call_end, fmt.call_separator or "", fmt.end]
    return frozenset(number for mark, number in formats.marks.items() if any(mark in text for text in texts))
