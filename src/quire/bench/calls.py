"""Build the HTTP request for a visit's next turn: text, chat messages or token ids. Pure.

text     /v1/completions        one string: the conversation so far and the new turn
chat     /v1/chat/completions   the conversation as messages, which the server's template renders
tokens   /v1/completions        a list of token ids: exact lengths, if the server accepts ids; one turn only
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import ConfigError
from quire.workload.visits import Visit
from quire.workload.writing import SpanWriter

PromptFormat = Literal["text", "chat", "tokens"]
PROMPT_FORMATS: tuple[PromptFormat, ...] = ("text", "chat", "tokens")
PRIORITIES = {"high": -10, "normal": 0, "low": 10}
"""The values of `priority` in a body: lower is more urgent."""


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One HTTP request, ready to be sent."""

    name: str
    kind: str
    path: str
    body: bytes
    prompt_tokens: int
    """Intended prompt length without earlier answers, used if the server reports no usage."""


@dataclass(frozen=True, slots=True)
class CallMaker:
    """Builds calls for one model."""

    model: str
    prompt_format: PromptFormat
    writer: SpanWriter
    ignores_eos: bool = True
    """Always generate max_tokens tokens, so that output lengths do not depend on the model's answers."""
    sends_priority: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that replace those of the body; null removes a field, for servers that reject unknown fields."""

    def check(self, visits: Sequence[Visit]) -> None:
        """Raise ConfigError if this prompt format cannot express the visits."""
        if self.prompt_format == "tokens" and any(len(visit.turns) > 1 for visit in visits):
            raise ConfigError(
                "expected --prompts text or chat for conversations, because answers come back as text, got tokens; or "
                "choose a workload with one turn"
            )

    def make_call(self, visit: Visit, answers: Sequence[str]) -> HttpCall:
        """Build the call for the turn after these answers."""
        turn = visit.turns[len(answers)]
        path, prompt = self._prompt(visit, answers)
        body: dict[str, Any] = {
            "model": self.model,
            **prompt,
            "max_tokens": turn.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.sends_priority:
            body["priority"] = PRIORITIES[visit.priority]
        turns = visit.turns[: len(answers) + 1]
        num_tokens = sum(span.num_tokens for span in visit.system) + sum(turn.num_tokens for turn in turns)
        name = f"{visit.name}.{len(answers)}" if len(visit.turns) > 1 else visit.name
        fields = {key: value for key, value in {**body, **self.extra}.items() if value is not None}
        return HttpCall(name, visit.kind, path, json.dumps(fields).encode(), num_tokens)

    def _prompt(self, visit: Visit, answers: Sequence[str]) -> tuple[str, dict[str, Any]]:
        turns = visit.turns[: len(answers) + 1]
        if self.prompt_format == "tokens":
            return "/v1/completions", {"prompt": self.writer.ids((*visit.system, *turns[0].spans))}
        questions = [self.writer.words(turn.spans) for turn in turns]
        system = self.writer.words(visit.system)
        if self.prompt_format == "text":
            text = "".join(f"{question}{answer}" for question, answer in zip(questions, (*answers, ""), strict=True))
            return "/v1/completions", {"prompt": f"{system} {text}" if system else text}
        messages = [{"role": "system", "content": system}] if system else []
        for question, answer in zip(questions, (*answers, None), strict=True):
            messages.append({"role": "user", "content": question})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return "/v1/chat/completions", {"messages": messages}
