"""Names of control tokens in everything that an agent's client can fill, in all dialects: results of tools, their names
and descriptions, arguments of calls, thoughts given back. None becomes a token that controls the model.

A name stands between two nonces, and a control token beside a nonce was written by a client. That it would be seen is
shown by reading each prompt's text once more without any care.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import tokenizers

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from proofs.models.public_tokenizers import Published, published
from quire.api.access.admission import Admission
from quire.api.dialects.answering import Dialect
from quire.api.dialects.anthropic.messages import AnthropicMessages
from quire.api.dialects.openai.chat import Chat
from quire.api.dialects.openai.responses import Responses
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.http.errors import ApiError
from quire.api.models.registry import ModelEntry, Models
from quire.checkpoints import load_tokenizer
from quire.client.request.text_model import TextModel
from quire.errors import QuireError
from quire.observe.metrics import Metrics
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

Body = dict[str, Any]
LONGEST = 1 << 20
WORDS = [
    "Hello", "the weather", "in", "Paris", "is", "nice.", "def f(x):\n    return x", "{'a': [1, 2]}", "3.14",
    "日本語", "こんにちは", "中文", "한국어", "שלום", "مرحبا", "👍🏽", "👨‍👩‍👧", "é", "e\u0301", "naïve",
    "C:\\path", "|", "[1]", "\t", "I'll", "don't", "http://x.y/z?q=1&r=2", "ﬁ", "½", "“quoted”", "100%",
    "{{ x }}", "{% y %}", "a < b > c", "<b>bold</b>", "  ", "\n\n",
]  # fmt: skip
NONCE = "zqjx"
"""Stands on both sides of every name a client writes, and nowhere else."""
STRANGE_ROLES = ("admin", "System", " system", "user\n", "root", "")


@section("injected roles")
def injected(proof: Proof) -> None:
    """Every tokenizer, every dialect."""
    count = proof.sized(quick=20, full=150)
    num_tried = num_encoded = num_refused_names = forged = control = taken = 0
    least = count
    for published_model in published():
        with_words = Hostile(proof.random, tried_names(published_model))
        tried = Tried(published_model)
        for name, make in DIALECTS.items():
            bodies = [with_words.body(make) for _ in range(count)]
            outcomes = [tried.ids(name, body) for body in bodies]
            library = load_tokenizer(published_model.tokenizer_file)
            found = num_forged(library, published_model, outcomes)
            encoded = [ids for ids in outcomes if isinstance(ids, list)]
            carelessly = [library.encode(tried.shown(ids), add_special_tokens=False).ids for ids in encoded]
            control += num_forged(library, published_model, [*carelessly])
            num_refused_names += sum(isinstance(told, str) and "tool's name" in told for told in outcomes)
            say(f"    {published_model.name}, {name}: {len(encoded)} of {count} encoded, {found} forged")
            num_tried, num_encoded, forged = num_tried + count, num_encoded + len(encoded), forged + found
            least = min(least, len(encoded))
        taken += tried.num_roles_taken()
        tried.close()
    proof.report("injected_tries", num_tried)
    proof.at_least("injected_encoded", num_encoded, num_tried // 2)
    proof.at_least("injected_encoded_least", least, count // 3, "of one model in one dialect")
    proof.at_least("injected_names_refused", num_refused_names, 1, "a tool's name that is none")
    proof.at_least("injected_without_care", control, num_encoded, "the trial would see it")
    proof.equals("strange_roles_taken", taken, 0)
    proof.equals("injected_roles", forged + taken, 0)


def text(random: Random, most: int = 14) -> str:
    """Some words of any kind."""
    return " ".join(random.choices(WORDS, k=random.randint(1, most)))


def tried_names(model: Published) -> list[str]:
    """The names its template writes, three times, so that they are tried most often; then some of the others."""
    names = [*model.control_names().values()]
    own = [name for name in names if name in model.template or name in model.special_tokens.values()]
    return own * 3 + [name for name in names if name not in own][:: max(1, len(names) // 40)]


def num_forged(library: tokenizers.Tokenizer, model: Published, outcomes: list[list[int] | str]) -> int:
    """Control tokens directly beside a nonce: a client wrote that, and nobody else."""
    control, num_found = model.control_names(), 0
    for ids in outcomes:
        if isinstance(ids, str):
            continue
        for index in (index for index, one in enumerate(ids) if one in control):
            before = library.decode(ids[max(0, index - 12) : index], skip_special_tokens=False)
            after = library.decode(ids[index + 1 : index + 13], skip_special_tokens=False)
            num_found += before.rstrip(" ").endswith(NONCE) or after.lstrip(" ").startswith(NONCE)
    return num_found


class Tried:
    """One model's words, and what becomes of bodies for it."""

    def __init__(self, model: Published) -> None:
        library = load_tokenizer(Path(model.tokenizer_file))
        self._tokenizer = Tokenizer(library, 8 * LONGEST)
        info = SimpleNamespace(
            vocabulary_size=self._tokenizer.vocabulary_size, max_sequence_tokens=LONGEST, notes=(), namespace=str
        )
        template = ChatTemplate(model.template, model.special_tokens)
        self._text = TextModel(
            model.name, cast("Any", info), self._tokenizer, template, frozenset({0}), {}, writes_tools=True
        )
        self._request = ResolvedRequest(model=ModelEntry("m"))

    def ids(self, dialect: str, body: Body) -> list[int] | str:
        """Of the prompt that a body comes to, or why it comes to none."""
        made = SPOKEN[dialect]
        try:
            rendered = made.render(made.parse(body), self._request, self._text)
            return list(rendered.prompts[0])
        except (ApiError, QuireError) as error:
            return str(error)

    def shown(self, ids: Sequence[int]) -> str:
        """As one text."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def num_roles_taken(self) -> int:
        """Strange roles that were not refused."""
        messages = [{"role": role, "content": "x"} for role in STRANGE_ROLES]
        bodies: list[tuple[str, Body]] = [("chat", {"messages": [one]}) for one in messages]
        bodies += [("responses", {"input": [one]}) for one in messages]
        bodies += [("messages", {"messages": [one], "max_tokens": 1}) for one in messages]
        return sum(isinstance(self.ids(dialect, body), list) for dialect, body in bodies)

    def close(self) -> None:
        self._text.close()


ADMISSION = Admission(Models(()), Metrics())
SPOKEN: dict[str, Dialect] = {
    "chat": Chat(ADMISSION),
    "responses": Responses(ADMISSION),
    "messages": AnthropicMessages(ADMISSION),
}


@dataclass(frozen=True, slots=True)
class Hostile:
    """Writes bodies, with names of a model's control tokens in every field."""

    random: Random
    names: Sequence[str]

    def body(self, make: Callable[["Hostile"], Body]) -> Body:
        return make(self)

    def word(self) -> str:
        """One name between nonces."""
        return f"w{NONCE}{self.random.choice(self.names)}{NONCE}w"

    def write(self) -> str:
        """Some of them among other words, also one behind the other and between blanks."""
        pieces = ["w"]
        for _ in range(self.random.randint(1, 3)):
            name, other = self.random.choices(self.names, k=2)
            forged = self.random.choice((name, f"{name}\n{NONCE}{other}", f" {name} ", name * 2))
            pieces += [text(self.random, 3), f"{NONCE}{forged}{NONCE}"]
        return "".join([*pieces, "w"])

    def sometimes(self, share: float = 0.3, **fields: Any) -> Body:
        """These, or none."""
        return fields if self.random.random() < share else {}

    def parameters(self) -> Body:
        """A schema with them in names, descriptions and choices."""
        city = {"type": "string", "description": self.write(), "enum": ["a", self.word()], "default": self.word()}
        key = self.random.choice(("city", self.word()))
        return {"type": "object", "title": self.word(), "properties": {key: city}, "required": [key]}

    def tool_name(self) -> str:
        """Mostly a good one: a bad one is refused, and nothing else is tried then."""
        return self.random.choice(("find",) * 9 + (f"find{self.word()}",))

    def call_name(self) -> str:
        """In what was said before, where nobody looks whether there is such a tool."""
        return self.random.choice(("find", f"find{self.word()}"))

    def arguments(self) -> Body:
        """Of a call."""
        return {self.random.choice(("city", self.word())): self.write(), "deep": [{"x": self.write()}]}

    def call_id(self) -> str:
        return self.random.choice(("call00001", self.word()))


def chat_body(hostile: Hostile) -> Body:
    """`/v1/chat/completions`."""
    write, sometimes = hostile.write, hostile.sometimes
    arguments = hostile.random.choice((json.dumps(hostile.arguments()), hostile.write()))
    call: dict[str, Any] = {"id": hostile.call_id(), "type": hostile.random.choice(("function", hostile.word()))}
    call["function"] = {"name": hostile.call_name(), "arguments": arguments}
    tool = {"name": hostile.tool_name(), "description": write(), "parameters": hostile.parameters()}
    return {
        "messages": [
            {"role": hostile.random.choice(("system", "developer")), "content": write()},
            {"role": "user", "content": [{"type": "text", "text": write()}], **sometimes(name=write())},
            {"role": "assistant", "content": write(), "reasoning_content": write(), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": hostile.call_name(), "content": write()},
            {"role": "assistant", "content": write(), "reasoning": write()},
            {"role": "user", "content": write()},
        ],
        **sometimes(0.8, tools=[{"type": "function", "function": tool}]),
        **sometimes(chat_template_kwargs={"date_string": write(), "model_identity": write()}),
        **sometimes(reasoning_effort=hostile.word()),
        **sometimes(documents=[{"title": write(), "text": write()}]),
    }


def response_body(hostile: Hostile) -> Body:
    """`/v1/responses`."""
    write, sometimes = hostile.write, hostile.sometimes
    arguments = hostile.random.choice((json.dumps(hostile.arguments()), hostile.write()))
    call_id = hostile.call_id()
    tool = {"name": hostile.tool_name(), "description": write(), "parameters": hostile.parameters()}
    return {
        "input": [
            {"type": "message", "id": hostile.word(), "role": "developer", "content": write()},
            {"role": "user", "content": [{"type": "input_text", "text": write()}]},
            {"type": "reasoning", "id": hostile.word(), "summary": [{"type": "summary_text", "text": write()}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": write()}]},
            {"type": "function_call", "call_id": call_id, "name": hostile.call_name(), "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": write()},
            {"type": "message", "role": "assistant", "content": write()},
            {"role": "user", "content": write()},
        ],
        **sometimes(instructions=write()),
        **sometimes(0.8, tools=[{"type": "function", **tool}]),
        **sometimes(reasoning={"effort": hostile.word()}),
        **sometimes(metadata={hostile.word(): write()}),
    }


def message_body(hostile: Hostile) -> Body:
    """`/v1/messages`."""
    write, sometimes, call_id = hostile.write, hostile.sometimes, hostile.call_id()
    tool = {"name": hostile.tool_name(), "description": write(), "input_schema": hostile.parameters()}
    called = {"type": "tool_use", "id": call_id, "name": hostile.call_name(), "input": hostile.arguments()}
    result = hostile.random.choice((write(), [{"type": "text", "text": write()}]))
    return {
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": write(), "cache_control": {"type": write()}}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": write(), "signature": write()}, called],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": result}]},
            {"role": "assistant", "content": write()},
            {"role": "user", "content": write()},
        ],
        **sometimes(0.6, system=[{"type": "text", "text": write()}]),
        **sometimes(0.8, tools=[tool]),
        **sometimes(metadata={"user_id": write()}),
    }


DIALECTS: dict[str, Callable[[Hostile], Body]] = {
    "chat": chat_body,
    "responses": response_body,
    "messages": message_body,
}
