"""Generated bodies at every route that agents use: whatever is sent, the answer is one, or a sentence in the shape of
the API that was asked.

Most go to an oracle in a real worker behind the real server, whose template has tools and thoughts, the rest to the
test model. Connections are kept alive; both servers have a store.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.agents.damage import GeneratedBody, generated_body
from proofs.agents.prompts.bodies import CHAT, COUNT, MESSAGES, RESPONSES, ROUTES
from proofs.api.load import Server, serve_words, started
from proofs.framework.proof import Proof, section
from tests.support.servers.talkers import AGENT_TEMPLATE

REAL_SHARE = 0.04
NUM_OPEN = 24
SHOWN = 6
JSON = {"content-type": "application/json"}


@section("fives")
def fives(proof: Proof) -> None:
    """So many bodies at each route."""
    per_route = proof.sized(quick=300, full=50_000)
    num_real = round(per_route * REAL_SHARE)
    store = proof.folder / "store"
    template = proof.folder / "agent.jinja"
    template.write_text(AGENT_TEMPLATE)
    seen = Seen()
    oracle = ("--template", str(template), "--sequence-tokens", "2048", "--store", str(store / "oracle.db"))
    with started(proof.folder, *oracle) as server:
        seen.look(server, "oracle", per_route - num_real, proof.random)
    real = serve_words("--tool-format", "hermes", "--store", str(store / "real.db"), "--drop-images")
    with started(proof.folder, *real, module="quire serve") as server:
        seen.look(server, "m", num_real, proof.random)
    for path in ROUTES:
        say(f"    {path}: {dict(sorted(seen.statuses[path].items()))}")
    valid = sum(seen.num_valid.values())
    proof.at_least("fives_bodies_per_route", min(seen.statuses[path].total() for path in ROUTES), per_route)
    proof.at_least("fives_valid", min(seen.num_valid.values()), per_route // 4, "of each route, at least so many")
    proof.at_least("fives_refused", min(seen.num_refused(path) for path in ROUTES), per_route // 4, "the same")
    proof.at_most("fives_full", sum(one[503] for one in seen.statuses.values()), valid // 100, "answered 503")
    proof.equals("fives_valid_refused", seen.num_valid_refused, 0, "valid bodies that were not answered")
    proof.equals("fives_unanswered", seen.num_unanswered, 0, "connections that ended without an answer")
    proof.equals("fives_workers_replaced", seen.num_restarts, 0)
    proof.equals("fives_other_shapes", seen.num_other_shapes, 0, "errors and answers in another API's shape")
    proof.equals("fives", seen.num_fives, 0, "of 5xx but 503")


@dataclass
class Seen:
    """What came back."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {path: Counter() for path in ROUTES})
    num_valid: Counter[str] = field(default_factory=Counter)
    num_valid_refused: int = 0
    num_unanswered: int = 0
    num_other_shapes: int = 0
    num_fives: int = 0
    num_restarts: int = 0
    num_shown: int = 0

    def num_refused(self, path: str) -> int:
        """Told that it was their mistake."""
        return sum(count for status, count in self.statuses[path].items() if 400 <= status < 500)

    def look(self, server: Server, model: str, per_route: int, random: Random) -> None:
        """All routes at one server, and whether it and its worker are as before."""
        asyncio.run(self._send(server, model, per_route, random))
        self.num_restarts += server.num_restarts()
        if server.stop() != 0:
            raise RuntimeError(f"the server ended badly: {server.lines[-3:]}")
        for line in [line for line in server.lines if '"trace"' in line][:3]:
            say(f"    {line[-800:]}")

    async def _send(self, server: Server, model: str, per_route: int, random: Random) -> None:
        left = [path for path in ROUTES for _ in range(per_route)]
        random.shuffle(left)

        async def connection(session: aiohttp.ClientSession) -> None:
            while left:
                await self._one(session, server.url, generated_body(left.pop(), model, random))

        limit, patience = aiohttp.TCPConnector(limit=NUM_OPEN), aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=limit, timeout=patience, headers=JSON) as session:
            await asyncio.gather(*(connection(session) for _ in range(NUM_OPEN)))

    async def _one(self, session: aiohttp.ClientSession, url: str, body: GeneratedBody) -> None:
        try:
            async with session.post(url + body.path, data=body.data) as reply:
                self._note(body, reply.status, reply.headers.get("content-type", ""), await reply.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            self.num_unanswered += 1
            self._show(body, f"no answer: {error!r}")

    def _note(self, body: GeneratedBody, status: int, kind: str, data: bytes) -> None:
        self.statuses[body.path][status] += 1
        self.num_valid[body.path] += body.is_valid
        told = answers_of(kind, data)
        if told is None or not all(is_of_route(body.path, status, kind, one) for one in told):
            self.num_other_shapes += 1
            self._show(body, f"{status}, another shape: {data[:300]!r}")
        if (status >= 500 and status != 503) or any(map(is_mistake_of_ours, told or ())):
            self.num_fives += 1
            self._show(body, f"{status}: {data[-300:]!r}")
        if body.is_valid and status not in (200, 503):
            self.num_valid_refused += 1
            self._show(body, f"valid, and {status}: {data[:300]!r}")

    def _show(self, body: GeneratedBody, what: str) -> None:
        self.num_shown += 1
        if self.num_shown <= SHOWN:
            say(f"    {body.path} {what}\n      {body.data[:3000]!r}")


# -- shapes ------------------------------------------------------------------------------------------------------------


def answers_of(kind: str, data: bytes) -> list[Any] | None:
    """The JSON of an answer, or of every event of a stream; None for what is neither."""
    try:
        if not kind.startswith("text/event-stream"):
            return [json.loads(data)]
        lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]
    except ValueError:
        return None


def is_of_route(path: str, status: int, kind: str, told: Any) -> bool:
    """Whether this is how the API of a route speaks."""
    if not isinstance(told, dict):
        return False
    if status != 200:
        return is_error_of(path, told)
    is_streamed = kind.startswith("text/event-stream")
    return (STREAMED if is_streamed else WHOLE)[path](told) or (is_streamed and is_error_of(path, told))


def is_error_of(path: str, told: dict[str, Any]) -> bool:
    """An error that is an answer, or an event of a stream. A response tells of its failure in an event of its own."""
    error = told.get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return False
    if path in (MESSAGES, COUNT):
        return told.keys() == {"type", "error"} and told["type"] == "error" and error.keys() <= ANTHROPIC_KEYS
    return told.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}


ANTHROPIC_KEYS = {"type", "message", "details"}
Shape = Callable[[dict[str, Any]], bool]
WHOLE: dict[str, Shape] = {
    CHAT: lambda told: told.get("object") == "chat.completion" and bool(told["choices"]),
    RESPONSES: lambda told: told.get("object") == "response" and told["status"] in ("completed", "incomplete"),
    MESSAGES: lambda told: told.get("type") == "message" and told["role"] == "assistant" and "usage" in told,
    COUNT: lambda told: told.keys() == {"input_tokens"} and told["input_tokens"] > 0,
}
STREAMED: dict[str, Shape] = {
    CHAT: lambda told: told.get("object") == "chat.completion.chunk",
    RESPONSES: lambda told: str(told.get("type")).startswith("response.") and "sequence_number" in told,
    MESSAGES: lambda told: str(told.get("type")).startswith(("message_", "content_block_")) or told == {"type": "ping"},
    COUNT: lambda _: False,
}


def is_mistake_of_ours(told: Any) -> bool:
    """An error of the server's inside a stream, which had its status before."""
    if not isinstance(told, dict):
        return False
    within = told.get("response")
    error = told.get("error") or (within.get("error") if isinstance(within, dict) else None)
    return isinstance(error, dict) and (
        error.get("code") in ("internal_error", "model_error", "server_error") or error.get("type") == "api_error"
    )
