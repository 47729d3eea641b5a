"""Members that are killed or drained in turn while streams run on them, and clients who cannot tell.

member 1 ✗───●        ✗───●         killed every two seconds, each in its turn, and begun again
member 2     ✗────●        ✗───●
stream   ══1═══2══════1═══           the same tokens as without, at most half a second later
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks.record import say
from proofs.engine.worker import Ask, until
from proofs.fleet.processes import MemberLife, member_lives, oracle_command
from proofs.framework.proof import Proof, section
from quire.client.request.params import SamplingParams
from quire.errors import QuireError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.gateway.request import FleetRequest
from quire.fleet.protocol.keys import make_keys, read_gateway_keys

NUM_MEMBERS = 4
NUM_STREAMS = 32
STEP_S = 0.01
EVERY_S = 2.0


@dataclass
class Stream(Ask):
    """A question, and the longest pause between two of its pieces."""

    request_id: str = ""
    longest_gap_s: float = 0.0


@dataclass
class Streams:
    """So many at any time; who ends is followed by another."""

    model: FleetModel
    random: Random
    is_over: bool = False
    asked: list[Stream] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    """Requests that went on with another member."""

    def watch(self) -> None:
        """Note who moves, at the place where moves are counted."""
        fleet = self.model.fleet
        count = fleet._count_move

        def noted(flight: FleetRequest, member: str) -> None:
            if flight.is_moving:
                self.moved.add(flight.request.request_id)
            count(flight, member)

        setattr(fleet, "_count_move", noted)  # noqa: B010 - not ours to change, but to watch

    async def client(self) -> None:
        """One after the other."""
        while not self.is_over:
            stream = _question(self.random, len(self.asked))
            self.asked.append(stream)
            await ask(self.model, stream)


def _question(random: Random, number: int) -> Stream:
    params = SamplingParams(
        max_tokens=random.randint(40, 200),
        temperature=random.choice((0.0, 1.0)),
        seed=random.getrandbits(60),
        logprobs=random.choice((None, None, 2)),
        presence_penalty=random.choice((0.0, 0.5)),
        ignore_eos=True,
        n=random.choice((1, 1, 1, 2)),
    )
    how = {"tenant": random.choice(("a", "b")), "priority": random.choice(("high", "normal", "low"))}
    return Stream(f"{number} begins like no other, {random.getrandbits(40)}", params, how)


async def ask(model: FleetModel, stream: Stream) -> None:
    """Stream it and keep what came; what goes wrong is kept too."""
    try:
        asked = model.submit_ids(await model.prompt_ids(stream.prompt), stream.params, **stream.how)
        stream.request_id, last_s = asked.request_id, None
        try:
            async for _piece in asked:
                now_s = time.monotonic()
                stream.longest_gap_s = max(stream.longest_gap_s, 0.0 if last_s is None else now_s - last_s)
                last_s = now_s
        finally:
            asked.close()
        stream.done = asked.completion()
        for one in stream.done.answers:
            if one.finish_reason not in ("stop", "length"):
                stream.error = one.error or one.finish_reason
    except QuireError as error:
        stream.error = str(error)


async def unequal(model: FleetModel, streams: Sequence[Stream]) -> int:
    """How many are answered otherwise when nothing happens to their members."""
    again = [Stream(one.prompt, one.params, one.how) for one in streams]
    waiting = list(again)

    async def client() -> None:
        while waiting:
            await ask(model, waiting.pop())

    await asyncio.gather(*(client() for _ in range(NUM_STREAMS)))
    pairs = zip(streams, again, strict=True)
    return sum(one.said != other.said or not one.said for one, other in pairs)


@section("moves")
async def moves(proof: Proof) -> None:
    """Killed in turn every two seconds and begun again."""
    with TemporaryDirectory() as folder:
        member_keys, gateway_keys = make_keys(Path(folder) / "keys")
        with member_lives(oracle_command(STEP_S, member_keys), NUM_MEMBERS) as lives:
            await _moves(proof, lives, gateway_keys)


async def _moves(proof: Proof, lives: list[MemberLife], gateway_keys: Path) -> None:
    source, duration_s = FixedMembers([one.address for one in lives]), proof.sized(quick=20.0, full=600.0)
    async with FleetModel("oracle", source, read_gateway_keys(gateway_keys)) as model:
        await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
        streams = Streams(model, proof.random)
        streams.watch()
        clients = [asyncio.create_task(streams.client()) for _ in range(NUM_STREAMS)]
        num_kills, began_s = 0, time.monotonic()
        while time.monotonic() - began_s < duration_s:
            life = lives[num_kills % NUM_MEMBERS]
            await asyncio.to_thread(life.end, signal.SIGKILL)
            await asyncio.to_thread(life.begin_again)
            num_kills += 1
            await asyncio.sleep(max(0.0, began_s + EVERY_S * num_kills - time.monotonic()))
            await until(lambda: model.fleet.num_ready >= NUM_MEMBERS - 1)
            if num_kills % 20 == 0:
                say(f"  {num_kills} kills, {len(streams.asked)} requests, {model.fleet.counts.num_moved} moved")
        streams.is_over = True
        await asyncio.gather(*clients)
        told = model.fleet.counts
        await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
        num_unequal = await unequal(model, streams.asked)
    moved = [one.longest_gap_s for one in streams.asked if one.request_id in streams.moved]
    stayed = [one.longest_gap_s for one in streams.asked if one.request_id not in streams.moved]
    proof.report("kills", num_kills, f"of {NUM_MEMBERS} members in turn, {len(streams.asked)} requests")
    proof.at_least("moved", told.num_moved, proof.sized(quick=30, full=300))
    proof.equals("moved_inexact", told.num_moved_inexact, 0)
    proof.equals("lost", sum(bool(one.error) or one.done is None for one in streams.asked), 0)
    proof.equals("moved_unequal", num_unequal, 0, "of all requests, moved or not")
    gap_ms = 1e3 * (max(moved) - max(stayed))
    proof.at_most("move_gap_ms", gap_ms, 500, f"{1e3 * max(moved):.0f} moved, {1e3 * max(stayed):.0f} undisturbed")


@section("drains")
async def drains(proof: Proof) -> None:
    """Told to end in turn under load; who is told so finishes what it has."""
    with member_lives(oracle_command(STEP_S), NUM_MEMBERS) as lives:
        source = FixedMembers([one.address for one in lives])
        async with FleetModel("oracle", source, None) as model:
            await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
            streams = Streams(model, proof.random)
            clients = [asyncio.create_task(streams.client()) for _ in range(NUM_STREAMS)]
            codes = list[int]()
            for number in range(proof.sized(quick=4, full=20)):
                life = lives[number % NUM_MEMBERS]
                codes.append(await asyncio.to_thread(life.end, signal.SIGTERM))
                await asyncio.to_thread(life.begin_again)
                await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
            streams.is_over = True
            await asyncio.gather(*clients)
            num_moved = model.fleet.counts.num_moved
    proof.equals("drained", sum(bool(one.error) for one in streams.asked), 0, f"{len(streams.asked)} requests: errors")
    proof.equals("drained_moved", num_moved, 0, "streams that could not end where they ran")
    proof.equals(
        "drained_codes", sum(map(bool, codes)), 0, f"{len(codes)} members told to end: exit codes that are not 0"
    )
