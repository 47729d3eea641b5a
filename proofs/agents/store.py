"""Conversations that are gone on with by an id, beside the same sent whole: the same prompt, the same answer.

Both APIs, streamed and not, with tools and without, over a restart of the server, also from an answer in the middle.
To another tenant every id reads as one that never was.
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
OF_ONE_ANSWER = ("x-request-id", "date")
Items = list[dict[str, Any]]


@section("store")
def kept(proof: Proof) -> None:
    """So many conversations, half of each before the server is started again."""
    count = proof.sized(quick=20, full=300)
    keys = proof.folder / "keys.json"
    alice, bob = add_key(keys, "alice"), add_key(keys, "bob")
    words = serve_words("--tool-format", "hermes", "--store", str(proof.folder / "kept.db"), "--keys-file", str(keys))
    talks = [Talk.begun(at, Random(proof.random.getrandbits(64))) for at in range(count)]
    strangers = OpenAIServers()
    for turns in (range(NUM_TURNS // 2), range(NUM_TURNS // 2, NUM_TURNS)):
        with started(proof.folder, *words, module="quire serve") as server:
            asyncio.run(_all(server, talks, turns, alice))
            asyncio.run(strangers.ask(server, talks, (alice, bob)))
    for told in [told for talk in talks for told in talk.wrong][:6] + strangers.told_apart[:3]:
        say(f"    {told}")
    proof.at_least("store_conversations", len(talks), count, f"of {NUM_TURNS} turns each")
    proof.at_least("store_turns", sum(talk.num_turns for talk in talks), NUM_TURNS * count)
    proof.at_least("store_calls", sum(talk.num_calls for talk in talks), count // 4, "that were gone on from")
    proof.at_least("store_forks", sum(talk.num_forks for talk in talks), count // 8, "from an answer in the middle")
    proof.at_least("store_strangers", strangers.num_tried, count, "ids of another tenant's")
    proof.equals("store_told_apart", len(strangers.told_apart), 0, "answered in another way than ids that never were")
    proof.equals("store_wrong", sum(bool(talk.wrong) for talk in talks) + len(strangers.told_apart), 0)


async def _all(server: Server, talks: Sequence["Talk"], turns: range, key: str) -> None:
    gate = asyncio.Semaphore(NUM_OPEN)

    async def one(session: aiohttp.ClientSession, talk: Talk) -> None:
        for turn in turns:
            async with gate:
                await talk.turn(Requester(session, server.url), turn)

    async with _session(key) as session:
        await asyncio.gather(*(one(session, talk) for talk in talks))


def _session(key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"x-api-key": key}, timeout=aiohttp.ClientTimeout(total=600))


@dataclass(frozen=True, slots=True)
class Requester:
    """Of one server, in one name."""

    session: aiohttp.ClientSession
    url: str

    async def ask(self, dialect: str, body: dict[str, Any]) -> "Told":
        async with self.session.post(self.url + PATHS[dialect], json=body) as reply:
            data = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{dialect}: {reply.status} {data[:300]!r} for {json.dumps(body)[:600]}")
        join, whole = JOINS[dialect]
        if not body.get("stream"):
            answer = json.loads(data)
            return Told(answer, whole(answer))
        events = events_of(data)
        return Told(events[-1]["response"] if dialect == RESPONSES else message_of_events(events), join(events))


@dataclass(frozen=True, slots=True)
class Told:
    """An answer as its client has it."""

    answer: dict[str, Any]
    said: Joined

    @property
    def num_prompt_tokens(self) -> int:
        usage = self.answer["usage"]
        return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))

    @property
    def output(self) -> Items:
        """What a client sends back of it."""
        if "output" in self.answer:
            output: Items = self.answer["output"]
            return output
        return [{"role": "assistant", "content": self.answer["content"]}]

    @property
    def calls(self) -> Items:
        found = self.answer.get("output") or self.answer.get("content") or ()
        return [one for one in found if one["type"] in ("function_call", "tool_use")]


@dataclass
class Talk:
    """One conversation: what its client would have to send, and what it goes on from."""

    number: int
    random: Random
    dialect: str
    always: dict[str, Any]
    """Of every body."""
    at_first: dict[str, Any]
    """What a thread remembers, and who sends everything sends again."""
    states: list[tuple[Items, str | None]] = field(default_factory=lambda: [([], None)])
    """After each answer: all messages, and its id."""
    calls: Items = field(default_factory=list)
    """That the last answer made, and nobody has answered."""
    num_turns: int = 0
    num_calls: int = 0
    num_forks: int = 0
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def begun(cls, number: int, random: Random) -> "Talk":
        """Of either API, with a system text, with a tool, or without."""
        dialect = (RESPONSES, MESSAGES)[number % 2]
        system, has_tools = random.choice((None, phrase(random))), random.random() < 0.5
        always: dict[str, Any] = {"model": "m", "temperature": 0}
        if dialect == RESPONSES:
            tool = {"type": "function", "name": "find", "description": "Finds.", "parameters": PLACE}
            always |= {"tools": [tool]} if has_tools else {}
            return cls(number, random, dialect, always | ({"instructions": system} if system else {}), {})
        own: dict[str, Any] = {"system": system} if system else {}
        own |= {"tools": [{"name": "find", "description": "Finds.", "input_schema": PLACE}]} if has_tools else {}
        return cls(number, random, dialect, always, own)

    async def turn(self, asking: Requester, turn: int) -> None:
        """The next one, asked both ways."""
        history, previous, new = self._next(turn)
        how = self._how()
        by_id = await asking.ask(self.dialect, {**self.going_on(previous), **how, **self.told_as(new)})
        whole = await asking.ask(self.dialect, {**self._whole(), **how, **self.told_as([*history, *new])})
        self.num_turns += 1
        self.calls = by_id.calls
        self.num_calls += bool(self.calls)
        self.states.append(([*history, *new, *by_id.output], by_id.answer["id"]))
        counts = (by_id.num_prompt_tokens, whole.num_prompt_tokens)
        if by_id.said != whole.said or counts[0] != counts[1]:
            about = f"conversation {self.number}, turn {turn}, {counts} tokens: {by_id.said}, {whole.said}"
            self.wrong.append(f"{about}; before: {history[-2:]}")

    def _next(self, turn: int) -> tuple[Items, str | None, Items]:
        """What was said, the id of its last answer, and what is said now."""
        history, previous = self.states[-1]
        results = [self._result(call) for call in self.calls]
        if turn > 1 and self.random.random() < 0.25 and not results:
            history, previous = self.states[self.random.randrange(1, len(self.states) - 1)]
            self.num_forks += 1
            results = []
        said = {"role": "user", "content": phrase(self.random)}
        if self.dialect == MESSAGES and results:
            return history, previous, [{"role": "user", "content": results}, said]
        return history, previous, [*results, said]

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        output = phrase(self.random)
        if self.dialect == RESPONSES:
            return {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        return {"type": "tool_result", "tool_use_id": call["id"], "content": output}

    def _how(self) -> dict[str, Any]:
        """As both are asked. Some answers are cut, in the middle of a call, too."""
        most, has_tools = self.random.randint(*MAX_TOKENS), "tools" in {**self.always, **self.at_first}
        how: dict[str, Any] = {"stream": True} if self.random.random() < 0.5 else {}
        if has_tools and self.random.random() < 0.6:
            most = self.random.choice((most, MAX_CALL_TOKENS, MAX_CALL_TOKENS))
            how["tool_choice"] = "required" if self.dialect == RESPONSES else {"type": "any"}
        return {**how, "max_output_tokens" if self.dialect == RESPONSES else "max_tokens": most}

    def going_on(self, previous: str | None) -> dict[str, Any]:
        """A body without its messages: what it goes on from."""
        if self.dialect == RESPONSES:
            return {**self.always, **({"previous_response_id": previous} if previous else {})}
        if previous is None:
            return {**self.always, **self.at_first, "thread": {"type": "create"}}
        return {**self.always, "thread": {"type": "continue", "previous_message_id": previous}}

    def _whole(self) -> dict[str, Any]:
        return {**self.always, **self.at_first, **({"store": False} if self.dialect == RESPONSES else {})}

    def told_as(self, items: Items) -> dict[str, Any]:
        """Messages in the field that the API has for them."""
        return {"input" if self.dialect == RESPONSES else "messages": items}


@dataclass
class OpenAIServers:
    """Another tenant, who has somehow got hold of an id."""

    num_tried: int = 0
    told_apart: list[str] = field(default_factory=list)

    async def ask(self, server: Server, talks: Sequence[Talk], keys: tuple[str, str]) -> None:
        """With each conversation's last id, and with one that never was; its owner is let in."""
        alice, bob = keys
        async with _session(alice) as owner, _session(bob) as stranger:
            for talk in talks:
                known = talk.states[-1][1] or ""
                unknown = known[:-4] + ("aaaa" if known[-4:] != "aaaa" else "bbbb")
                status, *_ = await self._told(owner, server.url, talk, known)
                theirs, none = [await self._told(stranger, server.url, talk, one) for one in (known, unknown)]
                self.num_tried += status == 200
                if theirs != none or theirs[0] not in (400, 404):
                    self.told_apart.append(f"{theirs} beside {none}")

    @staticmethod
    async def _told(session: aiohttp.ClientSession, url: str, talk: Talk, known: str) -> tuple[int, Any, bytes]:
        """Status, headers and body, without what is of one answer alone and without the id itself."""
        words = [{"role": "user", "content": "and?"}]
        how = {"max_output_tokens": 1, "store": False} if talk.dialect == RESPONSES else {"max_tokens": 1}
        body = {**talk.going_on(known), **how, **talk.told_as(words)}
        async with session.post(url + PATHS[talk.dialect], json=body) as reply:
            data = (await reply.read()).replace(known.encode(), b"ID")
            headers = sorted((name.lower(), value) for name, value in reply.headers.items())
            return reply.status, [one for one in headers if one[0] not in OF_ONE_ANSWER], data
