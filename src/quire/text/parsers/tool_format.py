"""Formats of tool calls, as data. Pure; imports nothing else of quire.

    text  begin NAME name_end ARGUMENTS call_end  (call_separator NAME name_end ARGUMENTS call_end)*  end

    Hermes    begin           <tool_call>\\n{"name": "    name_end  ", "arguments":      call_end  }\\n</tool_call>
              call_separator  \\n<tool_call>\\n{"name": "  end       (nothing)
    Mistral   begin           [TOOL_CALLS]              name_end  [CALL_ID](an id)[ARGS]  call_end  (nothing)

The arguments are one JSON object, or each argument has its own tags:

    before_key KEY after_key VALUE after_value
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

CALL_ID = "\ue000"
"""Placeholder in a literal for the call id that the model writes. A private-use character."""
ID_CHARS = 9
"""Number of letters and digits of a call id that the model writes."""
NAME_PATTERN = r"[a-zA-Z0-9_.:/-]{1,128}"
"""Valid tool names. No format has one of these characters directly after a name."""
_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""A tag or special token, which does not occur in ordinary text by chance."""
_BEFORE_NAME, _AFTER_NAME = re.compile(r'\{"(\w+)": "$'), re.compile(r'", "(\w+)": ')
SHARED_MARKER = "<|channel|>"
"""A token that also starts text and reasoning, so it does not identify a call."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments with tags around each: strings as plain text, other values as JSON."""

    before_key: str
    after_text_key: str
    """Literal between a key and a string value."""
    after_json_key: str
    """Literal between a key and any other value."""
    after_value: str


JSON_ONLY = TaggedArguments("", "", "", "")
"""For formats whose arguments are one JSON object."""


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """Keys of the name and the arguments in a call that is one JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The literals around names and arguments."""

    begin: str
    name_end: str
    call_end: str
    call_separator: str | None
    """Literal between two calls. None: an answer has at most one call."""
    end: str
    tagged: TaggedArguments | None = None
    """Tags of the arguments. None: arguments are one JSON object."""

    @property
    def marker(self) -> str:
        """The text that identifies a call anywhere in an answer: the first tag of `begin`, or all of `begin` if this is
        the start of a tag that includes the name. Empty if there is none: then only an answer that starts with `begin`
        is a call."""
        tag = _MARKER.match(self.begin)
        return tag[0] if tag and tag[0] != SHARED_MARKER else self.begin if self.begin.startswith("<") else ""

    @property
    def object_keys(self) -> ObjectKeys | None:
        """Keys of a call that is a JSON object between markers, to recognize it without the markers; else None."""
        before, after = _BEFORE_NAME.search(self.begin), _AFTER_NAME.fullmatch(self.name_end)
        is_object = self.marker and self.tagged is None and self.call_end.startswith("}")
        return ObjectKeys(before[1], after[1]) if is_object and before and after else None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning."""

    begin: str
    end: str
    text_begin: str = ""
    """Marker before the text of an answer."""

    def is_open(self, prompt: str) -> bool:
        """Return whether a prompt ends inside the reasoning, so that the model writes no start marker."""
        return prompt.rstrip().endswith(self.begin)


TextKeys = Mapping[str, frozenset[str]]
"""Names of arguments that may be strings, by tool name. Tagged formats write strings without quotes."""


def common_start(text: str, base: str) -> str:
    """Return the longest common prefix."""
    pairs = enumerate(zip(text, base, strict=False))
    return text[: next((index for index, (a, b) in pairs if a != b), min(len(text), len(base)))]


# ruff: noqa: RUF001 - some models' markers have characters that look like ASCII
HERMES = ToolFormat(
    begin='<tool_call>\n{"name": "',
    name_end='", "arguments": ',
    call_end="}\n</tool_call>",
    call_separator='\n<tool_call>\n{"name": "',
    end="",
)
DEEPSEEK = ToolFormat(
    begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    call_separator="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    end="<｜tool▁calls▁end｜>",
)
HARMONY = ToolFormat(
    begin="<|channel|>commentary to=functions.",
    name_end=" <|constrain|>json<|message|>",
    call_end="",
    call_separator=None,
    end="",
)
HARMONY_REASONING = ReasoningFormat(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
)
MARKED_FORMATS = (("<|channel|>analysis", HARMONY), ("<｜tool▁calls▁begin｜>", DEEPSEEK), ("<tool_call>", HERMES))
"""(text, format): formats of templates that contain this text, but whose renderings do not show the format."""
