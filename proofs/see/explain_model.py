"""What an explanation must say, worked out a second time: prompts written and cut here, and a cache of plain tuples.

Nothing of the server's own way is used but the tokenizer's library: the template is written out in Python, blocks are
slices of lists, and a part is wherever its text was put.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.models.small_tokenizers import byte_level

BLOCK_SIZE = 4
NEWEST_COMPARED = 16
Part = dict[str, Any] | None
Tokens = tuple[int, ...]
TEMPLATE_PART = {"kind": "text", "index": 0, "name": "template"}


@dataclass(frozen=True)
class Conversation:
    """What is asked, in no API's words."""

    system: str
    tools: tuple[tuple[str, str], ...]
    """Names and descriptions."""
    turns: tuple[tuple[str, str], ...]
    """Roles and texts."""


def chat_body(asked: Conversation) -> dict[str, Any]:
    tools = [{"type": "function", "function": function_of(*tool)} for tool in asked.tools]
    messages = [{"role": "system", "content": asked.system}]
    messages += [{"role": role, "content": text} for role, text in asked.turns]
    return {"messages": messages, "tools": tools, "max_tokens": 1}


def responses_body(asked: Conversation) -> dict[str, Any]:
    items = [{"role": role, "content": text} for role, text in asked.turns]
    tools = [{"type": "function", **function_of(*tool)} for tool in asked.tools]
    return {"instructions": asked.system, "input": items, "tools": tools, "max_output_tokens": 1}


def messages_body(asked: Conversation) -> dict[str, Any]:
    turns = [{"role": role, "content": text} for role, text in asked.turns]
    tools = [{"name": name, "description": said, "input_schema": SCHEMA} for name, said in asked.tools]
    return {"system": asked.system, "messages": turns, "tools": tools, "max_tokens": 1}


SCHEMA = {"type": "object", "properties": {"of": {"type": "string"}}}
BODIES = (
    ("/v1/chat/completions", chat_body, 1),
    ("/v1/responses", responses_body, 0),
    ("/v1/messages", messages_body, 0),
)
"""A path, how its body is made, and the number of a conversation's first turn there."""


def function_of(name: str, said: str) -> dict[str, Any]:
    return {"name": name, "description": said, "parameters": SCHEMA}


@dataclass
class Written:
    """A prompt as text, and where in it which part stands."""

    text: str = ""
    spans: list[tuple[int, int, Part]] = field(default_factory=list)

    def add(self, text: str, part: Part = None) -> None:
        if part is not None:
            self.spans.append((len(self.text), len(self.text) + len(text), part))
        self.text += text

    def part_at(self, position: int) -> Part:
        """Whose the token is that stands there; what follows a part directly ends it."""
        offsets = byte_level().library.encode(self.text, add_special_tokens=False).offsets
        for place in (position, position - 1):
            start, stop = offsets[place] if place >= 0 else (0, 0)
            owner = next((part for first, after, part in self.spans if first < stop and start < after), None)
            if owner is not None:
                return owner
        return TEMPLATE_PART


def written(asked: Conversation, first_turn: int) -> Written:
    """As the agents' template of the tests writes it."""
    told = Written()
    for at, (name, said) in enumerate(asked.tools):
        shown = {"type": "function", "function": function_of(name, said)}
        told.add("<tool>")
        told.add(json.dumps(shown, ensure_ascii=False), {"kind": "tool", "index": at, "name": name})
        told.add("</tool>")
    told.add("<system>")
    told.add(asked.system, {"kind": "system", "index": 0, "name": None})
    told.add("</end>")
    for at, (role, text) in enumerate(asked.turns):
        told.add(f"<{role}>")
        told.add(text, {"kind": "message", "index": first_turn + at, "name": role})
        told.add("</end>")
    told.add("<assistant>")
    return told


def tokens_of(text: str) -> Tokens:
    return tuple(byte_level().library.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Expected:
    """What must be said of a prompt."""

    reason: str
    num_cached: int
    position: int | None = None
    token_id: int | None = None
    cached_token_id: int | None = None


class CacheModel:
    """One tenant's cache that forgets nothing: which whole blocks were computed behind which tokens, oldest first."""

    def __init__(self) -> None:
        self.behind: dict[Tokens, list[Tokens]] = {}

    def computed(self, tokens: Tokens) -> None:
        """A prompt was run, and its answer is one token, which nobody computed on."""
        for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            known = self.behind.setdefault(tokens[:start], [])
            block = tokens[start : start + BLOCK_SIZE]
            if block not in known:
                known.append(block)

    def expected(self, tokens: Tokens) -> Expected:
        """Of this prompt, now."""
        limit = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        num_cached = 0
        while num_cached < limit and self._next(tokens, num_cached) in self.behind.get(tokens[:num_cached], ()):
            num_cached += BLOCK_SIZE
        if num_cached >= limit:
            return Expected("too_short", num_cached)
        wanted = self._next(tokens, num_cached)
        newest = list(reversed(self.behind.get(tokens[:num_cached], [])))[:NEWEST_COMPARED]
        shared = max((_num_equal(one, wanted) for one in newest), default=0)
        if not shared:
            return Expected("first_seen", num_cached)
        closest = next(one for one in newest if _num_equal(one, wanted) == shared)
        at = num_cached + shared
        return Expected("diverged", num_cached, at, tokens[at], closest[shared])

    @staticmethod
    def _next(tokens: Tokens, start: int) -> Tokens:
        return tokens[start : start + BLOCK_SIZE]


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def lost(num_prompt: int, num_cached: int) -> int:
    """What was computed and might have been found."""
    return (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE - num_cached
