"""Prefix hits of conversations in a fleet, and the gateway's block index compared with the caches of the members."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from random import Random

from proofs.framework.proof import Proof, section
from quire.client.request.params import SamplingParams
from quire.errors import QuireError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from tests.support.fleet.small_fleets import SmallMember, believed, small_fleet, small_member, truth_of
from tests.support.workers.oracle_worker import SETTINGS

NUM_MEMBERS, NUM_CHATS, NUM_TURNS = 4, 64, 5
LARGE_CACHE = replace(SETTINGS, memory_bytes=8192)
"""Each member has enough blocks for all conversations."""
SMALL_CACHE = replace(SETTINGS, memory_bytes=64)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SETTLE_S = 2.0
STEP_S = 0.01


@section("reuse")
async def reuse(proof: Proof) -> None:
    """All conversations run at once; each turn begins with all turns before it. Steps take `STEP_S`: without it, queue
    lengths, which decide about the next member, would depend on the load of this machine."""
    num_chats = proof.sized(quick=16, full=NUM_CHATS)
    async with small_fleet(NUM_MEMBERS, settings=LARGE_CACHE, step_s=STEP_S) as (model, members):
        chats = await asyncio.gather(*(_run_chat(model, f"person {number}") for number in range(num_chats)))
        num_requests = [member.num_received for member in model.fleet.members.values()]
    num_cached = sum(turn.num_cached for chat in chats for turn in chat)
    num_possible = _max_cached_tokens(chats)
    proof.at_least("reuse", num_cached / num_possible, 0.95, f"{num_cached:,} of {num_possible:,} tokens")
    proof.at_most("imbalance", max(num_requests) / (sum(num_requests) / len(members)), 1.4, f"requests: {num_requests}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a conversation."""

    prompt: tuple[int, ...]
    num_cached: int


async def _run_chat(model: FleetModel, name: str) -> list[Turn]:
    text, turns = f"the talk of {name} ", list[Turn]()
    for number in range(NUM_TURNS):
        completion = await model.generate(text, SHORT)
        turns.append(Turn(tuple(completion.prompt_token_ids), completion.num_cached_tokens))
        text += f"and turn {number} of {name} goes on for a while "
    return turns


def _max_cached_tokens(chats: Sequence[Sequence[Turn]]) -> int:
    """Count tokens that ideal caches would hit: blocks of earlier turns, and blocks shared by conversations."""
    num_tokens, counts = 0, Counter[tuple[int, ...]]()
    for chat in chats:
        counts.update({prefix for turn in chat for prefix in _block_prefixes(turn)})
    for chat in chats:
        known = set[tuple[int, ...]]()
        for turn in chat:
            prefixes = _block_prefixes(turn)
            num_tokens += SETTINGS.block_size * sum(prefix in known or counts[prefix] > 1 for prefix in prefixes)
            known.update(prefixes)
    shared = [prefix for prefix, num_chats in counts.items() if num_chats > 1]
    return num_tokens - SETTINGS.block_size * len(shared)


def _block_prefixes(turn: Turn) -> list[tuple[int, ...]]:
    """Return the prefixes that end with a full block. The last token is left out, because it is always computed."""
    size = SETTINGS.block_size
    return [turn.prompt[:end] for end in range(size, len(turn.prompt), size)]


class EventLoss:
    """Drops a share of the KV events before a gateway's readers."""

    def __init__(self, model: FleetModel, random: Random, share: float) -> None:
        self.num_lost = 0
        for link in model.subscribers.values():
            self._drop_from(link.reader, random, share)

    def _drop_from(self, reader: object, random: Random, share: float) -> None:
        receive: Callable[[Sequence[bytes]], None] = reader.receive_batch  # type: ignore[attr-defined]

        def receive_some(frames: Sequence[bytes]) -> None:
            if random.random() < share:
                self.num_lost += 1
            else:
                receive(frames)

        setattr(reader, "receive_batch", receive_some)  # noqa: B010 - replaces a method


Disturbance = Callable[[FleetModel, list[SmallMember], Random], Awaitable[None]]


async def _lose_events(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    EventLoss(model, random, random.choice((0.1, 0.5, 1.0)))
    await _send_prompts(model, random)


async def _restart_worker(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    os.kill(random.choice(members).supervisor.pid or 0, signal.SIGKILL)
    await _send_prompts(model, random)


async def _clear(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    model.clear_cache()
    await _send_prompts(model, random)


async def _noop(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    await _send_prompts(model, random)


async def _send_prompts(model: FleetModel, random: Random) -> None:
    prompts = [f"{random.getrandbits(30)} and {'more ' * random.randrange(9)}" for _ in range(random.randint(1, 12))]
    results = await asyncio.gather(*(model.generate(one, SHORT) for one in prompts), return_exceptions=True)
    for one in results:
        if isinstance(one, BaseException) and not isinstance(one, QuireError):
            raise one


DISTURBANCES: Sequence[Disturbance] = (_lose_events, _restart_worker, _clear, _noop)


@section("index")
async def index(proof: Proof) -> None:
    """Each trial: two disturbances, perhaps a new gateway, two seconds; then compare all entries with the caches."""
    num_trials, num_wrong, num_entries, random = proof.sized(quick=8, full=200), 0, 0, proof.random
    while num_trials:
        num_now = min(10, num_trials)
        num_trials -= num_now
        fleet = small_fleet(2, num_kept_batches=random.choice((1, 4, 10_000)), settings=SMALL_CACHE)
        async with fleet as (model, members), AsyncExitStack() as stack:
            for _ in range(num_now):
                for disturb in random.sample(DISTURBANCES, 2):
                    await disturb(model, members, random)
                gateways = [model]
                if random.random() < 0.5:
                    source = FixedMembers([member.address for member in members])
                    gateways.append(await stack.enter_async_context(FleetModel("oracle", source, None)))
                await asyncio.sleep(SETTLE_S)
                caches = [await truth_of(member) for member in members]
                for gateway in gateways:
                    for indexed, cached in zip(believed(gateway, members), caches, strict=True):
                        num_wrong += len(indexed ^ cached)
                        num_entries += len(cached)
                await stack.aclose()
    proof.equals("index_wrong", num_wrong, 0, f"of {num_entries:,} entries")


@section("a member joins again")
async def restarts(proof: Proof) -> None:
    """A restarted member has an empty cache: the index must keep no block of the process before."""
    num_wrong = 0
    for _ in range(proof.sized(quick=2, full=10)):
        async with small_fleet(1, settings=SMALL_CACHE) as (model, members):
            await _send_prompts(model, proof.random)
            address = members[0].address
            await members[0].kill()
            async with small_member(address=address, settings=SMALL_CACHE) as restarted:
                while not model.fleet.num_ready:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(SETTLE_S)
                num_wrong += len(believed(model, [restarted])[0] ^ await truth_of(restarted))
    proof.equals("joined_wrong", num_wrong, 0)
