"""Derives from a chat template how its model writes reasoning and tool calls: renders conversations with known names
and finds the literals around them. Pure except for the rendering callback.

    text only           … TEXT tail                                    start and end of answers
    one call            … begin NAME name_end ARGUMENTS call_end end tail
    two calls           … call_end again NAME …                        no `again` if the template rejects or drops one

No format is found if a template does not show calls, numbers them, or has a notation of its own for arguments. Requests
with tools are then rejected unless the operator sets a format.
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
    RULES,
    ReasoningFormat,
    TaggedArguments,
    ToolFormat,
    common_start,
)

RenderText = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders (conversation, add_generation_prompt) to text. Raises QuireError if the template rejects it."""

USER = {"role": "user", "content": "probing"}
ANSWER = "Qsaid"
THOUGHT = "Qthought"
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_HALF_TAG = re.compile(r"(<[^<>]*|\[[A-Z_/]*)$")
NAMES = ("QnameA", "QnameB")
KEYS = ("Qkey", "Qcount")
VALUE, NUMBER = "Qvalue", 7319
IDS = ("Qcallid01", "Qcallid02")
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
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>", "</mm:think>"),
)
"""Reasoning markers to search for in templates that write such a marker but do not show past reasoning."""


def tool_format(render: RenderText, own_text: str, ends: Iterable[str]) -> ToolFormat | None:
    """Return the format of tool calls, or None if the template does not show it. `ends` are the texts of end tokens."""
    if (rule := next((form for named, form in RULES if named in own_text), None)) is HARMONY:
        return rule
    try:
        one, plain = render([USER, _calls(1)], False), render([USER, _text()], False)
    except QuireError:
        return None
    try:
        two = render([USER, _calls(2)], False)
    except QuireError:
        two = ""
    if NAMES[0] not in one:
        return rule
    return _Probe(one, two, plain, [*ends]).format()


def reasoning_format(render: RenderText, own_text: str) -> ReasoningFormat | None:
    """Return the markers around reasoning, or None for a model without reasoning."""
    if HARMONY_REASONING.begin in own_text or "<|channel|>analysis" in own_text:
        return HARMONY_REASONING
    for field in ("reasoning_content", "reasoning", "thinking"):
        try:
            shown = render([USER, {**_text(), field: THOUGHT}], False)
        except QuireError:
            continue
        found = re.search(r"(\S+)\s*" + THOUGHT + r"\s*(\S+?)\s*" + ANSWER, shown)
        if found and (pair := _tags(found[1], found[2])):
            return ReasoningFormat(*pair)
    return next((ReasoningFormat(*pair) for pair in THOUGHT_MARKS if pair[1] in own_text), None)


def _tags(before: str, after: str) -> tuple[str, str] | None:
    """The last tag before the reasoning and the first after it, if they are a pair."""
    opening, closing = _TAG.findall(before), _TAG.findall(after)
    return (opening[-1], closing[0]) if opening and closing and _word(opening[-1]) == _word(closing[0]) else None


def _word(tag: str) -> str:
    """The name in a tag, equal for its opening and closing tag."""
    return re.sub(r"[^a-z]|start|begin|end", "", tag.lower())


def _text() -> dict[str, Any]:
    return {"role": "assistant", "content": ANSWER}


def _calls(count: int) -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for call_id, name in zip(IDS[:count], NAMES, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class _Probe:
    """Finds the format of calls in one template's renderings."""

    def __init__(self, one: str, two: str, plain: str, ends: list[str]) -> None:
        self._one, self._two, self._plain = one, two, plain
        self._ends = ends

    def format(self) -> ToolFormat | None:
        """The literals around names and arguments, if they are the same for both calls."""
        name = self._one.rfind(NAMES[0])
        first = self._written(self._one[name + len(NAMES[0]) :])
        if self._one.count(NAMES[0]) > 1 or first is None:
            return None
        begin = _with_id(self._one[self._start(name) : name].lstrip())
        tail = self._without_end(first.rest)
        if self._two.count(NAMES[0]) != 1 or self._two.count(NAMES[1]) != 1:
            return ToolFormat(begin, first.name_end, tail, None, "", first.tagged)
        between, behind = self._two[self._two.rfind(NAMES[0]) + len(NAMES[0]) :].split(NAMES[1])
        there, second = self._written(between), self._written(behind)
        if there is None or second is None or second.name_end != first.name_end:
            return None  # calls are numbered
        call_end = _whole_tags(common_start(there.rest, tail))
        again, end = there.rest.removeprefix(call_end), tail.removeprefix(call_end)
        if not again.strip() or not begin.endswith(again.lstrip(", \n")):
            return None  # the second call starts differently
        return ToolFormat(begin, first.name_end, call_end, again, end, first.tagged)

    def _start(self, name: int) -> int:
        """The start of the answer: the prompt before it equals that of the rendering with text only."""
        answer_at = self._plain.rfind(ANSWER)
        return len(_whole_tags(common_start(self._one[:name], self._plain[:answer_at])))

    def _written(self, shown: str) -> "_Written | None":
        """Find the arguments in the text after a name: the text before and after them, and their tags, if any."""
        text = json.dumps(ARGUMENTS)
        for written in (text, text.replace(": ", ":").replace(", ", ",")):
            before, found, behind = shown.partition(written)
            if found:
                return _Written(_with_id(before), _with_id(behind))
        pattern = "(.*?)" + KEYS[0] + "(.*?)" + VALUE + "(.*?)" + KEYS[1] + "(.*?)" + str(NUMBER) + "(.*)"
        matched = re.fullmatch(pattern, shown, re.DOTALL)
        if matched is None:
            return None
        first, text_key, between, json_key, behind = matched.groups()
        before_key = _from_tag(common_start(first[::-1], between[::-1])[::-1])
        after_value = between.removesuffix(before_key)
        if "<" not in before_key or not after_value.strip() or not behind.startswith(after_value):
            return None
        tagged = TaggedArguments(before_key, text_key, json_key, after_value)
        return _Written(first.removesuffix(before_key), behind.removeprefix(after_value), tagged)

    def _without_end(self, tail: str) -> str:
        """Remove the end of the answer."""
        found = [tail.find(end) for end in self._ends if end and end in tail]
        if found:
            return tail[: min(found)]
        return tail.removesuffix(self._plain[self._plain.rfind(ANSWER) + len(ANSWER) :])


@dataclass(frozen=True, slots=True)
class _Written:
    name_end: str
    rest: str
    tagged: TaggedArguments | None = None


def _whole_tags(text: str) -> str:
    """Remove an incomplete tag at the end."""
    return _HALF_TAG.sub("", text)


def _from_tag(text: str) -> str:
    """Remove the rest of a tag at the start."""
    found = re.search(r"\s*<", text)
    return text[found.start() :] if found else text


def _with_id(text: str) -> str:
    for one in IDS:
        text = text.replace(one, CALL_ID)
    return text
