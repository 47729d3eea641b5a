"""Conversations of made-up clients: such whose prompts are unstable, each in its own way, and such that are not.

The cases stand in `tests/data/prefix_corpus.json`. What is in braces is drawn anew: in a system text and in tools for
every request, in what a user says once, when it is said. The same seed makes the same conversation.
"""

import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

FILE = Path(__file__).parents[2] / "data" / "prefix_corpus.json"
_READ: dict[str, Any] = json.loads(FILE.read_text())
WORDS: list[str] = _READ["words"].split()
PEOPLE = ("Alice", "Bruno", "Chandra", "Dolores", "Emeka", "Farah", "Goro", "Hanneke", "Ivana", "Jorge", "Kemi", "Luis")
SKILLS = ("search", "summarise", "translate", "draw", "calculate", "remember", "browse", "compile")


def sentence(dice: random.Random, num_words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(num_words)).capitalize() + "."


RULES = "\n".join(f"{one}. {sentence(random.Random(one), 11)}" for one in (random.Random(7).sample(range(20, 99), 14)))
"""The long text that all prompts of a client share."""
INTRO = "You are a careful helper of a small library, and you answer in one or two friendly sentences.\n" + RULES
FEW_TOOLS, NUM_TOOLS = 2, 7
NUM_REQUESTS = 7

Message = dict[str, Any]


@dataclass(frozen=True)
class Body:
    """What a client sends: one request."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    answer: Message | None = None
    """What it gets, as the client will tell it; None: that does not matter."""


def corpus(kind: str) -> list[dict[str, Any]]:
    """The cases, `unstable` or `stable`."""
    cases: list[dict[str, Any]] = _READ[kind]
    return cases


class Drawn:
    """Fills braces."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.num_drawn = 0
        self._now = datetime(2026, 3, 2, 8, 15, 30, tzinfo=UTC)

    def text(self, pattern: str) -> str:
        """The pattern with something in each of its braces."""
        self.num_drawn += 1
        self._now += timedelta(days=self._dice.randrange(1, 9), seconds=self._dice.randrange(1, 80_000))
        fields = {name for _, name, _, _ in string.Formatter().parse(pattern) if name}
        return pattern.format(**{name: getattr(self, "_" + name)() for name in sorted(fields)})

    def _rules(self) -> str:
        return RULES

    def _intro(self) -> str:
        return INTRO

    def _question(self) -> str:
        return sentence(self._dice, self._dice.randrange(4, 12))

    def _text(self) -> str:
        return "\n".join(sentence(self._dice, 14) for _ in range(4))

    def _moment(self) -> str:
        return self._now.isoformat(timespec="seconds")

    def _micro(self) -> str:
        return (self._now + timedelta(microseconds=self._dice.randrange(10**6))).isoformat(timespec="microseconds")

    def _clock(self) -> str:
        return self._now.strftime("%H:%M:%S")

    def _ampm(self) -> str:
        return self._now.strftime("%I:%M %p")

    def _epoch(self) -> str:
        return str(int(self._now.timestamp()))

    def _date(self) -> str:
        return self._now.strftime("%Y-%m-%d")

    def _words_date(self) -> str:
        return self._now.strftime("%A, %d %B %Y")

    def _dots(self) -> str:
        return self._now.strftime("%d.%m.%Y")

    def _mail_date(self) -> str:
        return self._now.strftime("%a, %d %b %Y %H:%M:%S GMT")

    def _uuid(self) -> str:
        return str(UUID(int=self._dice.getrandbits(128), version=4))

    def _hex(self) -> str:
        return f"{self._dice.getrandbits(48) | 1 << 47:012x}7"

    def _sha(self) -> str:
        return f"{self._dice.getrandbits(152):038x}0e"

    def _hex3(self) -> str:
        return f"{self._dice.getrandbits(8):02x}{self._dice.randrange(10)}"

    def _nano(self) -> str:
        letters = "".join(self._dice.choice(string.ascii_letters + string.digits + "_-") for _ in range(18))
        return f"a{letters}7Z"

    def _letters(self) -> str:
        return "".join(self._dice.choice(string.ascii_lowercase) for _ in range(7))

    def _pair(self) -> str:
        return f"{self._dice.choice(WORDS)}-{self._dice.choice(WORDS)}"

    def _adjective(self) -> str:
        return self._dice.choice(WORDS)

    def _person(self) -> str:
        return self._dice.choice(PEOPLE)

    def _count(self) -> str:
        return str(self._dice.randrange(10, 9000))

    def _thousands(self) -> str:
        return f"{self._dice.randrange(1000, 90_000):,}"

    def _skills(self) -> str:
        return ", ".join(self._dice.sample(SKILLS, len(SKILLS)))

    def _context(self) -> str:
        fields = [
            ("app", "desk"),
            ("place", "harbour"),
            ("language", "English"),
            ("tone", "friendly"),
            ("size", "wide"),
        ]
        return json.dumps(dict(self._dice.sample(fields, len(fields))))


def tools_of(mode: str, dice: random.Random, drawn: Drawn) -> list[dict[str, Any]]:
    """The tools of one request, as this client sends them."""
    made = [_tool(number) for number in range(FEW_TOOLS if mode == "few" else NUM_TOOLS if mode else 0)]
    match mode:
        case "shuffled":
            dice.shuffle(made)
        case "rotated":
            turn = drawn.num_drawn % len(made)
            made = made[turn:] + made[:turn]
        case "keys":
            for tool in made:
                properties = list(tool["function"]["parameters"]["properties"].items())
                dice.shuffle(properties)
                tool["function"]["parameters"]["properties"] = dict(properties)
        case "enums":
            dice.shuffle(made[0]["function"]["parameters"]["properties"]["where"]["enum"])
        case "dated":
            made[0]["function"]["description"] = drawn.text("Looks things up. Today is {words_date}.")
        case "named":
            made[0]["function"]["description"] = drawn.text("Looks things up in store {uuid}.")
    return made


def _tool(number: int) -> dict[str, Any]:
    dice = random.Random(1000 + number)
    properties: dict[str, Any] = {
        "where": {"type": "string", "enum": list(WORDS[number : number + 6])},
        WORDS[20 + number]: {"type": "string", "description": sentence(dice, 6)},
        WORDS[40 + number]: {"type": "integer", "description": sentence(dice, 6)},
        WORDS[60 + number]: {"type": "boolean", "description": sentence(dice, 6)},
    }
    function = {
        "name": f"{WORDS[number * 7]}_{WORDS[number * 5 + 1]}",
        "description": sentence(dice, 9),
        "parameters": {"type": "object", "properties": properties, "required": ["where"]},
    }
    return {"type": "function", "function": function}


@dataclass
class Talk:
    """One conversation, as the client remembers it."""

    system: str
    messages: list[Message] = field(default_factory=list)


class Client:
    """Plays a case."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        self._case = case
        self._dice = random.Random(f"{case['name']}/{seed}")
        self._drawn = Drawn(self._dice)
        self._tools = case.get("tools", "")
        self._system = case.get("system", "{intro}")
        self._talk = self._new_talk()
        self._others = [self._new_talk()]

    def unstable(self, num_requests: int = NUM_REQUESTS) -> Iterator[Body]:
        """Requests whose prompts differ where they need not."""
        for _ in range(num_requests):
            if self._case.get("talk") != "grow":
                self._talk = self._new_talk()
            self._ask()
            if self._case.get("history") == "cleared":
                yield self._body()
                self._call()
            answer = self._answer()
            yield self._body(answer)
            self._talk.messages.append(answer)

    def stable(self) -> Iterator[Body]:
        """Requests of conversations that live as conversations do."""
        for op in self._case["ops"]:
            name, _, rest = op.partition(" ")
            if self._play(name, rest):
                answer = self._answer()
                yield self._body(answer)
                self._talk.messages.append(answer)

    def _play(self, name: str, rest: str) -> bool:
        """One step; whether a request comes of it."""
        steps: dict[str, Callable[[], object]] = {
            "ask": self._ask,
            "call": self._call_and_go_on,
            "again": self._talk.messages.pop,
            "edit": self._edit,
        }
        if name in steps:
            steps[name]()
            return True
        self._change(name, rest)
        return False

    def _change(self, name: str, rest: str) -> None:
        talk = self._talk
        match name:
            case "new":
                self._talk = self._new_talk()
            case "swap":
                self._others.append(talk)
                self._talk = self._others.pop(0)
            case "back":
                del talk.messages[-2 * int(rest) :]
            case "system":
                self._system = rest
                self._talk = self._new_talk()
            case "tools":
                self._tools = rest
            case "cut":
                last = talk.messages[-1]
                last["content"] = last["content"][: len(last["content"]) // 2]
            case "summary":
                talk.messages[:] = [{"role": "user", "content": self._drawn.text("So far: {text}")}, self._answer()]

    def _new_talk(self) -> Talk:
        shots = [
            message
            for number in range(self._case.get("shots", 0))
            for message in (
                {"role": "user", "content": sentence(random.Random(number), 8)},
                {"role": "assistant", "content": sentence(random.Random(number + 50), 12)},
            )
        ]
        return Talk(self._system, shots)

    def _ask(self) -> None:
        text = self._drawn.text(self._case.get("ask", "{question}"))
        self._talk.messages.append({"role": "user", "content": text})

    def _edit(self) -> None:
        del self._talk.messages[-2:]
        self._ask()

    def _answer(self) -> Message:
        told: Message = {"role": "assistant", "content": sentence(self._dice, self._dice.randrange(20, 40))}
        if self._case.get("history") == "thoughts":
            told["reasoning_content"] = sentence(self._dice, 25)
        return told

    def _call_and_go_on(self) -> None:
        self._talk.messages.pop()
        self._call()

    def _call(self) -> None:
        """The assistant calls a tool, and hears what came of it."""
        call_id = f"call_{len(self._talk.messages):09d}"
        function = {"name": f"{WORDS[0]}_{WORDS[1]}", "arguments": json.dumps({"where": self._dice.choice(WORDS)})}
        self._talk.messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": self._drawn.text(self._case.get("result", "{text}"))},
        ]

    def _body(self, answer: Message | None = None) -> Body:
        """The request as it is sent now."""
        system = [self._case["first"], self._talk.system] if "first" in self._case else [self._talk.system]
        told = [{"role": "system", "content": self._drawn.text(text)} for text in system if text]
        return Body([*told, *self._history()], tools_of(self._tools, self._dice, self._drawn), answer and dict(answer))

    def _history(self) -> list[Message]:
        messages = [dict(message) for message in self._talk.messages]
        match self._case.get("history"):
            case "ago":
                for at, message in enumerate(messages):
                    message["content"] = f"[{10 + 7 * (len(messages) - at)} minutes ago] {message['content']}"
            case "window":
                messages = messages[-5:]
            case "cleared":
                results = [message for message in messages if message["role"] == "tool"]
                for message in results[:-1]:
                    message["content"] = "[cleared]"
            case "thoughts":
                said = [message for message in messages if message["role"] == "assistant"]
                for message in said[:-1]:
                    message.pop("reasoning_content", None)
            case "reminder":
                messages[-1]["content"] += "\n# Rules:\n" + RULES[:400]
        return messages


def unstable_bodies(case: dict[str, Any], seed: int = 0) -> list[Body]:
    """The requests of an unstable case."""
    return list(Client(case, seed).unstable())


def stable_bodies(case: dict[str, Any], seed: int = 0) -> list[Body]:
    """The requests of a stable one."""
    return list(Client(case, seed).stable())


def without_unstable_line(case: dict[str, Any], body: Body) -> Body:
    """The same request without the line of its system text that is another every time."""
    messages = list(body.messages)
    if "first" in case:
        return replace(body, messages=messages[1:])
    lines, place = messages[0]["content"].split("\n"), 0
    for line in case["system"].split("\n"):
        fixed = {"{rules}": RULES, "{intro}": INTRO}.get(line)
        if fixed is None and "{" in line.replace("{{", ""):
            del lines[place]
        else:
            place += 1 if fixed is None else fixed.count("\n") + 1
    return replace(body, messages=[{**messages[0], "content": "\n".join(lines)}, *messages[1:]])
