"""Members that are killed or drained in turn while streams run on them, which clients must not notice.

member 1 ✗───●        ✗───●         one is killed every two seconds and restarted
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
from proofs.fleet.processes import MemberProcess, member_processes, oracle_command
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
    """A request, and the longest pause between two of its chunks."""

    request_id: str = ""
    longest_gap_s: float = 0.0


@dataclass
class Streams:
    """Clients with one open stream each; when a stream ends, its client starts another."""

    model: FleetModel
    random: Random
    is_closing: bool = False
    requests: list[Stream] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    """Ids of requests that moved to another member."""

    def watch(self) -> None:
        """Record the requests that move, by wrapping the method that counts them."""
        fleet = self.model.fleet
        count = fleet._count_move

        def record_and_count(flight: FleetRequest, member: str) -> None:
            if flight.is_moving:
                self.moved.add(flight.request.request_id)
            count(flight, member)

        setattr(fleet, "_count_move", record_and_count)  # noqa: B010 - wraps a private method

    async def client(self) -> None:
        """Run random streams one after the other."""
        while not self.is_closing:
            stream = _random_stream(self.random, len(self.requests))
            self.requests.append(stream)
            await run_stream(self.model, stream)


def _random_stream(random: Random, number: int) -> Stream:
    params = SamplingParams(
        max_tokens=random.randint(40, 200),
        temperature=random.choice((0.0, 1.0)),
        seed=random.getrandbits(60),
        logprobs=random.choice((None, None, 2)),
        presence_penalty=random.choice((0.0, 0.5)),
        ignore_eos=True,
        n=random.choice((1, 1, 1, 2)),
    )
    options = {"tenant": random.choice(("a", "b")), "priority": random.choice(("high", "normal", "low"))}
    return Stream(f"{number} begins like no other, {random.getrandbits(40)}", params, options)


async def run_stream(model: FleetModel, stream: Stream) -> None:
    """Stream the request, and store its completion or its error."""
    try:
        handle = model.submit_ids(await model.prompt_ids(stream.prompt), stream.params, **stream.options)
        stream.request_id, last_s = handle.request_id, None
        try:
            async for _piece in handle:
                now_s = time.monotonic()
                stream.longest_gap_s = max(stream.longest_gap_s, 0.0 if last_s is None else now_s - last_s)
                last_s = now_s
        finally:
            handle.close()
        stream.completion = handle.completion()
        for answer in stream.completion.answers:
            if answer.finish_reason not in ("stop", "length"):
                stream.error = answer.error or answer.finish_reason
    except QuireError as error:
        stream.error = str(error)


async def num_unequal_answers(model: FleetModel, streams: Sequence[Stream]) -> int:
    """Repeat all streams without disturbances, and count those with other answers."""
    again = [Stream(one.prompt, one.params, one.options) for one in streams]
    remaining = list(again)

    async def client() -> None:
        while remaining:
            await run_stream(model, remaining.pop())

    await asyncio.gather(*(client() for _ in range(NUM_STREAMS)))
    pairs = zip(streams, again, strict=True)
    return sum(a.output != b.output or not a.output for a, b in pairs)


@section("moves")
async def moves(proof: Proof) -> None:
    """Members are killed in turn every two seconds and restarted."""
    with TemporaryDirectory() as folder:
        member_keys, gateway_keys = make_keys(Path(folder) / "keys")
        with member_processes(oracle_command(STEP_S, member_keys), NUM_MEMBERS) as members:
            await _moves(proof, members, gateway_keys)


async def _moves(proof: Proof, members: list[MemberProcess], gateway_keys: Path) -> None:
    source, duration_s = FixedMembers([one.address for one in members]), proof.sized(quick=20.0, full=600.0)
    async with FleetModel("oracle", source, read_gateway_keys(gateway_keys)) as model:
        await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
        streams = Streams(model, proof.random)
        streams.watch()
        clients = [asyncio.create_task(streams.client()) for _ in range(NUM_STREAMS)]
        num_kills, start_s = 0, time.monotonic()
        while time.monotonic() - start_s < duration_s:
            member = members[num_kills % NUM_MEMBERS]
            await asyncio.to_thread(member.end, signal.SIGKILL)
            await asyncio.to_thread(member.start)
            num_kills += 1
            await asyncio.sleep(max(0.0, start_s + EVERY_S * num_kills - time.monotonic()))
            await until(lambda: model.fleet.num_ready >= NUM_MEMBERS - 1)
            if num_kills % 20 == 0:
                say(f"  {num_kills} kills, {len(streams.requests)} requests, {model.fleet.counts.num_moved} moved")
        streams.is_closing = True
        await asyncio.gather(*clients)
        counts = model.fleet.counts
        await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
        num_unequal = await num_unequal_answers(model, streams.requests)
    moved = [one.longest_gap_s for one in streams.requests if one.request_id in streams.moved]
    stayed = [one.longest_gap_s for one in streams.requests if one.request_id not in streams.moved]
    proof.report("kills", num_kills, f"of {NUM_MEMBERS} members in turn, {len(streams.requests)} requests")
    proof.at_least("moved", counts.num_moved, proof.sized(quick=30, full=300))
    proof.equals("moved_inexact", counts.num_moved_inexact, 0)
    proof.equals("lost", sum(bool(one.error) or one.completion is None for one in streams.requests), 0)
    proof.equals("moved_unequal", num_unequal, 0, "of all requests, moved or not")
    gap_ms = 1e3 * (max(moved) - max(stayed))
    proof.at_most("move_gap_ms", gap_ms, 500, f"{1e3 * max(moved):.0f} moved, {1e3 * max(stayed):.0f} undisturbed")


@section("drains")
async def drains(proof: Proof) -> None:
    """Members get SIGTERM in turn under load; each must finish its requests first."""
    with member_processes(oracle_command(STEP_S), NUM_MEMBERS) as members:
        source = FixedMembers([one.address for one in members])
        async with FleetModel("oracle", source, None) as model:
            await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
            streams = Streams(model, proof.random)
            clients = [asyncio.create_task(streams.client()) for _ in range(NUM_STREAMS)]
            codes = list[int]()
            for number in range(proof.sized(quick=4, full=20)):
                member = members[number % NUM_MEMBERS]
                codes.append(await asyncio.to_thread(member.end, signal.SIGTERM))
                await asyncio.to_thread(member.start)
                await until(lambda: model.fleet.num_ready == NUM_MEMBERS)
            streams.is_closing = True
            await asyncio.gather(*clients)
            num_moved = model.fleet.counts.num_moved
    proof.equals("drained", sum(bool(one.error) for one in streams.requests), 0, f"errors of {len(streams.requests)}")
    proof.equals("drained_moved", num_moved, 0, "streams that did not end on their member")
    proof.equals("drained_codes", sum(map(bool, codes)), 0, f"of {len(codes)} members: exit codes that are not 0")
