"""A reference model of explanations: renders prompts, and explains them with a cache of plain tuples.

It shares nothing with the server but the tokenizer library: the template is written in Python, blocks are slices of
tuples, and the part of a position (a tool, the system prompt, a message) is known from where its text was put.
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
    """A conversation, apart from any API."""

    system: str
    tools: tuple[tuple[str, str], ...]
    """Names and descriptions."""
    turns: tuple[tuple[str, str], ...]
    """Roles and texts."""


def chat_body(conversation: Conversation) -> dict[str, Any]:
    tools = [{"type": "function", "function": function_schema(*tool)} for tool in conversation.tools]
    messages = [{"role": "system", "content": conversation.system}]
    messages += [{"role": role, "content": text} for role, text in conversation.turns]
    return {"messages": messages, "tools": tools, "max_tokens": 1}


def responses_body(conversation: Conversation) -> dict[str, Any]:
    items = [{"role": role, "content": text} for role, text in conversation.turns]
    tools = [{"type": "function", **function_schema(*tool)} for tool in conversation.tools]
    return {"instructions": conversation.system, "input": items, "tools": tools, "max_output_tokens": 1}


def messages_body(conversation: Conversation) -> dict[str, Any]:
    turns = [{"role": role, "content": text} for role, text in conversation.turns]
    tools = [{"name": name, "description": text, "input_schema": SCHEMA} for name, text in conversation.tools]
    return {"system": conversation.system, "messages": turns, "tools": tools, "max_tokens": 1}


SCHEMA = {"type": "object", "properties": {"of": {"type": "string"}}}
BODIES = (
    ("/v1/chat/completions", chat_body, 1),
    ("/v1/responses", responses_body, 0),
    ("/v1/messages", messages_body, 0),
)
"""A path, the function that makes its body, and the index of a conversation's first turn in this body."""


def function_schema(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "description": description, "parameters": SCHEMA}


@dataclass
class Prompt:
    """A prompt as text, and the span of each part in it."""

    text: str = ""
    spans: list[tuple[int, int, Part]] = field(default_factory=list)

    def add(self, text: str, part: Part = None) -> None:
        if part is not None:
            self.spans.append((len(self.text), len(self.text) + len(text), part))
        self.text += text

    def part_at(self, position: int) -> Part:
        """The part of the token at this position; a token directly after a part belongs to this part."""
        offsets = byte_level().library.encode(self.text, add_special_tokens=False).offsets
        for index in (position, position - 1):
            start, stop = offsets[index] if index >= 0 else (0, 0)
            owner = next((part for first, end, part in self.spans if first < stop and start < end), None)
            if owner is not None:
                return owner
        return TEMPLATE_PART


def render(conversation: Conversation, first_turn: int) -> Prompt:
    """Render a conversation as `AGENT_TEMPLATE` of the tests does."""
    prompt = Prompt()
    for index, (name, description) in enumerate(conversation.tools):
        tool = {"type": "function", "function": function_schema(name, description)}
        prompt.add("<tool>")
        prompt.add(json.dumps(tool, ensure_ascii=False), {"kind": "tool", "index": index, "name": name})
        prompt.add("</tool>")
    prompt.add("<system>")
    prompt.add(conversation.system, {"kind": "system", "index": 0, "name": None})
    prompt.add("</end>")
    for index, (role, text) in enumerate(conversation.turns):
        prompt.add(f"<{role}>")
        prompt.add(text, {"kind": "message", "index": first_turn + index, "name": role})
        prompt.add("</end>")
    prompt.add("<assistant>")
    return prompt


def tokens_of(text: str) -> Tokens:
    return tuple(byte_level().library.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Expected:
    """The expected explanation of a prompt."""

    reason: str
    num_cached: int
    position: int | None = None
    token_id: int | None = None
    cached_token_id: int | None = None


class CacheModel:
    """One tenant's cache, which forgets nothing: tokens -> the whole blocks that were computed after them, by age."""

    def __init__(self) -> None:
        self.blocks_after: dict[Tokens, list[Tokens]] = {}

    def store(self, tokens: Tokens) -> None:
        """Store a prompt that was run; its answer of one token is not in the cache."""
        for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            blocks = self.blocks_after.setdefault(tokens[:start], [])
            block = tokens[start : start + BLOCK_SIZE]
            if block not in blocks:
                blocks.append(block)

    def explain(self, tokens: Tokens) -> Expected:
        """The explanation of this prompt with the cache as it is now."""
        limit = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        num_cached = 0
        while num_cached < limit and self._next(tokens, num_cached) in self.blocks_after.get(tokens[:num_cached], ()):
            num_cached += BLOCK_SIZE
        if num_cached >= limit:
            return Expected("too_short", num_cached)
        block = self._next(tokens, num_cached)
        newest = list(reversed(self.blocks_after.get(tokens[:num_cached], [])))[:NEWEST_COMPARED]
        shared = max((_num_equal(cached, block) for cached in newest), default=0)
        if not shared:
            return Expected("first_seen", num_cached)
        nearest = next(cached for cached in newest if _num_equal(cached, block) == shared)
        position = num_cached + shared
        return Expected("diverged", num_cached, position, tokens[position], nearest[shared])

    @staticmethod
    def _next(tokens: Tokens, start: int) -> Tokens:
        return tokens[start : start + BLOCK_SIZE]


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


def num_lost_tokens(num_prompt: int, num_cached: int) -> int:
    """The number of tokens that were computed but could have been in the cache."""
    return (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE - num_cached
