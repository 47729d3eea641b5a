"""Prefixes that conversations find again on the member that has them, and what a gateway believes beside the truth."""

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

NUM_MEMBERS, NUM_TALKS, NUM_TURNS = 4, 64, 5
ROOMY = replace(SETTINGS, memory_bytes=8192)
"""Blocks enough for every conversation wherever it is."""
TIGHT = replace(SETTINGS, memory_bytes=64)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
AFTER_S = 2.0
STEP_S = 0.01


@section("reuse")
async def reuse(proof: Proof) -> None:
    """All conversations at once; each turn begins with all turns before it. A step takes its time: else what waits at a
    member, which decides who gets the next one, is how busy this machine is and not how busy the fleet."""
    num_talks = proof.sized(quick=16, full=NUM_TALKS)
    async with small_fleet(NUM_MEMBERS, settings=ROOMY, step_s=STEP_S) as (model, members):
        talks = await asyncio.gather(*(_talk(model, f"person {at}") for at in range(num_talks)))
        given = [known.num_received for known in model.fleet.members.values()]
    num_cached = sum(turn.num_cached for talk in talks for turn in talk)
    num_possible = _most_possible(talks)
    proof.at_least("reuse", num_cached / num_possible, 0.95, f"{num_cached:,} of {num_possible:,} tokens")
    proof.at_most("imbalance", max(given) / (sum(given) / len(members)), 1.4, f"requests: {given}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a conversation."""

    prompt: tuple[int, ...]
    num_cached: int


async def _talk(model: FleetModel, name: str) -> list[Turn]:
    text, turns = f"the talk of {name} ", list[Turn]()
    for number in range(NUM_TURNS):
        done = await model.generate(text, SHORT)
        turns.append(Turn(tuple(done.prompt_token_ids), done.num_cached_tokens))
        text += f"and turn {number} of {name} goes on for a while "
    return turns


def _most_possible(talks: Sequence[Sequence[Turn]]) -> int:
    """If every prompt found all that its conversation had before, or any other one ever, but for the first to come."""
    seen = Counter(start for talk in talks for start in {start for turn in talk for start in _starts(turn)})
    num_tokens = 0
    for talk in talks:
        mine = set[tuple[int, ...]]()
        for turn in talk:
            starts = _starts(turn)
            num_tokens += SETTINGS.block_size * sum(start in mine or seen[start] > 1 for start in starts)
            mine.update(starts)
    shared = [start for start, num_talks in seen.items() if num_talks > 1]
    return num_tokens - SETTINGS.block_size * len(shared)


def _starts(turn: Turn) -> list[tuple[int, ...]]:
    """Each whole block that a later prompt may find, as all tokens up to its end; the last token is always computed."""
    size = SETTINGS.block_size
    return [turn.prompt[:end] for end in range(size, len(turn.prompt), size)]


class Lossy:
    """Before a gateway's readers: some of what members publish is lost."""

    def __init__(self, model: FleetModel, random: Random, share: float) -> None:
        self.num_lost = 0
        for link in model.subscribers.values():
            self._stand_before(link.reader, random, share)

    def _stand_before(self, reader: object, random: Random, share: float) -> None:
        hear: Callable[[Sequence[bytes]], None] = reader.receive_batch  # type: ignore[attr-defined]

        def heard(frames: Sequence[bytes]) -> None:
            if random.random() < share:
                self.num_lost += 1
            else:
                hear(frames)

        setattr(reader, "receive_batch", heard)  # noqa: B010 - stands in its way


Trouble = Callable[[FleetModel, list[SmallMember], Random], Awaitable[None]]


async def _lose(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    Lossy(model, random, random.choice((0.1, 0.5, 1.0)))
    await _ask(model, random)


async def _restart_worker(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    os.kill(random.choice(members).supervisor.pid or 0, signal.SIGKILL)
    await _ask(model, random)


async def _clear(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    model.clear_cache()
    await _ask(model, random)


async def _noop(model: FleetModel, members: list[SmallMember], random: Random) -> None:
    await _ask(model, random)


async def _ask(model: FleetModel, random: Random) -> None:
    prompts = [f"{random.getrandbits(30)} and {'more ' * random.randrange(9)}" for _ in range(random.randint(1, 12))]
    results = await asyncio.gather(*(model.generate(one, SHORT) for one in prompts), return_exceptions=True)
    for one in results:
        if isinstance(one, BaseException) and not isinstance(one, QuireError):
            raise one


TROUBLES: Sequence[Trouble] = (_lose, _restart_worker, _clear, _noop)


@section("index")
async def index(proof: Proof) -> None:
    """Each trial: some trouble, a gateway that comes late, two seconds, and every entry compared with the truth."""
    num_trials, num_wrong, num_entries = proof.sized(quick=8, full=200), 0, 0
    random = proof.random
    while num_trials:
        num_here = min(10, num_trials)
        num_trials -= num_here
        kept = random.choice((1, 4, 10_000))
        async with small_fleet(2, num_kept_batches=kept, settings=TIGHT) as (model, members), AsyncExitStack() as held:
            for _ in range(num_here):
                for trouble in random.sample(TROUBLES, 2):
                    await trouble(model, members, random)
                gateways = [model]
                if random.random() < 0.5:
                    source = FixedMembers([member.address for member in members])
                    gateways.append(await held.enter_async_context(FleetModel("oracle", source, None)))
                await asyncio.sleep(AFTER_S)
                truth = [await truth_of(member) for member in members]
                for gateway in gateways:
                    for told, true in zip(believed(gateway, members), truth, strict=True):
                        num_wrong += len(told ^ true)
                        num_entries += len(true)
                await held.aclose()
    proof.equals("index_wrong", num_wrong, 0, f"of {num_entries:,} entries")


@section("a member joins again")
async def joins(proof: Proof) -> None:
    """A member of the same address with an empty cache: nothing of the one before is believed."""
    num_wrong = 0
    for _ in range(proof.sized(quick=2, full=10)):
        async with small_fleet(1, settings=TIGHT) as (model, members):
            await _ask(model, proof.random)
            address = members[0].address
            await members[0].kill()
            async with small_member(address=address, settings=TIGHT) as again:
                while not model.fleet.num_ready:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(AFTER_S)
                num_wrong += len(believed(model, [again])[0] ^ await truth_of(again))
    proof.equals("joined_wrong", num_wrong, 0)
