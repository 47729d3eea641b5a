"""A load of agents of three tenants: their conversations share prefixes, grow turn by turn, and begin again.

It gives the dashboard something to show: shared prefixes, queues, cache misses, evicted blocks.
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
"""Token ids are below it, so that they exist in every tokenizer."""
PRIORITIES = {"support": -1, "research": 0, "nightly": 1}
STREAMED = 0.25
"""The share of agents that stream their answers, because reading a stream costs as much as writing it."""
KINDS = 3
"""Kinds of agents of each tenant, each with its own system prompt."""


@asynccontextmanager
async def agents(url: str, keys: Mapping[str, str], count: int, random: Random) -> AsyncIterator[None]:
    """Run `count` agents while the block runs. `keys` are the API keys of tenants by name."""
    prompts = {(name, kind): _tokens(random, SYSTEM_TOKENS) for name in keys for kind in range(KINDS)}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        names = [*keys]
        tasks = [
            asyncio.create_task(
                _agent(
                    session,
                    url,
                    keys[name],
                    prompts[name, number // len(names) % KINDS],
                    PRIORITIES.get(name, 0),
                    Random(number),
                )
            )
            for number in range(count)
            for name in [names[number % len(names)]]
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _agent(
    session: aiohttp.ClientSession, url: str, key: str, system_prompt: list[int], priority: int, random: Random
) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    prompt, is_streamed = [*system_prompt], random.random() < STREAMED
    while True:
        prompt = [*prompt, *_tokens(random, TURN_TOKENS)]
        if len(prompt) > LONGEST:
            prompt = [*system_prompt, *_tokens(random, TURN_TOKENS)]
        body = {
            "model": "oracle",
            "prompt": prompt,
            "max_tokens": random.randint(*ANSWER_TOKENS),
            "ignore_eos": True,
            "priority": priority,
            "stream": is_streamed,
        }
        try:
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                async for _ in response.content.iter_any():
                    pass
        except aiohttp.ClientError:
            await asyncio.sleep(1)


def _tokens(random: Random, bounds: tuple[int, int]) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(random.randint(*bounds))]
