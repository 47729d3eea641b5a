"""Generated bodies at every route that agents use: a reply is an answer or an error in the API's format, never
a 5xx status but 503 (hence the name `fives`).

Most bodies go to a server whose model is an oracle (no network, instant tokens) with a template that has tools and
reasoning; the others go to the test model. Connections are kept alive; both servers store conversations.
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
    """Send the same number of bodies to each route."""
    per_route = proof.sized(quick=300, full=50_000)
    num_real = round(per_route * REAL_SHARE)
    store = proof.folder / "store"
    template = proof.folder / "agent.jinja"
    template.write_text(AGENT_TEMPLATE)
    replies = Replies()
    oracle_options = ("--template", str(template), "--sequence-tokens", "2048", "--store", str(store / "oracle.db"))
    with started(proof.folder, *oracle_options) as server:
        replies.send_all(server, "oracle", per_route - num_real, proof.random)
    real_options = serve_words("--tool-format", "hermes", "--store", str(store / "real.db"), "--drop-images")
    with started(proof.folder, *real_options, module="quire serve") as server:
        replies.send_all(server, "m", num_real, proof.random)
    for path in ROUTES:
        say(f"    {path}: {dict(sorted(replies.statuses[path].items()))}")
    valid = sum(replies.num_valid.values())
    proof.at_least("fives_bodies_per_route", min(replies.statuses[path].total() for path in ROUTES), per_route)
    proof.at_least("fives_valid", min(replies.num_valid.values()), per_route // 4, "of the worst route")
    proof.at_least("fives_refused", min(map(replies.num_refused, ROUTES)), per_route // 4, "of the worst route")
    proof.at_most("fives_full", sum(counts[503] for counts in replies.statuses.values()), valid // 100, "answered 503")
    proof.equals("fives_valid_refused", replies.num_valid_refused, 0, "valid bodies that were not answered")
    proof.equals("fives_unanswered", replies.num_unanswered, 0, "connections that ended without an answer")
    proof.equals("fives_workers_replaced", replies.num_restarts, 0)
    proof.equals("fives_other_shapes", replies.num_other_shapes, 0, "errors and answers in another API's shape")
    proof.equals("fives", replies.num_fives, 0, "of 5xx but 503")


@dataclass
class Replies:
    """Counts of the replies."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {path: Counter() for path in ROUTES})
    num_valid: Counter[str] = field(default_factory=Counter)
    num_valid_refused: int = 0
    num_unanswered: int = 0
    num_other_shapes: int = 0
    num_fives: int = 0
    num_restarts: int = 0
    num_shown: int = 0

    def num_refused(self, path: str) -> int:
        """Replies with a 4xx status on this route."""
        return sum(count for status, count in self.statuses[path].items() if 400 <= status < 500)

    def send_all(self, server: Server, model: str, per_route: int, random: Random) -> None:
        """Send bodies to all routes of one server, and count restarts of its worker."""
        asyncio.run(self._send(server, model, per_route, random))
        self.num_restarts += server.num_restarts()
        if server.stop() != 0:
            raise RuntimeError(f"the server ended badly: {server.lines[-3:]}")
        for line in [line for line in server.lines if '"trace"' in line][:3]:
            say(f"    {line[-800:]}")

    async def _send(self, server: Server, model: str, per_route: int, random: Random) -> None:
        remaining = [path for path in ROUTES for _ in range(per_route)]
        random.shuffle(remaining)

        async def send_on_connection(session: aiohttp.ClientSession) -> None:
            while remaining:
                await self._post(session, server.url, generated_body(remaining.pop(), model, random))

        limit, timeout = aiohttp.TCPConnector(limit=NUM_OPEN), aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=limit, timeout=timeout, headers=JSON) as session:
            await asyncio.gather(*(send_on_connection(session) for _ in range(NUM_OPEN)))

    async def _post(self, session: aiohttp.ClientSession, url: str, body: GeneratedBody) -> None:
        try:
            async with session.post(url + body.path, data=body.data) as reply:
                self._count(body, reply.status, reply.headers.get("content-type", ""), await reply.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            self.num_unanswered += 1
            self._show(body, f"no answer: {error!r}")

    def _count(self, body: GeneratedBody, status: int, kind: str, data: bytes) -> None:
        self.statuses[body.path][status] += 1
        self.num_valid[body.path] += body.is_valid
        objects = answers_of(kind, data)
        if objects is None or not all(is_of_route(body.path, status, kind, answer) for answer in objects):
            self.num_other_shapes += 1
            self._show(body, f"{status}, another shape: {data[:300]!r}")
        if (status >= 500 and status != 503) or any(map(is_server_error, objects or ())):
            self.num_fives += 1
            self._show(body, f"{status}: {data[-300:]!r}")
        if body.is_valid and status not in (200, 503):
            self.num_valid_refused += 1
            self._show(body, f"valid, and {status}: {data[:300]!r}")

    def _show(self, body: GeneratedBody, message: str) -> None:
        self.num_shown += 1
        if self.num_shown <= SHOWN:
            say(f"    {body.path} {message}\n      {body.data[:3000]!r}")


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


def is_of_route(path: str, status: int, kind: str, answer: Any) -> bool:
    """Whether a reply, or an event of a stream, has the format of the route's API."""
    if not isinstance(answer, dict):
        return False
    if status != 200:
        return is_error_of(path, answer)
    is_streamed = kind.startswith("text/event-stream")
    return (STREAMED if is_streamed else WHOLE)[path](answer) or (is_streamed and is_error_of(path, answer))


def is_error_of(path: str, answer: dict[str, Any]) -> bool:
    """Whether this is an error object, as an answer or as an event of a stream, in the format of the route's API."""
    error = answer.get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return False
    if path in (MESSAGES, COUNT):
        return answer.keys() == {"type", "error"} and answer["type"] == "error" and error.keys() <= ANTHROPIC_KEYS
    return answer.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}


ANTHROPIC_KEYS = {"type", "message", "details"}
Shape = Callable[[dict[str, Any]], bool]
WHOLE: dict[str, Shape] = {
    CHAT: lambda answer: answer.get("object") == "chat.completion" and bool(answer["choices"]),
    RESPONSES: lambda answer: answer.get("object") == "response" and answer["status"] in ("completed", "incomplete"),
    MESSAGES: lambda answer: answer.get("type") == "message" and answer["role"] == "assistant" and "usage" in answer,
    COUNT: lambda answer: answer.keys() == {"input_tokens"} and answer["input_tokens"] > 0,
}
STREAMED: dict[str, Shape] = {
    CHAT: lambda event: event.get("object") == "chat.completion.chunk",
    RESPONSES: lambda event: str(event.get("type")).startswith("response.") and "sequence_number" in event,
    MESSAGES: lambda ev: str(ev.get("type")).startswith(("message_", "content_block_")) or ev == {"type": "ping"},
    COUNT: lambda _: False,
}


def is_server_error(event: Any) -> bool:
    """Whether an event of a stream reports a server error: the stream's status was 200 before."""
    if not isinstance(event, dict):
        return False
    response = event.get("response")
    error = event.get("error") or (response.get("error") if isinstance(response, dict) else None)
    return isinstance(error, dict) and (
        error.get("code") in ("internal_error", "model_error", "server_error") or error.get("type") == "api_error"
    )
