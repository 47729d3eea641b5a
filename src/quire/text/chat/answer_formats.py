"""How a model writes reasoning and tool calls, found by test renderings of its chat template on first use."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import QuireError
from quire.text.chat.canonical import ANY_SPELLING, Spelling
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
    """Added tokens with visible text: ids by text. No literal text in a grammar matches these tokens."""
    spelling: Spelling = ANY_SPELLING


NO_FORMATS = ModelFormats(None, None, {})


class FormatFinder:
    """Finds the formats of one model. Thread-safe."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, end_token_ids: frozenset[int]) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._lock = threading.Lock()
        self._found: ModelFormats | None = None

    def find(self) -> ModelFormats:
        """Return the model's formats. The first call renders test conversations; later calls return its result."""
        with self._lock:
            if self._found is None:
                self._found = self._look()
            return self._found

    def _look(self) -> ModelFormats:
        added = self._tokenizer.library.get_added_tokens_decoder()
        marks = {one.content: number for number, one in added.items() if one.content.strip()}
        ends = [one.content for number, one in added.items() if number in self._end_token_ids]
        own_text = self._template.own_text
        tools = probe.tool_format(self._rendered, own_text, ends)
        written = "" if tools is None else tools.begin + tools.name_end + tools.call_end
        return ModelFormats(
            reasoning=probe.reasoning_format(self._rendered, own_text),
            tools=tools,
            marks=marks,
            spelling=Spelling(
                knows_developer="developer" in own_text,
                shows_late_system=self._shows_late_system(),
                wants_short_ids=CALL_ID in written,
            ),
        )

    def _shows_late_system(self) -> bool:
        messages = [probe.USER, {"role": "system", "content": probe.ANSWER}, probe.USER]
        try:
            return probe.ANSWER in self._template.render(messages).text
        except QuireError:
            return False

    def _rendered(self, messages: Sequence[dict[str, Any]], begins: bool) -> str:
        tools = [probe.PROBE_TOOL]
        return self._template.render(messages, TemplateArguments(tools=tools, add_generation_prompt=begins)).text
