"""Reasoning with a token budget: no thought is longer than its budget, and an answer follows it.

The test model runs with the templates of three families of reasoning models: the model opens its thought, the prompt
opens it, or the answer has channels. Their marks (`<think>` and so on) replace unused tokens of the test model. Logit
biases make likely what the model does not do by itself: opening a thought, and characters of several tokens.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from benchmarks.test_model import smollm2_directory
from proofs.agents.prompts.bodies import PLACE
from proofs.api.load import Server, phrase, started
from proofs.framework.proof import Proof, section
from proofs.models.llamacpp_source import published_templates

BUDGETS = (16, 512)
EXTRA_TOKENS = 3  # a thought may run over its budget to end a character
ANSWER_TOKENS = 64
ENDS = (0, 2)
"""Tokens with which the test model ends an answer."""
NUM_OPEN = 16
MARKS = (
    "<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
    "<|constrain|>",
)  # fmt: skip
"""They replace the tokens from `FIRST_UNUSED` on."""
FIRST_UNUSED = 3
SYMBOLS = "\U0001f600日本語한국"
"""Characters that take several tokens each."""


@dataclass(frozen=True, slots=True)
class Family:
    """A template, the marks directly around its thoughts, and the tokens that open a thought."""

    template: str
    begin: str
    end: str
    opening_texts: tuple[str, ...] = ()
    """Texts that biases make likely, so that there is a thought; empty where the prompt opens it."""


FAMILIES = {
    "opens": Family("Qwen-Qwen3-0.6B", "<think>", "</think>", ("<think>",)),
    "opened": Family("Qwen-QwQ-32B", "<think>", "</think>"),
    "channels": Family("openai-gpt-oss-120b", "<|message|>", "<|end|>", ("<|channel|>", "analysis", "<|message|>")),
}


@section("budgets")
def budgets(proof: Proof) -> None:
    """Send requests with budgets for all families to one server."""
    count = proof.sized(quick=12, full=200)
    folders = [thinking_model(proof.folder / name, family.template) for name, family in FAMILIES.items()]
    names = [word for name in FAMILIES for word in ("--served-model-name", name)]
    words = (*map(str, folders), *names, "--memory", "4GiB", "--max-model-len", "2048", "--max-running", str(NUM_OPEN))
    with started(proof.folder, *words, module="quire serve") as server:
        counts = asyncio.run(_send_all(server, count, proof.random))
    for message in counts.problems[:6]:
        say(f"    {message}")
    say(f"    reached: {counts.num_reached}, with text: {counts.num_texts}, cut in a character: {counts.num_late}")
    proof.at_least("budget_requests", counts.num_requests, count)
    proof.at_least("budget_families", len(counts.num_reached), len(FAMILIES), "whose thoughts came to their budget")
    proof.at_least("budget_reached", sum(counts.num_reached.values()), count // 2, "thoughts that came to their budget")
    proof.at_least("budget_texts", counts.num_texts, count // 2, "answers that went on behind their thought")
    proof.at_least("budget_messages", counts.num_messages, count // 8, "thoughts through /v1/messages")
    proof.equals("budget_messages_unequal", counts.num_unequal, 0, "thoughts in messages that are not those in chats")
    proof.equals("budget_overrun", counts.num_overrun, 0, "tokens beyond budget, mark and 3 to end a character")


def thinking_model(folder: Path, template: str) -> Path:
    """Make a folder of the test model with another template, and with the marks among its tokens."""
    source = smollm2_directory()
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in ("tokenizer.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokens_by_id = {token["id"]: token for token in tokenizer["added_tokens"]}
    for token_id, mark in enumerate(MARKS, start=FIRST_UNUSED):
        del tokenizer["model"]["vocab"][tokens_by_id[token_id]["content"]]
        tokenizer["model"]["vocab"][mark] = token_id
        tokens_by_id[token_id]["content"] = mark
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text((published_templates() / f"{template}.jinja").read_text())
    return folder


async def _send_all(server: Server, count: int, random: Random) -> "ThoughtCounts":
    counts, gate = ThoughtCounts(), asyncio.Semaphore(NUM_OPEN)

    async def ask(requester: "Requester", index: int) -> None:
        async with gate:
            await requester.ask(index, counts)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200)) as session:
        requester = Requester(session, server.url, random)
        await requester.look_up()
        await asyncio.gather(*(ask(requester, index) for index in range(count)))
    return counts


@dataclass
class ThoughtCounts:
    """Counts of thoughts, and descriptions of the wrong ones."""

    num_requests: int = 0
    num_reached: dict[str, int] = field(default_factory=dict)
    num_texts: int = 0
    num_late: int = 0
    num_messages: int = 0
    num_unequal: int = 0
    num_overrun: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, name: str, budget: int, ids: Sequence[int], has_text: bool) -> None:
        """Count the answer with these token ids to a request with this budget."""
        self.num_requests += 1
        length = thought_length(ids, FAMILIES[name])
        if length is None:
            self.problems.append(f"{name}, budget {budget}: no thought, or none that ended, in {list(ids[:9])}")
            return
        if length >= budget:
            self.num_reached[name] = self.num_reached.get(name, 0) + 1
        self.num_texts += has_text
        self.num_late += length > budget
        if length > budget + EXTRA_TOKENS:
            self.num_overrun += length - budget - EXTRA_TOKENS
            self.problems.append(f"{name}, budget {budget}: {length} tokens")


def thought_length(ids: Sequence[int], family: Family) -> int | None:
    """The number of tokens between the marks; None if a mark is missing: no thought, or one without an end."""
    begin_id, end_id = (FIRST_UNUSED + MARKS.index(mark) for mark in (family.begin, family.end))
    begin = 0 if not family.opening_texts else next((i + 1 for i, token in enumerate(ids) if token == begin_id), None)
    end = next((i for i, token in enumerate(ids) if token == end_id), None)
    return None if begin is None or end is None else end - begin


@dataclass
class Requester:
    """A client that sends requests with budgets."""

    session: aiohttp.ClientSession
    url: str
    random: Random
    ids: dict[str, list[int]] = field(default_factory=dict)

    async def look_up(self) -> None:
        """Look up the ids of the tokens that biases make likely."""
        for text in ("analysis", SYMBOLS):
            answer = await self._post("/tokenize", {"model": "opens", "prompt": text, "add_special_tokens": False})
            self.ids[text] = answer["tokens"]
        self.ids |= {mark: [token_id] for token_id, mark in enumerate(MARKS, start=FIRST_UNUSED)}

    async def ask(self, index: int, counts: ThoughtCounts) -> None:
        """Send request number `index`; where the prompt opens the thought, every other one goes to both APIs."""
        name = (*FAMILIES,)[index % len(FAMILIES)]
        budget = BUDGETS[0] if index < len(FAMILIES) else self.random.randint(*BUDGETS)
        messages = [{"role": "user", "content": f"Think about {phrase(self.random, 5)} {SYMBOLS}"}]
        common = {"model": name, "messages": messages, "max_tokens": budget + ANSWER_TOKENS}
        uses_both_apis = name == "opened" and index % 2 == 1
        fields: dict[str, Any] = {"temperature": 0} if uses_both_apis else self._random_fields(FAMILIES[name])
        body = {**common, **fields, "thinking_token_budget": budget, "return_token_ids": True}
        body["chat_template_kwargs"] = {"enable_thinking": True}
        (choice,) = (await self._post("/v1/chat/completions", body))["choices"]
        message = choice["message"]
        counts.note(name, budget, choice["token_ids"], bool(message["content"] or message.get("tool_calls")))
        if not uses_both_apis:
            return
        thinking = {"type": "enabled", "budget_tokens": budget}
        answer = await self._post("/v1/messages", {**common, "temperature": 0, "thinking": thinking})
        blocks = {block["type"]: block.get("thinking", block.get("text")) for block in answer["content"]}
        counts.num_messages += 1
        if (blocks.get("thinking", ""), blocks.get("text", "")) != (message.get("reasoning", ""), message["content"]):
            counts.num_unequal += 1
            counts.problems.append(f"budget {budget}: {blocks} in messages, {message} in chats")

    def _random_fields(self, family: Family) -> dict[str, Any]:
        """Random further fields: tools, a response format, biases. A bias that opens a thought would open a second one
        too; a response format, which holds after the first thought, prevents it. Without one the end tokens are banned.
        """
        random = self.random
        biases = {str(token): 100.0 for text in family.opening_texts for token in self.ids[text][:1]}
        if random.random() < 0.5:
            biases |= {str(token): 6.0 for token in self.ids[SYMBOLS]}
        fields: dict[str, Any] = {"temperature": random.choice((0, 0.8, 1.2)), "logit_bias": biases}
        if random.random() < 0.3:
            function = {"name": "find", "description": "Finds.", "parameters": PLACE}
            fields |= {"tools": [{"type": "function", "function": function}]}
        elif random.random() < (0.9 if family.opening_texts else 0.3):
            shape = {"name": "place", "schema": PLACE}
            fields |= {"response_format": {"type": "json_schema", "json_schema": shape}}
        else:
            biases |= {str(token): -100.0 for token in ENDS}
        return fields

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.session.post(self.url + path, json=body) as reply:
            data = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{path}: {reply.status} {data[:400]!r} for {json.dumps(body)[:500]}")
            return json.loads(data)
