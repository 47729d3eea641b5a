"""Derives from a chat template how its model writes reasoning and tool calls: renders conversations with
sentinels (unique strings such as QnameA) and finds the literals around them. Pure except for the rendering callback.

    text only           … TEXT tail                                    start and end of answers
    one call            … begin NAME name_end ARGUMENTS call_end end tail
    two calls           … call_end call_separator NAME …               no separator if the template rejects two calls

No format is found if a template does not show calls, numbers calls, or writes arguments neither as JSON nor as tagged
keys and values. Requests with tools are then rejected unless the operator sets a format.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import QuireError
from quire.text.parsers.tool_format import (
    CALL_ID,
    HARMONY,
    HARMONY_REASONING,
    MARKED_FORMATS,
    ReasoningFormat,
    TaggedArguments,
    ToolFormat,
    common_start,
)

RenderText = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders (conversation, add_generation_prompt) to text. Raises QuireError if the template rejects it."""

USER = {"role": "user", "content": "probing"}
ANSWER = "Qanswer"
THOUGHT = "Qthought"
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_HALF_TAG = re.compile(r"(<[^<>]*|\[[A-Z_/]*)$")
NAMES = ("QnameA", "QnameB")
KEYS = ("Qkey", "Qcount")
VALUE, NUMBER = "Qvalue", 7319
CALL_IDS = ("Qcallid01", "Qcallid02")
ARGUMENTS = {KEYS[0]: VALUE, KEYS[1]: NUMBER}
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A word."}},
            "required": ["word"],
        },
    },
}
REASONING_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>", "</mm:think>"),
)
"""Reasoning markers to search for in templates that write such a marker but do not show past reasoning."""


def tool_format(render: RenderText, template_text: str, ends: Iterable[str]) -> ToolFormat | None:
    """Return the format of tool calls, or None if the template does not show it. `ends` are the texts of end tokens."""
    if (known_format := next((fmt for marker, fmt in MARKED_FORMATS if marker in template_text), None)) is HARMONY:
        return known_format
    try:
        one_call, text_only = render([USER, _call_message(1)], False), render([USER, _text_message()], False)
    except QuireError:
        return None
    try:
        two_calls = render([USER, _call_message(2)], False)
    except QuireError:
        two_calls = ""
    if NAMES[0] not in one_call:
        return known_format
    return _Probe(one_call, two_calls, text_only, [*ends]).format()


def reasoning_format(render: RenderText, template_text: str) -> ReasoningFormat | None:
    """Return the markers around reasoning, or None for a model without reasoning."""
    if HARMONY_REASONING.begin in template_text or "<|channel|>analysis" in template_text:
        return HARMONY_REASONING
    for field in ("reasoning_content", "reasoning", "thinking"):
        try:
            rendered = render([USER, {**_text_message(), field: THOUGHT}], False)
        except QuireError:
            continue
        match = re.search(r"(\S+)\s*" + THOUGHT + r"\s*(\S+?)\s*" + ANSWER, rendered)
        if match and (pair := _tag_pair(match[1], match[2])):
            return ReasoningFormat(*pair)
    return next((ReasoningFormat(*pair) for pair in REASONING_MARKERS if pair[1] in template_text), None)


def _tag_pair(before: str, after: str) -> tuple[str, str] | None:
    """Return the last tag before the reasoning and the first tag after it, if they are a pair."""
    opening, closing = _TAG.findall(before), _TAG.findall(after)
    return (opening[-1], closing[0]) if opening and closing and _name_in(opening[-1]) == _name_in(closing[0]) else None


def _name_in(tag: str) -> str:
    """Return the name in a tag, which is equal for the opening and closing tag of a pair."""
    return re.sub(r"[^a-z]|start|begin|end", "", tag.lower())


def _text_message() -> dict[str, Any]:
    return {"role": "assistant", "content": ANSWER}


def _call_message(count: int) -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for call_id, name in zip(CALL_IDS[:count], NAMES, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class _Probe:
    """Derives the format of calls from three renderings of one template."""

    def __init__(self, one_call: str, two_calls: str, text_only: str, ends: list[str]) -> None:
        self._one_call, self._two_calls, self._text_only = one_call, two_calls, text_only
        self._ends = ends

    def format(self) -> ToolFormat | None:
        """Return the literals around names and arguments, if both calls have the same literals."""
        name_start = self._one_call.rfind(NAMES[0])
        first = self._find_arguments(self._one_call[name_start + len(NAMES[0]) :])
        if self._one_call.count(NAMES[0]) > 1 or first is None:
            return None
        begin = _with_id_placeholder(self._one_call[self._answer_start(name_start) : name_start].lstrip())
        closing = self._without_tail(first.rest)  # call_end and end
        if self._two_calls.count(NAMES[0]) != 1 or self._two_calls.count(NAMES[1]) != 1:
            return ToolFormat(begin, first.name_end, closing, None, "", first.tagged)
        between, after = self._two_calls[self._two_calls.rfind(NAMES[0]) + len(NAMES[0]) :].split(NAMES[1])
        first_of_two, second = self._find_arguments(between), self._find_arguments(after)
        if first_of_two is None or second is None or second.name_end != first.name_end:
            return None  # calls are numbered
        call_end = _whole_tags(common_start(first_of_two.rest, closing))
        separator, end = first_of_two.rest.removeprefix(call_end), closing.removeprefix(call_end)
        if not separator.strip() or not begin.endswith(separator.lstrip(", \n")):
            return None  # the second call starts differently
        return ToolFormat(begin, first.name_end, call_end, separator, end, first.tagged)

    def _answer_start(self, name_start: int) -> int:
        """Return where the answer starts: where this rendering begins to differ from the one with text only."""
        answer_start = self._text_only.rfind(ANSWER)
        return len(_whole_tags(common_start(self._one_call[:name_start], self._text_only[:answer_start])))

    def _find_arguments(self, text_after_name: str) -> "_CallText | None":
        """Find the arguments in the text after a name. Returns the text around them, and their tags, if any."""
        text = json.dumps(ARGUMENTS)
        for arguments in (text, text.replace(": ", ":").replace(", ", ",")):
            before, match, after = text_after_name.partition(arguments)
            if match:
                return _CallText(_with_id_placeholder(before), _with_id_placeholder(after))
        pattern = "(.*?)" + KEYS[0] + "(.*?)" + VALUE + "(.*?)" + KEYS[1] + "(.*?)" + str(NUMBER) + "(.*)"
        fields = re.fullmatch(pattern, text_after_name, re.DOTALL)
        if fields is None:
            return None
        first, after_text_key, between, after_json_key, rest = fields.groups()
        before_key = _from_tag(common_start(first[::-1], between[::-1])[::-1])
        after_value = between.removesuffix(before_key)
        if "<" not in before_key or not after_value.strip() or not rest.startswith(after_value):
            return None
        tagged = TaggedArguments(before_key, after_text_key, after_json_key, after_value)
        return _CallText(first.removesuffix(before_key), rest.removeprefix(after_value), tagged)

    def _without_tail(self, text: str) -> str:
        """Remove the end of the answer."""
        positions = [text.find(end) for end in self._ends if end and end in text]
        if positions:
            return text[: min(positions)]
        return text.removesuffix(self._text_only[self._text_only.rfind(ANSWER) + len(ANSWER) :])


@dataclass(frozen=True, slots=True)
class _CallText:
    name_end: str
    rest: str
    tagged: TaggedArguments | None = None


def _whole_tags(text: str) -> str:
    """Remove an incomplete tag at the end."""
    return _HALF_TAG.sub("", text)


def _from_tag(text: str) -> str:
    """Remove the text before the first tag and the blanks before it."""
    match = re.search(r"\s*<", text)
    return text[match.start() :] if match else text


def _with_id_placeholder(text: str) -> str:
    for call_id in CALL_IDS:
        text = text.replace(call_id, CALL_ID)
    return text
