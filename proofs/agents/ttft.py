"""Time to the first token of an agent's second turn, over that of its first: the coder model behind `quire serve`.

The prompt is like an agent's, in size and in kind: twenty tools and a long system text. Each conversation begins with
other words, so that it finds no cached blocks of another conversation.
"""

import json
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from random import Random
from typing import Any

from benchmarks.packaged_models import coder_file
from benchmarks.record import say
from benchmarks.servers import HOST
from proofs.agents.joined import message_of_events
from proofs.agents.prompts.bodies import SCHEMAS
from proofs.api.load import WORDS, Server, phrase, started
from proofs.framework.proof import Proof, section

NUM_TOOLS = 20
ANSWER_TOKENS = 48
PATH = "/v1/messages"


@section("first token of turn 2")
def ttft(proof: Proof) -> None:
    """Hold conversations of two turns, one after the other."""
    num_tokens, count = proof.sized(quick=4_000, full=16_000), proof.sized(quick=1, full=3)
    command = (str(coder_file()), "--served-model-name", "coder", "--memory", "8GiB", "--max-model-len", "20480")
    with started(proof.folder, *command, module="quire serve") as server:
        requester = Requester(server)
        requester.turn(_body(proof.random, "Say hello.", 500, requester))  # a warm-up: one-time costs belong to no turn
        turns = [requester.conversation(_body(proof.random, "", num_tokens, requester)) for _ in range(count)]
    for first, second in turns:
        say(f"    {first.line}; {second.line}")
    ratios = [second.first_s / first.first_s for first, second in turns]
    proof.at_least("ttft_prompt_tokens", min(first.num_prompt_tokens for first, _ in turns), 0.95 * num_tokens)
    proof.at_most("ttft_turn1_cached", max(first.num_cached_tokens for first, _ in turns), 64, "of turn 1")
    share = min(second.num_cached_tokens / second.num_prompt_tokens for _, second in turns)
    proof.report("ttft_turn2_cached_share", share)
    proof.report("ttft_turn1_s", max(first.first_s for first, _ in turns))
    proof.report("ttft_turn2_s", max(second.first_s for _, second in turns))
    proof.at_most("ttft_turn2", max(ratios), 0.1, "of turn 1")


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer, and the time to its first token."""

    message: dict[str, Any]
    first_s: float
    """Seconds from the request to the first content of the answer."""

    @property
    def num_cached_tokens(self) -> int:
        return int(self.message["usage"]["cache_read_input_tokens"])

    @property
    def num_prompt_tokens(self) -> int:
        usage = self.message["usage"]
        return int(usage["input_tokens"] + usage["cache_creation_input_tokens"]) + self.num_cached_tokens

    @property
    def line(self) -> str:
        kinds = [block["type"] for block in self.message["content"]]
        return f"{self.first_s:.2f} s for {self.num_prompt_tokens} tokens, {self.num_cached_tokens} cached: {kinds}"


class Requester:
    """A client of one server, on one connection."""

    def __init__(self, server: Server) -> None:
        self._connection = HTTPConnection(HOST, server.port, timeout=1800)

    def conversation(self, body: dict[str, Any]) -> tuple[Turn, Turn]:
        """Hold two turns: the second has the results of the first one's tool calls, and a further question."""
        first = self.turn(body)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "total 3\nmain.py\nREADME.md\ntests\n"}
            for block in first.message["content"]
            if block["type"] == "tool_use"
        ]
        content = [*results, {"type": "text", "text": "Go on, and be brief."}]
        messages = [{"role": "assistant", "content": first.message["content"]}, {"role": "user", "content": content}]
        return first, self.turn({**body, "messages": [*body["messages"], *messages]})

    def turn(self, body: dict[str, Any]) -> Turn:
        """Stream one answer; its time runs from just before the request is sent."""
        start_s = time.perf_counter()
        self._connection.request("POST", PATH, json.dumps({**body, "stream": True}).encode(), HEADERS)
        reply, events, first_s = self._connection.getresponse(), list[dict[str, Any]](), 0.0
        while line := reply.readline():
            if line.startswith(b"data: "):
                events.append(json.loads(line.removeprefix(b"data: ")))
                if events[-1]["type"].startswith("content_block") and not first_s:
                    first_s = time.perf_counter() - start_s
        if reply.status != 200 or not first_s:
            raise RuntimeError(f"{reply.status}, {events[-1:]}")
        return Turn(message_of_events(events), first_s)

    def num_tokens(self, body: dict[str, Any]) -> int:
        """The number of prompt tokens of a body, as the server counts them."""
        fields = {name: value for name, value in body.items() if name not in ("max_tokens", "temperature")}
        self._connection.request("POST", f"{PATH}/count_tokens", json.dumps(fields).encode(), HEADERS)
        return int(json.loads(self._connection.getresponse().read())["input_tokens"])


HEADERS = {"content-type": "application/json"}


def _body(random: Random, question: str, num_tokens: int, requester: Requester) -> dict[str, Any]:
    """A body with a prompt of about `num_tokens` tokens: tools first, and a system text that fills the rest."""
    prefix = f"agent{random.getrandbits(48):x}"  # in the first tool, at the very beginning of the prompt
    tools = [_tool(random, f"{prefix}_{index}") for index in range(NUM_TOOLS if num_tokens > 2_000 else 1)]
    body: dict[str, Any] = {
        "model": "coder",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "tools": tools,
        "system": "You are an agent that works in a folder.",
        "messages": [{"role": "user", "content": question or "List the files here, and say what they are for."}],
    }
    while (missing := num_tokens - requester.num_tokens(body)) > 0:
        body["system"] += "\n" + " ".join(random.choice(WORDS) for _ in range(max(1, missing - 1)))
    return body


def _tool(random: Random, name: str) -> dict[str, Any]:
    schema = SCHEMAS[random.choice(("find", "paint", "edit"))]
    description = f"Use it for {phrase(random)}. " + " ".join(random.choice(WORDS) for _ in range(60))
    return {"name": name, "description": description, "input_schema": schema}
