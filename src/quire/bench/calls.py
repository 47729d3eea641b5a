"""Build the HTTP request for a visit's next turn: text, chat messages or token ids. Pure.

text     /v1/completions        one string: the conversation so far, and the new turn
chat     /v1/chat/completions   the same as messages, rendered by the server's own template
tokens   /v1/completions        a list of ids: exact lengths, for servers that accept them; one turn only
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import ConfigError
from quire.workload.visits import Visit
from quire.workload.writing import SpanWriter

Form = Literal["text", "chat", "tokens"]
FORMS: tuple[Form, ...] = ("text", "chat", "tokens")
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
    """The intended length without earlier answers, used if the server reports no usage."""


@dataclass(frozen=True, slots=True)
class CallMaker:
    """Builds calls for one model."""

    model: str
    form: Form
    writer: SpanWriter
    ignores_eos: bool = True
    """Always generate max_tokens tokens, so that output lengths do not depend on the model's answers."""
    sends_priority: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that replace those of the body; null removes a field, for servers that refuse unknown ones."""

    def check(self, visits: Sequence[Visit]) -> None:
        """Raise ConfigError if this form cannot express the visits."""
        if self.form == "tokens" and any(len(visit.turns) > 1 for visit in visits):
            raise ConfigError(
                "expected --prompts text or chat for conversations, because answers come back as text, got tokens; or "
                "choose a workload of one turn"
            )

    def call(self, visit: Visit, answers: Sequence[str]) -> HttpCall:
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
        meant = sum(span.num_tokens for span in visit.system) + sum(one.num_tokens for one in turns)
        name = f"{visit.name}.{len(answers)}" if len(visit.turns) > 1 else visit.name
        sent = {key: value for key, value in {**body, **self.extra}.items() if value is not None}
        return HttpCall(name, visit.kind, path, json.dumps(sent).encode(), meant)

    def _prompt(self, visit: Visit, answers: Sequence[str]) -> tuple[str, dict[str, Any]]:
        turns = visit.turns[: len(answers) + 1]
        if self.form == "tokens":
            return "/v1/completions", {"prompt": self.writer.ids((*visit.system, *turns[0].spans))}
        questions = [self.writer.words(turn.spans) for turn in turns]
        system = self.writer.words(visit.system)
        if self.form == "text":
            talk = "".join(f"{question}{answer}" for question, answer in zip(questions, (*answers, ""), strict=True))
            return "/v1/completions", {"prompt": f"{system} {talk}" if system else talk}
        messages = [{"role": "system", "content": system}] if system else []
        for question, answer in zip(questions, (*answers, None), strict=True):
            messages.append({"role": "user", "content": question})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return "/v1/chat/completions", {"messages": messages}
