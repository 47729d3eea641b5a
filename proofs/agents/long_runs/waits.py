"""What a client that waits is sent: a model that loads, a queue and long prompts, with the times that are the default;
and what is computed when its prompt is sent again.

No real model runs: an oracle's steps are made as slow as the figures need.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.api.load import WORDS
from proofs.framework.proof import Proof, section
from quire.backends.oracle import OracleRunner
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.client import EngineClient
from quire.client.engines.opening import OpenedModel
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.park_server import on_demand, park_server
from tests.support.servers.talkers import talker

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOKEN_MARKS = {CHAT: b'"content":"', MESSAGES: b"content_block_delta", RESPONSES: b"output_text.delta"}
"""What the first token's event has; a chat's first chunk has an empty content."""
FIRST_CHUNK = b'"role":"assistant","content":""'
LOAD_S = 25.0
STEP_S = 0.03
WAIT_S = 300.0
BLOCK = 4


class SlowRunner(OracleRunner):
    """An oracle whose steps take time, and that counts them."""

    step_s = STEP_S
    num_steps = 0

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        time.sleep(self.step_s)
        self.num_steps += 1
        return super().run(plan, masks)


def slow_talker(**settings: int) -> tuple[OpenedModel, SlowRunner]:
    opened = talker(**settings)  # type: ignore[arg-type]  # numbers all, and no template
    runner = SlowRunner(opened.engine.runner.capacity)
    opened.engine.runner = runner
    return opened, runner


@dataclass
class Stream:
    """When the bytes of one stream came, up to its first token."""

    sent_s: float = 0.0
    byte_s: list[float] = field(default_factory=list)
    is_whole: bool = False

    @property
    def first_s(self) -> float:
        return self.byte_s[0] - self.sent_s if self.byte_s else WAIT_S

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.byte_s, self.byte_s[1:], strict=False)]

    @property
    def waited_s(self) -> float:
        return self.byte_s[-1] - self.sent_s if self.byte_s else WAIT_S


def body_of(path: str, text: str, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": "a", "stream": True, "input": text, "max_output_tokens": 2, **more}
    return {"model": "a", "stream": True, "messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}


async def _read(session: aiohttp.ClientSession, url: str, path: str, text: str, stream: Stream) -> None:
    """Send a request and note when bytes come until the first token; read to the end."""
    stream.sent_s = time.monotonic()
    data = b""
    async with session.post(url + path, json=body_of(path, text)) as response:
        async for piece in response.content.iter_any():
            if TOKEN_MARKS[path] not in data.replace(FIRST_CHUNK, b""):
                stream.byte_s.append(time.monotonic())
            data += piece
    stream.is_whole = response.status == 200 and b'"error":{' not in data


@section("silence")
def silence(proof: Proof) -> None:
    """Streams of three dialects, sent while their model loads; then there are more of them than may run."""
    num_streams = proof.sized(quick=60, full=200)
    step_s = STEP_S * 200 / num_streams

    @asynccontextmanager
    async def opened() -> AsyncIterator[EngineClient]:
        model, runner = slow_talker(max_running=4)
        runner.step_s = step_s
        async with AsyncEngine(model) as client:
            yield client

    streams = [Stream() for _ in range(num_streams)]
    with park_server(proof.folder, *on_demand("a"), open_client=opened, queue="1000") as here:
        here.may_load.clear()
        loading = threading.Timer(LOAD_S, here.may_load.set)
        loading.start()

        async def all_of_them() -> None:
            timeout, connector = aiohttp.ClientTimeout(WAIT_S), aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                paths = [list(TOKEN_MARKS)[at % 3] for at in range(num_streams)]
                texts = [_text(proof.random, 30) for _ in range(num_streams)]
                reading = (
                    _read(session, here.url, path, text, stream)
                    for path, text, stream in zip(paths, texts, streams, strict=True)
                )
                await asyncio.gather(*reading)

        asyncio.run(all_of_them())
    firsts, gaps = sorted(stream.first_s for stream in streams), sorted(gap for one in streams for gap in one.gaps_s)
    say(f"    {num_streams} streams; first tokens after {min(s.waited_s for s in streams):.0f} to "
        f"{max(s.waited_s for s in streams):.0f} s")  # fmt: skip
    num_waiters = sum(stream.waited_s > LOAD_S + 10 for stream in streams)
    proof.at_least("silence_waiters", num_waiters / num_streams, 0.25, "waited 10 s more than the model loaded")
    proof.equals("silence_broken", sum(not stream.is_whole for stream in streams), 0, "streams without their end")
    proof.at_most("first_byte_s", firsts[int(0.99 * len(firsts))], 10.5, "p99, from the body's last byte")
    proof.at_most("first_byte_longest_s", firsts[-1], 15.0)
    proof.at_most("silence_s", gaps[int(0.99 * len(gaps))] if gaps else WAIT_S, 10.5, "p99 before the first token")
    proof.at_most("silence_longest_s", gaps[-1] if gaps else WAIT_S, 15.0)


@section("sent again")
def sent_again(proof: Proof) -> None:
    """A prompt is sent again at some step of its computation; half of the first clients leave then."""
    rounds, ratios = proof.sized(quick=20, full=200), list[float]()
    model, runner = slow_talker(num_blocks=2048, block_size=BLOCK, max_sequence_tokens=2048, max_bytes=16_000)
    runner.step_s = 0.005
    with house(models={"a": model}) as here:
        for at in range(rounds):
            text = _text(proof.random, 250)
            num_before = _num_computed(here)
            asyncio.run(_twice(here, runner, text, proof.random.randint(1, 8), leaves=at % 2 == 0))
            here.wait_until_free()
            num_prompt = len(model.text.chat_parts([{"role": "user", "content": text}], None)[0])
            ratios.append((_num_computed(here) - num_before) / num_prompt)
    proof.report("sent_again_rounds", len(ratios))
    proof.at_most("computed_twice", max(ratios), 1.02, "of the prompt, outputs included")


async def _twice(here: LiveServer, runner: SlowRunner, text: str, num_steps: int, *, leaves: bool) -> None:
    body = json.dumps(body_of(CHAT, text, max_tokens=1)).encode()
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def post() -> bytes:
            async with session.post(here.url + CHAT, data=body) as response:
                return await response.read()

        begun = runner.num_steps
        first = asyncio.ensure_future(post())
        while runner.num_steps < begun + num_steps and not first.done():
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(post())
        if leaves:
            await asyncio.sleep(0.005 * num_steps)
            first.cancel()
        if b"[DONE]" not in await second:
            raise AssertionError("the second client got no answer")
        await asyncio.gather(first, return_exceptions=True)


def _num_computed(here: LiveServer) -> int:
    return int(here.opened["a"].engine.scheduler.stats.num_computed_tokens)


def _text(dice: Random, num_words: int) -> str:
    return " ".join(dice.choices(WORDS, k=num_words))
