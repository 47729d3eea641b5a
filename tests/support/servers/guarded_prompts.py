"""A prefix guard that is fed as a server feeds it, without a server: prompts as a template writes them, and a cache
that never forgets."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.client.prefix.explanation import Explanation
from quire.client.prefix.prefix_guard import NewPrompt, PrefixGuard, PrefixWarning
from quire.client.prefix.prompt_alignment import num_common, packed
from quire.client.prefix.reuse_log import PromptPart, PromptParts, ReuseRecord
from quire.text.chat.prompt_parts import PartSpan
from quire.text.tokenizer import Tokenizer
from tests.support.fleet.prefix_corpus import Body
from tests.support.models.small_tokenizers import byte_level

BLOCK_TOKENS = 16
_CALLS = (
    "{% for c in m.tool_calls %}{{ '\\n' }}<tool_call>{{ '\\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ "\\n" }}</tool_call>'
    "{% endfor %}"
)
_THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
_TOOLS = "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>\n{% endfor %}"
_TURN = "<|im_start|>{{ m.role }}\n" + _THOUGHT + "{{ m.content }}" + _CALLS + "<|im_end|>\n"
_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "": _TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}" + _END,
    "tools last": "{% for m in messages %}{% if loop.last %}" + _TOOLS + "{% endif %}" + _TURN + "{% endfor %}" + _END,
}
"""ChatML with the tools in front, as Qwen has it; and with the tools before the newest message, as Mistral has it."""


@dataclass
class Written:
    """A prompt in ChatML, and where in it its client's parts lie."""

    text: str = ""
    spans: list[tuple[int, int, PromptPart]] = field(default_factory=list)
    """First character, the one behind the last, part."""

    def add(self, before: str, text: str, behind: str, part: PromptPart) -> None:
        """One part between what the template writes."""
        start = len(self.text) + len(before)
        self.text += before + text + behind
        self.spans.append((start, start + len(text), part))

    def parts(self, offsets: Sequence[tuple[int, int]]) -> PromptParts:
        """The same by tokens."""
        firsts = [first for first, _ in offsets]
        return PromptParts(
            [PartSpan(bisect_left(firsts, start), bisect_left(firsts, stop), part) for start, stop, part in self.spans]
        )


def written(body: Body, template: str = "") -> Written:
    """The prompt with the tools in front, or before the newest message."""
    made = Written()
    last = len(body.messages) - 1
    for index, message in enumerate(body.messages):
        if index == (last if template == "tools last" else 0):
            for number, tool in enumerate(body.tools):
                made.add("<tool>", json.dumps(tool), "</tool>\n", PromptPart("tool", number, tool["function"]["name"]))
        part = PromptPart("message", index, message["role"])
        made.add(f"<|im_start|>{message['role']}\n", said(message), "<|im_end|>\n", part)
    made.text += "<|im_start|>assistant\n"
    return made


def said(message: dict[str, Any]) -> str:
    """A message as the template writes it."""
    thought = f"<think>{message['reasoning_content']}</think>\n" if message.get("reasoning_content") else ""
    calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))
    return f"{thought}{message['content']}{calls}"


@dataclass
class GuardedPrompts:
    """A guard, and what it said."""

    tokenizer: Tokenizer = field(default_factory=byte_level)
    told: list[PrefixWarning] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    now_s: float = 1000.0
    reason: str = "diverged"

    def __post_init__(self) -> None:
        self.guard = PrefixGuard(self.told.append, lambda _model, num: self.counted.append(num))
        self._cached: dict[tuple[str, str], list[bytes]] = {}
        self._number = 0

    def send(self, prompt: Written, tenant: str = "one", group: str = "") -> int:
        """One prompt; how many of its tokens were found."""
        encoded = self.tokenizer.library.encode(prompt.text, add_special_tokens=False)
        ids, tokens = encoded.ids, packed(encoded.ids)
        cached = self._cached.setdefault((tenant, group), [])
        longest = max((num_common(tokens, one) for one in cached), default=0)
        num_found = min(longest, len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        cached.append(tokens)
        self._number += 1
        self.now_s += 1.0
        explanation = Explanation(len(ids), num_found, self.reason if longest else "first_seen")
        record = ReuseRecord(f"r{self._number}", tenant, group, "m", self.now_s, explanation, None, 0, num_found)
        self.guard.examine(NewPrompt(record, ids, self._text_of, prompt.parts(encoded.offsets)))
        self._last = record, ids
        return num_found

    def _text_of(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    def answer(self, text: str) -> None:
        """What the last prompt is answered."""
        record, ids = self._last
        answer = self.tokenizer.library.encode(text, add_special_tokens=False).ids
        self._cached[record.tenant, record.cache_group].append(packed([*ids, *answer]))
        self.guard.complete(record, answer)

    def play(self, bodies: Sequence[Body], template: str = "", tenant: str = "one") -> list[PrefixWarning]:
        """Several requests of one client; what it would be warned of."""
        for body in bodies:
            self.send(written(body, template), tenant)
            if body.answer is not None:
                self.answer(said(body.answer) + "<|im_end|>")
        return self.guard.warnings(self.now_s, tenant=tenant)
