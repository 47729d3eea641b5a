"""Stored conversations: a turn that continues by an id has the same prompt and answer as one with the full history.

It tries both APIs that store, streamed and not, with and without tools, a restart of the server, and forks from an
earlier answer. For another tenant, an id that exists gets the same reply as an id that does not exist.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.agents.joined import JOINS, MESSAGES, RESPONSES, Joined, events_of, message_of_events
from proofs.agents.prompts.bodies import PLACE
from proofs.api.load import Server, phrase, serve_words, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

NUM_TURNS = 4
MAX_TOKENS = (1, 40)
MAX_CALL_TOKENS = 60
NUM_OPEN = 12
PATHS = {RESPONSES: "/v1/responses", MESSAGES: "/v1/messages"}
CHANGING_HEADERS = ("x-request-id", "date")
Items = list[dict[str, Any]]


@section("store")
def store(proof: Proof) -> None:
    """Hold conversations, half of the turns of each before the server is restarted."""
    count = proof.sized(quick=20, full=300)
    keys = proof.folder / "keys.json"
    alice, bob = add_key(keys, "alice"), add_key(keys, "bob")
    options = serve_words("--tool-format", "hermes", "--store", str(proof.folder / "kept.db"), "--keys-file", str(keys))
    chats = [Chat.start(number, Random(proof.random.getrandbits(64))) for number in range(count)]
    foreign = ForeignRequests()
    for turns in (range(NUM_TURNS // 2), range(NUM_TURNS // 2, NUM_TURNS)):
        with started(proof.folder, *options, module="quire serve") as server:
            asyncio.run(_run_turns(server, chats, turns, alice))
            asyncio.run(foreign.ask(server, chats, (alice, bob)))
    for message in [message for chat in chats for message in chat.problems][:6] + foreign.differing[:3]:
        say(f"    {message}")
    proof.at_least("store_conversations", len(chats), count, f"of {NUM_TURNS} turns each")
    proof.at_least("store_turns", sum(chat.num_turns for chat in chats), NUM_TURNS * count)
    proof.at_least("store_calls", sum(chat.num_calls for chat in chats), count // 4, "with results in the next turn")
    proof.at_least("store_forks", sum(chat.num_forks for chat in chats), count // 8, "from an answer in the middle")
    proof.at_least("store_strangers", foreign.num_tried, count, "ids of another tenant")
    proof.equals("store_told_apart", len(foreign.differing), 0, "replies that differ from the reply to an unknown id")
    proof.equals("store_wrong", sum(bool(chat.problems) for chat in chats) + len(foreign.differing), 0)


async def _run_turns(server: Server, chats: Sequence["Chat"], turns: range, key: str) -> None:
    gate = asyncio.Semaphore(NUM_OPEN)

    async def run(session: aiohttp.ClientSession, chat: Chat) -> None:
        for turn in turns:
            async with gate:
                await chat.turn(Requester(session, server.url), turn)

    async with _session(key) as session:
        await asyncio.gather(*(run(session, chat) for chat in chats))


def _session(key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"x-api-key": key}, timeout=aiohttp.ClientTimeout(total=600))


@dataclass(frozen=True, slots=True)
class Requester:
    """A client of one server, with one key."""

    session: aiohttp.ClientSession
    url: str

    async def ask(self, dialect: str, body: dict[str, Any]) -> "Answer":
        async with self.session.post(self.url + PATHS[dialect], json=body) as reply:
            data = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{dialect}: {reply.status} {data[:300]!r} for {json.dumps(body)[:600]}")
        join, read_whole = JOINS[dialect]
        if not body.get("stream"):
            answer = json.loads(data)
            return Answer(answer, read_whole(answer))
        events = events_of(data)
        return Answer(events[-1]["response"] if dialect == RESPONSES else message_of_events(events), join(events))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as its client has it: the raw object, and its joined form."""

    answer: dict[str, Any]
    joined: Joined

    @property
    def num_prompt_tokens(self) -> int:
        usage = self.answer["usage"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(int(usage.get(name, 0)) for name in names)

    @property
    def output(self) -> Items:
        """What a client sends back of the answer in the next turn."""
        if "output" in self.answer:
            output: Items = self.answer["output"]
            return output
        return [{"role": "assistant", "content": self.answer["content"]}]

    @property
    def calls(self) -> Items:
        items = self.answer.get("output") or self.answer.get("content") or ()
        return [item for item in items if item["type"] in ("function_call", "tool_use")]


@dataclass
class Chat:
    """One conversation: the history that a client without a store would send, and the ids of stored answers."""

    number: int
    random: Random
    dialect: str
    common_fields: dict[str, Any]
    """The fields of every body."""
    stored_fields: dict[str, Any]
    """Fields that a thread stores: sent with its first turn, and with every turn that has the full history."""
    states: list[tuple[Items, str | None]] = field(default_factory=lambda: [([], None)])
    """After each answer: all messages, and the answer's id."""
    calls: Items = field(default_factory=list)
    """The tool calls of the last answer, which have no result yet."""
    num_turns: int = 0
    num_calls: int = 0
    num_forks: int = 0
    problems: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, number: int, random: Random) -> "Chat":
        """A conversation with either API, with or without a system prompt, with or without a tool."""
        dialect = (RESPONSES, MESSAGES)[number % 2]
        system, has_tools = random.choice((None, phrase(random))), random.random() < 0.5
        common: dict[str, Any] = {"model": "m", "temperature": 0}
        if dialect == RESPONSES:
            tool = {"type": "function", "name": "find", "description": "Finds.", "parameters": PLACE}
            common |= {"tools": [tool]} if has_tools else {}
            return cls(number, random, dialect, common | ({"instructions": system} if system else {}), {})
        stored: dict[str, Any] = {"system": system} if system else {}
        stored |= {"tools": [{"name": "find", "description": "Finds.", "input_schema": PLACE}]} if has_tools else {}
        return cls(number, random, dialect, common, stored)

    async def turn(self, requester: Requester, number: int) -> None:
        """Send the next turn both ways, by an id and with the full history, and compare."""
        history, previous, new = self._next(number)
        fields = self._random_fields()
        by_id = await requester.ask(self.dialect, {**self.continuation(previous), **fields, **self.messages_field(new)})
        full = await requester.ask(self.dialect, {**self._full_body(), **fields, **self.messages_field(history + new)})
        self.num_turns += 1
        self.calls = by_id.calls
        self.num_calls += bool(self.calls)
        self.states.append(([*history, *new, *by_id.output], by_id.answer["id"]))
        counts = (by_id.num_prompt_tokens, full.num_prompt_tokens)
        if by_id.joined != full.joined or counts[0] != counts[1]:
            message = f"conversation {self.number}, turn {number}, {counts} tokens: {by_id.joined}, {full.joined}"
            self.problems.append(f"{message}; before: {history[-2:]}")

    def _next(self, number: int) -> tuple[Items, str | None, Items]:
        """The history of the next turn, the id of its last answer, and the new messages."""
        history, previous = self.states[-1]
        results = [self._result(call) for call in self.calls]
        if number > 1 and self.random.random() < 0.25 and not results:
            history, previous = self.states[self.random.randrange(1, len(self.states) - 1)]
            self.num_forks += 1
            results = []
        message = {"role": "user", "content": phrase(self.random)}
        if self.dialect == MESSAGES and results:
            return history, previous, [{"role": "user", "content": results}, message]
        return history, previous, [*results, message]

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        output = phrase(self.random)
        if self.dialect == RESPONSES:
            return {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        return {"type": "tool_result", "tool_use_id": call["id"], "content": output}

    def _random_fields(self) -> dict[str, Any]:
        """Random fields of both requests. Some answers are cut, even in the middle of a call."""
        max_tokens, has_tools = self.random.randint(*MAX_TOKENS), "tools" in self.common_fields | self.stored_fields
        fields: dict[str, Any] = {"stream": True} if self.random.random() < 0.5 else {}
        if has_tools and self.random.random() < 0.6:
            max_tokens = self.random.choice((max_tokens, MAX_CALL_TOKENS, MAX_CALL_TOKENS))
            fields["tool_choice"] = "required" if self.dialect == RESPONSES else {"type": "any"}
        return {**fields, "max_output_tokens" if self.dialect == RESPONSES else "max_tokens": max_tokens}

    def continuation(self, previous: str | None) -> dict[str, Any]:
        """A body that continues after the answer `previous`, without its messages."""
        if self.dialect == RESPONSES:
            return {**self.common_fields, **({"previous_response_id": previous} if previous else {})}
        if previous is None:
            return {**self.common_fields, **self.stored_fields, "thread": {"type": "create"}}
        return {**self.common_fields, "thread": {"type": "continue", "previous_message_id": previous}}

    def _full_body(self) -> dict[str, Any]:
        return {**self.common_fields, **self.stored_fields, **({"store": False} if self.dialect == RESPONSES else {})}

    def messages_field(self, items: Items) -> dict[str, Any]:
        """The field of the API that holds messages."""
        return {"input" if self.dialect == RESPONSES else "messages": items}


@dataclass
class ForeignRequests:
    """Requests of another tenant who knows the id of an answer that is not theirs."""

    num_tried: int = 0
    differing: list[str] = field(default_factory=list)

    async def ask(self, server: Server, chats: Sequence[Chat], keys: tuple[str, str]) -> None:
        """Continue each conversation's last id, and an unknown id; only the owner may."""
        alice, bob = keys
        async with _session(alice) as owner, _session(bob) as stranger:
            for chat in chats:
                known_id = chat.states[-1][1] or ""
                unknown_id = known_id[:-4] + ("aaaa" if known_id[-4:] != "aaaa" else "bbbb")
                status, *_ = await self._reply(owner, server.url, chat, known_id)
                replies = [await self._reply(stranger, server.url, chat, name) for name in (known_id, unknown_id)]
                self.num_tried += status == 200
                if replies[0] != replies[1] or replies[0][0] not in (400, 404):
                    self.differing.append(f"known id: {replies[0]}, unknown id: {replies[1]}")

    @staticmethod
    async def _reply(session: aiohttp.ClientSession, url: str, chat: Chat, previous: str) -> tuple[int, Any, bytes]:
        """Status, headers and body of the reply, without the id itself and what differs between any two replies."""
        messages = [{"role": "user", "content": "and?"}]
        fields = {"max_output_tokens": 1, "store": False} if chat.dialect == RESPONSES else {"max_tokens": 1}
        body = {**chat.continuation(previous), **fields, **chat.messages_field(messages)}
        async with session.post(url + PATHS[chat.dialect], json=body) as reply:
            data = (await reply.read()).replace(previous.encode(), b"ID")
            headers = sorted((name.lower(), value) for name, value in reply.headers.items())
            return reply.status, [header for header in headers if header[0] not in CHANGING_HEADERS], data
