"""Names of control tokens in every field that an agent's client can fill, in all dialects: results, names and
descriptions of tools, arguments of calls, reasoning sent back. None becomes a token that controls the model.

A name stands between two nonces, so a control token beside a nonce was written by a client. As a control, each prompt's
text is also encoded without protection: then such tokens must be found.
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
MAX_TOKENS = 1 << 20
WORDS = [
    "Hello", "the weather", "in", "Paris", "is", "nice.", "def f(x):\n    return x", "{'a': [1, 2]}", "3.14",
    "日本語", "こんにちは", "中文", "한국어", "שלום", "مرحبا", "👍🏽", "👨‍👩‍👧", "é", "e\u0301", "naïve",
    "C:\\path", "|", "[1]", "\t", "I'll", "don't", "http://x.y/z?q=1&r=2", "ﬁ", "½", "“quoted”", "100%",
    "{{ x }}", "{% y %}", "a < b > c", "<b>bold</b>", "  ", "\n\n",
]  # fmt: skip
NONCE = "zqjx"
"""A text on both sides of every name that a client writes, and nowhere else."""
STRANGE_ROLES = ("admin", "System", " system", "user\n", "root", "")


@section("injected roles")
def injected(proof: Proof) -> None:
    """Try every published tokenizer in every dialect."""
    count = proof.sized(quick=20, full=150)
    num_tried = num_encoded = num_refused_names = num_wrong = num_control = num_roles_taken = 0
    min_encoded = count
    for published_model in published():
        writer = HostileWriter(proof.random, names_to_try(published_model))
        renderer = PromptRenderer(published_model)
        for name, make_body in BODY_MAKERS.items():
            bodies = [writer.body(make_body) for _ in range(count)]
            outcomes = [renderer.ids(name, body) for body in bodies]
            library = load_tokenizer(published_model.tokenizer_file)
            num_found = num_forged(library, published_model, outcomes)
            encoded = [ids for ids in outcomes if isinstance(ids, list)]
            unprotected = [library.encode(renderer.decode(ids), add_special_tokens=False).ids for ids in encoded]
            num_control += num_forged(library, published_model, [*unprotected])
            num_refused_names += sum(isinstance(outcome, str) and "tool's name" in outcome for outcome in outcomes)
            say(f"    {published_model.name}, {name}: {len(encoded)} of {count} encoded, {num_found} forged")
            num_tried, num_encoded, num_wrong = num_tried + count, num_encoded + len(encoded), num_wrong + num_found
            min_encoded = min(min_encoded, len(encoded))
        num_roles_taken += renderer.num_roles_taken()
        renderer.close()
    proof.report("injected_tries", num_tried)
    proof.at_least("injected_encoded", num_encoded, num_tried // 2)
    proof.at_least("injected_encoded_least", min_encoded, count // 3, "of one model in one dialect")
    proof.at_least("injected_names_refused", num_refused_names, 1, "invalid names of tools")
    proof.at_least("injected_without_care", num_control, num_encoded, "found where nothing protects the prompt")
    proof.equals("strange_roles_taken", num_roles_taken, 0)
    proof.equals("injected_roles", num_wrong + num_roles_taken, 0)


def text(random: Random, max_words: int = 14) -> str:
    """A few random words."""
    return " ".join(random.choices(WORDS, k=random.randint(1, max_words)))


def names_to_try(model: Published) -> list[str]:
    """The control names in the model's template three times, to be tried most often; then some of the others."""
    names = [*model.control_names().values()]
    template_names = [name for name in names if name in model.template or name in model.special_tokens.values()]
    return template_names * 3 + [name for name in names if name not in template_names][:: max(1, len(names) // 40)]


def num_forged(library: tokenizers.Tokenizer, model: Published, outcomes: list[list[int] | str]) -> int:
    """The number of control tokens directly beside a nonce: those that a client wrote."""
    control, num_found = model.control_names(), 0
    for ids in outcomes:
        if isinstance(ids, str):
            continue
        for index in (index for index, token_id in enumerate(ids) if token_id in control):
            before = library.decode(ids[max(0, index - 12) : index], skip_special_tokens=False)
            after = library.decode(ids[index + 1 : index + 13], skip_special_tokens=False)
            num_found += before.rstrip(" ").endswith(NONCE) or after.lstrip(" ").startswith(NONCE)
    return num_found


class PromptRenderer:
    """Renders bodies to prompts with one model's tokenizer and template."""

    def __init__(self, model: Published) -> None:
        library = load_tokenizer(Path(model.tokenizer_file))
        self._tokenizer = Tokenizer(library, 8 * MAX_TOKENS)
        info = SimpleNamespace(
            vocabulary_size=self._tokenizer.vocabulary_size, max_sequence_tokens=MAX_TOKENS, notes=(), namespace=str
        )
        template = ChatTemplate(model.template, model.special_tokens)
        self._text = TextModel(
            model.name, cast("Any", info), self._tokenizer, template, frozenset({0}), {}, writes_tools=True
        )
        self._request = ResolvedRequest(model=ModelEntry("m"))

    def ids(self, dialect: str, body: Body) -> list[int] | str:
        """The token ids of a body's prompt, or the message of the error that refuses the body."""
        api = DIALECTS[dialect]
        try:
            rendered = api.render(api.parse(body), self._request, self._text)
            return list(rendered.prompts[0])
        except (ApiError, QuireError) as error:
            return str(error)

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, control tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def num_roles_taken(self) -> int:
        """The number of strange roles that were not refused."""
        messages = [{"role": role, "content": "x"} for role in STRANGE_ROLES]
        bodies: list[tuple[str, Body]] = [("chat", {"messages": [message]}) for message in messages]
        bodies += [("responses", {"input": [message]}) for message in messages]
        bodies += [("messages", {"messages": [message], "max_tokens": 1}) for message in messages]
        return sum(isinstance(self.ids(dialect, body), list) for dialect, body in bodies)

    def close(self) -> None:
        self._text.close()


ADMISSION = Admission(Models(()), Metrics())
DIALECTS: dict[str, Dialect] = {
    "chat": Chat(ADMISSION),
    "responses": Responses(ADMISSION),
    "messages": AnthropicMessages(ADMISSION),
}


@dataclass(frozen=True, slots=True)
class HostileWriter:
    """Makes texts and fields with names of a model's control tokens, for hostile bodies."""

    random: Random
    names: Sequence[str]

    def body(self, make: Callable[["HostileWriter"], Body]) -> Body:
        return make(self)

    def word(self) -> str:
        """One name between nonces."""
        return f"w{NONCE}{self.random.choice(self.names)}{NONCE}w"

    def write(self) -> str:
        """A text with some names among other words, some directly after each other or between blanks."""
        pieces = ["w"]
        for _ in range(self.random.randint(1, 3)):
            name, second = self.random.choices(self.names, k=2)
            forged = self.random.choice((name, f"{name}\n{NONCE}{second}", f" {name} ", name * 2))
            pieces += [text(self.random, 3), f"{NONCE}{forged}{NONCE}"]
        return "".join([*pieces, "w"])

    def sometimes(self, share: float = 0.3, **fields: Any) -> Body:
        """These fields with the probability `share`, else none."""
        return fields if self.random.random() < share else {}

    def parameters(self) -> Body:
        """A schema with control names in property names, descriptions and enums."""
        city = {"type": "string", "description": self.write(), "enum": ["a", self.word()], "default": self.word()}
        key = self.random.choice(("city", self.word()))
        return {"type": "object", "title": self.word(), "properties": {key: city}, "required": [key]}

    def tool_name(self) -> str:
        """Mostly a valid name: an invalid one refuses the whole body, and then no other field is tried."""
        return self.random.choice(("find",) * 9 + (f"find{self.word()}",))

    def call_name(self) -> str:
        """The name in an earlier call, which the server does not compare with the tools."""
        return self.random.choice(("find", f"find{self.word()}"))

    def arguments(self) -> Body:
        """A call's arguments with control names."""
        return {self.random.choice(("city", self.word())): self.write(), "deep": [{"x": self.write()}]}

    def call_id(self) -> str:
        return self.random.choice(("call00001", self.word()))


def chat_body(writer: HostileWriter) -> Body:
    """`/v1/chat/completions`."""
    write, sometimes = writer.write, writer.sometimes
    arguments = writer.random.choice((json.dumps(writer.arguments()), writer.write()))
    call: dict[str, Any] = {"id": writer.call_id(), "type": writer.random.choice(("function", writer.word()))}
    call["function"] = {"name": writer.call_name(), "arguments": arguments}
    tool = {"name": writer.tool_name(), "description": write(), "parameters": writer.parameters()}
    return {
        "messages": [
            {"role": writer.random.choice(("system", "developer")), "content": write()},
            {"role": "user", "content": [{"type": "text", "text": write()}], **sometimes(name=write())},
            {"role": "assistant", "content": write(), "reasoning_content": write(), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": writer.call_name(), "content": write()},
            {"role": "assistant", "content": write(), "reasoning": write()},
            {"role": "user", "content": write()},
        ],
        **sometimes(0.8, tools=[{"type": "function", "function": tool}]),
        **sometimes(chat_template_kwargs={"date_string": write(), "model_identity": write()}),
        **sometimes(reasoning_effort=writer.word()),
        **sometimes(documents=[{"title": write(), "text": write()}]),
    }


def response_body(writer: HostileWriter) -> Body:
    """`/v1/responses`."""
    write, sometimes = writer.write, writer.sometimes
    arguments = writer.random.choice((json.dumps(writer.arguments()), writer.write()))
    call_id = writer.call_id()
    tool = {"name": writer.tool_name(), "description": write(), "parameters": writer.parameters()}
    return {
        "input": [
            {"type": "message", "id": writer.word(), "role": "developer", "content": write()},
            {"role": "user", "content": [{"type": "input_text", "text": write()}]},
            {"type": "reasoning", "id": writer.word(), "summary": [{"type": "summary_text", "text": write()}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": write()}]},
            {"type": "function_call", "call_id": call_id, "name": writer.call_name(), "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": write()},
            {"type": "message", "role": "assistant", "content": write()},
            {"role": "user", "content": write()},
        ],
        **sometimes(instructions=write()),
        **sometimes(0.8, tools=[{"type": "function", **tool}]),
        **sometimes(reasoning={"effort": writer.word()}),
        **sometimes(metadata={writer.word(): write()}),
    }


def message_body(writer: HostileWriter) -> Body:
    """`/v1/messages`."""
    write, sometimes, call_id = writer.write, writer.sometimes, writer.call_id()
    tool = {"name": writer.tool_name(), "description": write(), "input_schema": writer.parameters()}
    call = {"type": "tool_use", "id": call_id, "name": writer.call_name(), "input": writer.arguments()}
    result = writer.random.choice((write(), [{"type": "text", "text": write()}]))
    return {
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": write(), "cache_control": {"type": write()}}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": write(), "signature": write()}, call],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": result}]},
            {"role": "assistant", "content": write()},
            {"role": "user", "content": write()},
        ],
        **sometimes(0.6, system=[{"type": "text", "text": write()}]),
        **sometimes(0.8, tools=[tool]),
        **sometimes(metadata={"user_id": write()}),
    }


BODY_MAKERS: dict[str, Callable[[HostileWriter], Body]] = {
    "chat": chat_body,
    "responses": response_body,
    "messages": message_body,
}
