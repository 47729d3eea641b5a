"""Finds how a model writes reasoning and tool calls, by test renderings of its chat template on first use."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import QuireError
from quire.text.chat.canonical import DEFAULT_SUPPORT, TemplateSupport
from quire.text.chat.rendering.template import ChatTemplate, TemplateArguments
from quire.text.parsers import probe
from quire.text.parsers.tool_format import CALL_ID, ReasoningFormat, ToolFormat
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Output formats of one model."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    """None: the template does not support tools, or its format of calls was not recognized."""
    marks: dict[str, int]
    """Ids of added tokens with visible text, by their text. No literal text in a grammar matches these tokens."""
    support: TemplateSupport = DEFAULT_SUPPORT


NO_FORMATS = ModelFormats(None, None, {})


class FormatFinder:
    """Finds the formats of one model. Thread-safe."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, end_token_ids: frozenset[int]) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._lock = threading.Lock()
        self._formats: ModelFormats | None = None

    def find(self) -> ModelFormats:
        """Return the model's formats. The first call renders test conversations; later calls return its result."""
        with self._lock:
            if self._formats is None:
                self._formats = self._find_formats()
            return self._formats

    def _find_formats(self) -> ModelFormats:
        added = self._tokenizer.library.get_added_tokens_decoder()
        marks = {token.content: token_id for token_id, token in added.items() if token.content.strip()}
        ends = [token.content for token_id, token in added.items() if token_id in self._end_token_ids]
        template_text = self._template.text
        tools = probe.tool_format(self._render, template_text, ends)
        call_text = "" if tools is None else tools.begin + tools.name_end + tools.call_end
        return ModelFormats(
            reasoning=probe.reasoning_format(self._render, template_text),
            tools=tools,
            marks=marks,
            support=TemplateSupport(
                has_developer="developer" in template_text,
                has_late_system=self._has_late_system(),
                needs_short_ids=CALL_ID in call_text,
            ),
        )

    def _has_late_system(self) -> bool:
        messages = [probe.USER, {"role": "system", "content": probe.ANSWER}, probe.USER]
        try:
            return probe.ANSWER in self._template.render(messages).text
        except QuireError:
            return False

    def _render(self, messages: Sequence[dict[str, Any]], add_prompt: bool) -> str:
        tools = [probe.PROBE_TOOL]
        return self._template.render(messages, TemplateArguments(tools=tools, add_generation_prompt=add_prompt)).text
