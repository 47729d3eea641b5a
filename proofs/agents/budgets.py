"""Thoughts with a budget: none has more tokens than it may, whoever opens it, and an answer follows.

The test model's weights with the templates of three families that think: the model opens its thought, the prompt does,
or there are channels. Their marks are tokens that the model has and nobody uses, under other names. What the model does
not do by itself is made likely by biases: opening a thought, and characters of several tokens.
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
TO_END_A_CHARACTER = 3
ANSWER_TOKENS = 64
ENDS = (0, 2)
"""Tokens with which the test model ends an answer."""
NUM_OPEN = 16
MARKS = (
    "<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
    "<|constrain|>",
)  # fmt: skip
"""In place of tokens 3 and on."""
FIRST_UNUSED = 3
SYMBOLS = "\U0001f600日本語한국"
"""Characters that take several tokens each."""


@dataclass(frozen=True, slots=True)
class Family:
    """A template, what stands directly around its thoughts, and what opens one."""

    template: str
    before: str
    behind: str
    opening: tuple[str, ...] = ()
    """What has to be made likely so that there is a thought; none where the prompt opens it."""


FAMILIES = {
    "opens": Family("Qwen-Qwen3-0.6B", "<think>", "</think>", ("<think>",)),
    "opened": Family("Qwen-QwQ-32B", "<think>", "</think>"),
    "channels": Family("openai-gpt-oss-120b", "<|message|>", "<|end|>", ("<|channel|>", "analysis", "<|message|>")),
}


@section("budgets")
def budgets(proof: Proof) -> None:
    """All families at one server."""
    count = proof.sized(quick=12, full=200)
    folders = [thinking_model(proof.folder / name, family.template) for name, family in FAMILIES.items()]
    names = [word for name in FAMILIES for word in ("--served-model-name", name)]
    words = (*map(str, folders), *names, "--memory", "4GiB", "--max-model-len", "2048", "--max-running", str(NUM_OPEN))
    with started(proof.folder, *words, module="quire serve") as server:
        seen = asyncio.run(_asked(server, count, proof.random))
    for told in seen.wrong[:6]:
        say(f"    {told}")
    say(f"    reached: {seen.num_reached}, with text behind: {seen.num_texts}, cut in a character: {seen.num_late}")
    proof.at_least("budget_requests", seen.num_asked, count)
    proof.at_least("budget_families", len(seen.num_reached), len(FAMILIES), "whose thoughts came to their budget")
    proof.at_least("budget_reached", sum(seen.num_reached.values()), count // 2, "thoughts that came to their budget")
    proof.at_least("budget_texts", seen.num_texts, count // 2, "answers that went on behind their thought")
    proof.at_least("budget_messages", seen.num_messages, count // 8, "the same through /v1/messages")
    proof.equals("budget_messages_unequal", seen.num_unequal, 0, "thoughts in messages that are not those in chats")
    proof.equals("budget_overrun", seen.num_overrun, 0, "tokens beyond budget, mark and 3 to end a character")


def thinking_model(folder: Path, template: str) -> Path:
    """The test model under another template, with that family's marks among its tokens."""
    source = smollm2_directory()
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in ("tokenizer.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    added = {one["id"]: one for one in tokenizer["added_tokens"]}
    for token_id, mark in enumerate(MARKS, start=FIRST_UNUSED):
        del tokenizer["model"]["vocab"][added[token_id]["content"]]
        tokenizer["model"]["vocab"][mark] = token_id
        added[token_id]["content"] = mark
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text((published_templates() / f"{template}.jinja").read_text())
    return folder


async def _asked(server: Server, count: int, random: Random) -> "Seen":
    seen, gate = Seen(), asyncio.Semaphore(NUM_OPEN)

    async def one(asking: "Requester", at: int) -> None:
        async with gate:
            await asking.ask(at, seen)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200)) as session:
        asking = Requester(session, server.url, random)
        await asking.look_up()
        await asyncio.gather(*(one(asking, at) for at in range(count)))
    return seen


@dataclass
class Seen:
    """What thoughts were like."""

    num_asked: int = 0
    num_reached: dict[str, int] = field(default_factory=dict)
    num_texts: int = 0
    num_late: int = 0
    num_messages: int = 0
    num_unequal: int = 0
    num_overrun: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, name: str, budget: int, ids: Sequence[int], has_text: bool) -> None:
        """The ids of an answer to a request with this budget."""
        self.num_asked += 1
        length = thought_length(ids, FAMILIES[name])
        if length is None:
            self.wrong.append(f"{name}, budget {budget}: no thought, or none that ended, in {list(ids[:9])}")
            return
        if length >= budget:
            self.num_reached[name] = self.num_reached.get(name, 0) + 1
        self.num_texts += has_text
        self.num_late += length > budget
        if length > budget + TO_END_A_CHARACTER:
            self.num_overrun += length - budget - TO_END_A_CHARACTER
            self.wrong.append(f"{name}, budget {budget}: {length} tokens")


def thought_length(ids: Sequence[int], family: Family) -> int | None:
    """Tokens between the marks; None where a mark is missing, which is no thought, or one without an end."""
    before, behind = (FIRST_UNUSED + MARKS.index(mark) for mark in (family.before, family.behind))
    begin = 0 if not family.opening else next((at + 1 for at, one in enumerate(ids) if one == before), None)
    end = next((at for at, one in enumerate(ids) if one == behind), None)
    return None if begin is None or end is None else end - begin


@dataclass
class Requester:
    """Requests with budgets."""

    session: aiohttp.ClientSession
    url: str
    random: Random
    ids: dict[str, list[int]] = field(default_factory=dict)

    async def look_up(self) -> None:
        """Which tokens are to be made likely."""
        for text in ("analysis", SYMBOLS):
            told = await self._post("/tokenize", {"model": "opens", "prompt": text, "add_special_tokens": False})
            self.ids[text] = told["tokens"]
        self.ids |= {mark: [at] for at, mark in enumerate(MARKS, start=FIRST_UNUSED)}

    async def ask(self, at: int, seen: Seen) -> None:
        """One of them; where the prompt opens the thought, some are asked through both APIs."""
        name = (*FAMILIES,)[at % len(FAMILIES)]
        budget = BUDGETS[0] if at < len(FAMILIES) else self.random.randint(*BUDGETS)
        said = [{"role": "user", "content": f"Think about {phrase(self.random, 5)} {SYMBOLS}"}]
        common = {"model": name, "messages": said, "max_tokens": budget + ANSWER_TOKENS}
        is_both = name == "opened" and at % 2 == 1
        more: dict[str, Any] = {"temperature": 0} if is_both else self._more(FAMILIES[name])
        body = {**common, **more, "thinking_token_budget": budget, "return_token_ids": True}
        body["chat_template_kwargs"] = {"enable_thinking": True}
        (choice,) = (await self._post("/v1/chat/completions", body))["choices"]
        message = choice["message"]
        seen.note(name, budget, choice["token_ids"], bool(message["content"] or message.get("tool_calls")))
        if not is_both:
            return
        thinking = {"type": "enabled", "budget_tokens": budget}
        told = await self._post("/v1/messages", {**common, "temperature": 0, "thinking": thinking})
        blocks = {block["type"]: block.get("thinking", block.get("text")) for block in told["content"]}
        seen.num_messages += 1
        if (blocks.get("thinking", ""), blocks.get("text", "")) != (message.get("reasoning", ""), message["content"]):
            seen.num_unequal += 1
            seen.wrong.append(f"budget {budget}: {blocks} in messages, {message} in chats")

    def _more(self, family: Family) -> dict[str, Any]:
        """Beside the budget: tools, a shape, biases. A bias that opens a thought opens the next one too: with a shape,
        which holds behind the first, there is an answer instead. Without one the model may not end at once.
        """
        random = self.random
        biases = {str(token): 100.0 for text in family.opening for token in self.ids[text][:1]}
        if random.random() < 0.5:
            biases |= {str(token): 6.0 for token in self.ids[SYMBOLS]}
        more: dict[str, Any] = {"temperature": random.choice((0, 0.8, 1.2)), "logit_bias": biases}
        if random.random() < 0.3:
            function = {"name": "find", "description": "Finds.", "parameters": PLACE}
            more |= {"tools": [{"type": "function", "function": function}]}
        elif random.random() < (0.9 if family.opening else 0.3):
            shape = {"name": "place", "schema": PLACE}
            more |= {"response_format": {"type": "json_schema", "json_schema": shape}}
        else:
            biases |= {str(token): -100.0 for token in ENDS}
        return more

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.session.post(self.url + path, json=body) as reply:
            data = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{path}: {reply.status} {data[:400]!r} for {json.dumps(body)[:500]}")
            return json.loads(data)
