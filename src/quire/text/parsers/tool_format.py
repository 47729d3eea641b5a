"""How a model writes calls of tools, as data. Pure; imports nothing of quire.

    text  begin NAME name_end ARGUMENTS call_end  (again NAME name_end ARGUMENTS call_end)*  end

    Hermes    begin  <tool_call>\\n{"name": "       name_end  ", "arguments":        call_end  }\\n</tool_call>
              again  \\n<tool_call>\\n{"name": "    end       (nothing)
    Mistral   begin  [TOOL_CALLS]                   name_end  [CALL_ID](an id)[ARGS]    call_end  (nothing)

The arguments are one JSON object, or each stands between tags of its own:

    before_key KEY after_key VALUE after_value
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

CALL_ID = "\ue000"
"""Stands in a literal where a model writes an id of its own for the call. A private-use character."""
ID_CHARS = 9
"""Letters and digits of such an id."""
NAME_PATTERN = r"[a-zA-Z0-9_.:/-]{1,128}"
"""Names of tools, and no character that a format has behind a name."""
_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""A tag, a special token: whatever is not written by chance."""
_BEFORE_NAME, _BEHIND_NAME = re.compile(r'\{"(\w+)": "$'), re.compile(r'", "(\w+)": ')
SHARED_MARK = "<|channel|>"
"""A token that texts and thoughts have in front of them, too."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Each argument between tags: texts as they are, all else as JSON."""

    before_key: str
    after_text_key: str
    """Between a key and a value that is a text."""
    after_json_key: str
    """Between a key and any other value."""
    after_value: str


JSON_ONLY = TaggedArguments("", "", "", "")
"""Of a format whose arguments are one object."""


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """Of a call that is one JSON object: where its name and its arguments stand."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What stands around names and arguments."""

    begin: str
    name_end: str
    call_end: str
    again: str | None
    """None: an answer has one call."""
    end: str
    tagged: TaggedArguments | None = None
    """None: arguments are one JSON object."""
    marker: str = field(init=False)
    """What shows that a call begins, wherever it stands in an answer. Empty where calls have no mark: there an answer
    is a call if it begins like one."""
    object_keys: ObjectKeys | None = field(init=False)
    """Where a call is an object between marks: it is known without them, too."""

    def __post_init__(self) -> None:
        """The mark is the first tag of what begins a call, or the beginning of a tag that ends behind the name."""
        found = _MARKER.match(self.begin)
        marker = found[0] if found and found[0] != SHARED_MARK else self.begin if self.begin.startswith("<") else ""
        object.__setattr__(self, "marker", marker)
        object.__setattr__(self, "object_keys", self._object_keys() if marker else None)

    def _object_keys(self) -> ObjectKeys | None:
        before, behind = _BEFORE_NAME.search(self.begin), _BEHIND_NAME.fullmatch(self.name_end)
        if before is None or behind is None or self.tagged is not None or not self.call_end.startswith("}"):
            return None
        return ObjectKeys(before[1], behind[1])


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """What stands around a model's thoughts."""

    begin: str
    end: str
    text_begin: str = ""
    """What stands before a text that is no thought."""

    def is_open(self, prompt: str) -> bool:
        """A prompt ends inside the thought: the model goes on with it and writes no beginning."""
        return prompt.rstrip().endswith(self.begin)


TextKeys = Mapping[str, frozenset[str]]
"""By a tool's name, the arguments that are texts: where arguments stand between tags, these have no quotes."""


def common_start(one: str, other: str) -> str:
    """How both begin."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


# ruff: noqa: RUF001 - some models write their marks with letters that look like others
HERMES = ToolFormat(
    begin='<tool_call>\n{"name": "',
    name_end='", "arguments": ',
    call_end="}\n</tool_call>",
    again='\n<tool_call>\n{"name": "',
    end="",
)
DEEPSEEK = ToolFormat(
    begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    again="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    end="<｜tool▁calls▁end｜>",
)
HARMONY = ToolFormat(
    begin="<|channel|>commentary to=functions.",
    name_end=" <|constrain|>json<|message|>",
    call_end="",
    again=None,
    end="",
)
HARMONY_REASONING = ReasoningFormat(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
)
RULES = (("<|channel|>analysis", HARMONY), ("<｜tool▁calls▁begin｜>", DEEPSEEK), ("<tool_call>", HERMES))
"""Of templates that name a format in their text and do not show it in a conversation, or not as the model writes it."""
