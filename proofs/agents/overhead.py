"""The cost of HTTP in each API dialect: sixteen streams through a server, alternating with sixteen in this process.

The client shares the machine with the server: while time is measured, it only collects bytes, to be parsed later.
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
from proofs.api.load import WORDS, Server, decode_chunks, serve_words, started, stream_bytes
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
    """Run rounds; the order of dialects rotates, and every other round runs in reverse."""
    rounds, num_tokens = proof.sized(quick=2, full=33), proof.sized(quick=32, full=48)
    with started(proof.folder, *serve_words(), module="quire serve") as server:
        overhead = asyncio.run(_run_rounds(server, rounds, num_tokens))
    for dialect, ratios in overhead.ratios.items():
        say(f"    {dialect}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
        proof.report(f"http_overhead_{dialect}", statistics.median(ratios), "over in process")
    proof.at_least("http_overhead_tokens", overhead.num_tokens, NUM_STREAMS * num_tokens // 2, "of a round")
    proof.equals("http_overhead_wrong", overhead.num_wrong, 0, "answers of another length than in process")
    proof.at_least("http_overhead", min(map(statistics.median, overhead.ratios.values())), 0.90)


class Overhead:
    """Speed over HTTP / speed in process, of all rounds, by dialect."""

    def __init__(self) -> None:
        self.ratios: dict[str, list[float]] = {dialect: [] for dialect in PATHS}
        self.num_tokens = self.num_wrong = 0


async def _run_rounds(server: Server, rounds: int, num_tokens: int) -> Overhead:
    chats = [[{"role": "user", "content": f"Tell a long story of the {word}."}] for word in (WORDS * 2)[:NUM_STREAMS]]
    settings = quire.ModelSettings(memory_bytes=2 << 30, max_sequence_tokens=1024)
    overhead = Overhead()
    async with AsyncEngine(open_model(str(smollm2_directory()), settings)) as engine:
        for round_number in range(rounds + 1):
            seconds: dict[str, float] = {}
            counts: dict[str, list[int]] = {}
            for name in _order(round_number):
                start_s = time.perf_counter()
                if name in PATHS:
                    bodies = [BODIES[name](messages, num_tokens) for messages in chats]
                    streams = await asyncio.to_thread(stream_bytes, server.port, bodies, PATHS[name])
                    seconds[name] = time.perf_counter() - start_s
                    counts[name] = [num_output_tokens(name, data) for data in streams]
                else:
                    counts[name] = await _in_process(engine, chats, num_tokens)
                    seconds[name] = time.perf_counter() - start_s
            expected = counts.pop("process")
            overhead.num_tokens = sum(expected)
            overhead.num_wrong += sum(
                count != wanted for row in counts.values() for count, wanted in zip(row, expected, strict=True)
            )
            for name in PATHS if round_number else ():  # the first round warms all
                overhead.ratios[name].append(seconds["process"] / seconds[name])
    return overhead


def _order(round_number: int) -> Sequence[str]:
    names = ["process", *PATHS]
    rotated = names[round_number % len(names) :] + names[: round_number % len(names)]
    return rotated if round_number % 2 else rotated[::-1]


async def _in_process(engine: AsyncEngine, chats: Sequence[Messages], num_tokens: int) -> list[int]:
    async def stream(messages: Messages) -> int:
        ids, params = chat_inputs(engine.text, messages, SamplingParams(max_tokens=num_tokens, temperature=0.0))
        count = 0
        async for piece in engine.stream(ids, params):
            count += len(piece.token_ids)
        return count

    return [*await asyncio.gather(*map(stream, chats))]


def num_output_tokens(dialect: str, data: bytes) -> int:
    """The number of output tokens by a stream's usage; 0 if the stream has no regular end."""
    status, body = decode_chunks(data)
    events = events_of(body) if status == 200 else []
    if not events or "error" in events[-1]:
        return 0
    if dialect == CHAT:
        return int(events[-1]["usage"]["completion_tokens"])
    if dialect == RESPONSES:
        return int(events[-1]["response"]["usage"]["output_tokens"])
    return int(next(event for event in events if event["type"] == "message_delta")["usage"]["output_tokens"])


BODIES: dict[str, Callable[[Messages, int], dict[str, Any]]] = {
    CHAT: lambda messages, count: {"model": "m", "temperature": 0, "messages": messages, "max_tokens": count},
    RESPONSES: lambda messages, count: {"model": "m", "temperature": 0, "input": messages, "max_output_tokens": count},
    MESSAGES: lambda messages, count: {"model": "m", "temperature": 0, "messages": messages, "max_tokens": count},
}
