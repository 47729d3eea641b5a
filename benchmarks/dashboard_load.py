"""Agents of three tenants at a server: conversations that begin alike, grow turn by turn, and are begun again.

So that there is something to see: shared prefixes, queues, misses, cached blocks that are taken for others.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random

import aiohttp

SYSTEM_TOKENS = (480, 960)
TURN_TOKENS = (60, 420)
ANSWER_TOKENS = (40, 160)
LONGEST = 2_400
VOCABULARY = 200
"""Every tokenizer has so many."""
PRIORITIES = {"support": -1, "research": 0, "nightly": 1}
STREAMED = 0.25
"""The part of agents that read their answers as they come: who reads them costs as much as who writes them."""
KINDS = 3
"""Of agents of a tenant: each has a system prompt of its own."""


@asynccontextmanager
async def agents(url: str, keys: Mapping[str, str], count: int, random: Random) -> AsyncIterator[None]:
    """So many at once, until this is left. `keys` are of tenants."""
    prompts = {(name, kind): _tokens(random, SYSTEM_TOKENS) for name in keys for kind in range(KINDS)}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        names = [*keys]
        working = [
            asyncio.create_task(
                _agent(
                    session,
                    url,
                    keys[name],
                    prompts[name, at // len(names) % KINDS],
                    PRIORITIES.get(name, 0),
                    Random(at),
                )
            )
            for at in range(count)
            for name in [names[at % len(names)]]
        ]
        try:
            yield
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


async def _agent(
    session: aiohttp.ClientSession, url: str, key: str, system: list[int], priority: int, random: Random
) -> None:
    head = {"Authorization": f"Bearer {key}"}
    said, is_streamed = [*system], random.random() < STREAMED
    while True:
        said = [*said, *_tokens(random, TURN_TOKENS)]
        if len(said) > LONGEST:
            said = [*system, *_tokens(random, TURN_TOKENS)]
        body = {
            "model": "oracle",
            "prompt": said,
            "max_tokens": random.randint(*ANSWER_TOKENS),
            "ignore_eos": True,
            "priority": priority,
            "stream": is_streamed,
        }
        try:
            async with session.post(f"{url}/v1/completions", json=body, headers=head) as answer:
                async for _ in answer.content.iter_any():
                    pass
        except aiohttp.ClientError:
            await asyncio.sleep(1)


def _tokens(random: Random, between: tuple[int, int]) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(random.randint(*between))]
