"""What HTTP costs in each dialect: sixteen streams through a server, and the same in this process, turn about.

The client shares the machine with the server: it takes bytes, and looks at them when time has stopped.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import quire
from benchmarks.record import say
from benchmarks.test_model import smollm2_directory
from proofs.agents.joined import CHAT, MESSAGES, RESPONSES, events_of
from proofs.api.load import WORDS, Server, serve_words, started, stream_bytes, unchunked
from proofs.framework.proof import Proof, section
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.opening import open_model
from quire.client.request.conversation import chat_inputs
from quire.client.request.params import SamplingParams

NUM_STREAMS = 16
PATHS = {CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses", MESSAGES: "/v1/messages"}
Messages = list[dict[str, Any]]


@section("http overhead of dialects")
def http_overhead(proof: Proof) -> None:
    """Whoever is first in one round is last in the next."""
    rounds, num_tokens = proof.sized(quick=2, full=33), proof.sized(quick=32, full=48)
    with started(proof.folder, *serve_words(), module="quire serve") as server:
        told = asyncio.run(_rounds(server, rounds, num_tokens))
    for dialect, ratios in told.ratios.items():
        say(f"    {dialect}: {', '.join(f'{one:.3f}' for one in ratios)}")
        proof.report(f"http_overhead_{dialect}", statistics.median(ratios), "over in process")
    proof.at_least("http_overhead_tokens", told.num_tokens, NUM_STREAMS * num_tokens // 2, "of a round")
    proof.equals("http_overhead_wrong", told.num_wrong, 0, "answers of another length than in process")
    proof.at_least("http_overhead", min(map(statistics.median, told.ratios.values())), 0.90)


class Overhead:
    """Ratios of all rounds, by dialect."""

    def __init__(self) -> None:
        self.ratios: dict[str, list[float]] = {dialect: [] for dialect in PATHS}
        self.num_tokens = self.num_wrong = 0


async def _rounds(server: Server, rounds: int, num_tokens: int) -> Overhead:
    asked = [[{"role": "user", "content": f"Tell a long story of the {word}."}] for word in (WORDS * 2)[:NUM_STREAMS]]
    settings = quire.ModelSettings(memory_bytes=2 << 30, max_sequence_tokens=1024)
    told = Overhead()
    async with AsyncEngine(open_model(str(smollm2_directory()), settings)) as engine:
        for at in range(rounds + 1):
            took: dict[str, float] = {}
            counts: dict[str, list[int]] = {}
            for name in _order(at):
                begun_s = time.perf_counter()
                if name in PATHS:
                    bodies = [BODIES[name](messages, num_tokens) for messages in asked]
                    streams = await asyncio.to_thread(stream_bytes, server.port, bodies, PATHS[name])
                    took[name] = time.perf_counter() - begun_s
                    counts[name] = [num_said(name, data) for data in streams]
                else:
                    counts[name] = await _in_process(engine, asked, num_tokens)
                    took[name] = time.perf_counter() - begun_s
            own = counts.pop("process")
            told.num_tokens = sum(own)
            told.num_wrong += sum(
                one != other for each in counts.values() for one, other in zip(each, own, strict=True)
            )
            for name in PATHS if at else ():  # the first round warms all
                told.ratios[name].append(took["process"] / took[name])
    return told


def _order(at: int) -> Sequence[str]:
    names = ["process", *PATHS]
    turned = names[at % len(names) :] + names[: at % len(names)]
    return turned if at % 2 else turned[::-1]


async def _in_process(engine: AsyncEngine, asked: Sequence[Messages], num_tokens: int) -> list[int]:
    async def one(messages: Messages) -> int:
        ids, params = chat_inputs(engine.text, messages, SamplingParams(max_tokens=num_tokens, temperature=0.0))
        num_said = 0
        async for piece in engine.stream(ids, params):
            num_said += len(piece.token_ids)
        return num_said

    return [*await asyncio.gather(*map(one, asked))]


def num_said(dialect: str, data: bytes) -> int:
    """Tokens of a stream, as its usage says; none if it was not answered to its end."""
    status, body = unchunked(data)
    events = events_of(body) if status == 200 else []
    if not events or "error" in events[-1]:
        return 0
    if dialect == CHAT:
        return int(events[-1]["usage"]["completion_tokens"])
    if dialect == RESPONSES:
        return int(events[-1]["response"]["usage"]["output_tokens"])
    return int(next(event for event in events if event["type"] == "message_delta")["usage"]["output_tokens"])


BODIES: dict[str, Callable[[Messages, int], dict[str, Any]]] = {
    CHAT: lambda said, most: {"model": "m", "temperature": 0, "messages": said, "max_tokens": most},
    RESPONSES: lambda said, most: {"model": "m", "temperature": 0, "input": said, "max_output_tokens": most},
    MESSAGES: lambda said, most: {"model": "m", "temperature": 0, "messages": said, "max_tokens": most},
}
