"""A prefix guard that is fed as a server feeds it, without a server: prompts as a template writes them, and a cache
that never forgets."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.client.explanation import Explanation
from quire.client.prefix_guard import PrefixGuard, PrefixWarning, SeenPrompt
from quire.client.prompt_alignment import num_common, packed
from quire.client.reuse_log import ReuseRecord
from quire.text.tokenizer import Tokenizer
from tests.support.prefix_corpus import Body
from tests.support.small_tokenizers import byte_level

BLOCK_TOKENS = 16


def written(body: Body, template: str = "") -> str:
    """A prompt in ChatML, with the tools in front, or before the newest message."""
    tools = "".join(f"<tool>{json.dumps(tool)}</tool>\n" for tool in body.tools)
    told = [_turn(message) for message in body.messages]
    if template == "tools last":
        return "".join([*told[:-1], tools, told[-1], "<|im_start|>assistant\n"])
    return "".join([tools, *told, "<|im_start|>assistant\n"])


def _turn(message: dict[str, Any]) -> str:
    thought = f"<think>{message['reasoning_content']}</think>\n" if message.get("reasoning_content") else ""
    calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))
    return f"<|im_start|>{message['role']}\n{thought}{message['content']}{calls}<|im_end|>\n"


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

    def send(self, text: str, tenant: str = "one", *, messages: Sequence[Any] | None = None, group: str = "") -> int:
        """One prompt; how many of its tokens were found."""
        ids = self.tokenizer.library.encode(text, add_special_tokens=False).ids
        return self.send_ids(ids, tenant, messages=messages, group=group)

    def send_ids(
        self, ids: Sequence[int], tenant: str = "one", *, messages: Sequence[Any] | None = None, group: str = ""
    ) -> int:
        """The same as tokens."""
        tokens, cached = packed(ids), self._cached.setdefault((tenant, group), [])
        longest = max((num_common(tokens, one) for one in cached), default=0)
        num_found = min(longest, len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        cached.append(tokens)
        self._number += 1
        self.now_s += 1.0
        explanation = Explanation(len(ids), num_found, self.reason if longest else "first_seen")
        record = ReuseRecord(f"r{self._number}", tenant, group, "m", self.now_s, explanation, None, 0)
        self.guard.take(SeenPrompt(record, ids, self._text_of, messages))
        self._last = record, ids
        return num_found

    def _text_of(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    def answer(self, text: str) -> None:
        """What the last prompt is answered."""
        record, ids = self._last
        answer = self.tokenizer.library.encode(text, add_special_tokens=False).ids
        self._cached[record.tenant, record.cache_group].append(packed([*ids, *answer]))
        self.guard.answered(record, answer)

    def play(self, bodies: Sequence[Body], template: str = "", tenant: str = "one") -> list[PrefixWarning]:
        """Several requests of one client; what it would be warned of."""
        for body in bodies:
            self.send(written(body, template), tenant, messages=body.messages)
            if body.answer is not None:
                self.answer(_turn(body.answer).removeprefix("<|im_start|>assistant\n").removesuffix("\n"))
        return self.guard.warnings(self.now_s, tenant=tenant)
