"""The proof of members that lie: a gateway in a process of its own, a good member beside the liar, real sockets.

The good member is quire's own with an oracle. The liar is a server of the OpenAI API that publishes KV events; it sends
one kind of what no honest server does after the other. Meanwhile streams that only the good member can serve go on, and
`/health` is polled. A probe inside the gateway measures its event loop in processor time (`probed_gateway`).
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.record import say
from benchmarks.servers import HOST, free_port
from proofs.api.load import percentile
from proofs.findings.members.lying_member import ALL_LIES, NUM_BLOCKS
from proofs.fleet.processes import member_lives, oracle_command
from proofs.framework.proof import Proof, section
from quire.fleet.kv_events.batches import MAX_BATCH_BYTES
from quire.fleet.kv_events.reader import MAX_HELD_BYTES
from quire.fleet.kv_events.subscriber import MAX_UNREAD
from quire.fleet.openai.stream import MAX_LINE_BYTES
from quire.http_client import MAX_BODY_BYTES
from tests.support.machine.spawned import LISTENING, MEMBER_AT, in_checkout, spawned

STEP_S = 0.02
NUM_GOOD, NUM_ANY = 6, 4
"""Streams that only the good member can serve, and such as the liar may get."""
ANSWER_TOKENS = 48
NAME_BYTES = 512
"""Of a block's name in the gateway, with all that points to it."""
LATE_S = 15.0
"""A liar that was left is met again by then."""
SHOWN = 3
OWN_BYTES = 64 << 20
"""What the gateway may grow by itself: clients, connections, what the allocator keeps."""
BUDGET_BYTES = (
    OWN_BYTES
    + MAX_HELD_BYTES
    + MAX_UNREAD * MAX_BATCH_BYTES
    + 2 * NUM_BLOCKS * NAME_BYTES
    + (NUM_ANY + NUM_GOOD) * MAX_LINE_BYTES
    + MAX_BODY_BYTES
)


@dataclass
class Watched:
    """What was seen of the gateway."""

    url: str
    pid: int
    health_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    num_whole: int = 0
    num_lost: int = 0
    """Of the streams that only the good member can serve."""
    num_other_ends: int = 0
    """Of the others: such as the liar had begun, and its lie ended."""
    is_over: bool = False


@section("members: a liar beside a good one")
def members(proof: Proof) -> None:
    """No turn of the gateway's loop is long, its memory is bounded, and the good member's streams lose nothing."""
    lie_s = proof.sized(quick=3.0, full=14.0)
    with member_lives(oracle_command(STEP_S), 1) as (good,), liar() as (line, pid):
        file = proof.folder / "members.txt"
        file.write_text(f"{good.address}\n{line}\n")
        with gateway(file, proof.folder / "turns.json") as (url, gateway_pid):
            asyncio.run(_lied_to(proof, Watched(url, gateway_pid), line, lie_s))
        say(f"  (the liar was process {pid})")


async def _lied_to(proof: Proof, seen: Watched, line: str, lie_s: float) -> None:
    liar_url = line.removeprefix("openai:").partition(" ")[0]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await _ready(proof.folder / "admin.sock")
        good = [_asking(session, seen, f"{at} good", for_quire=True) for at in range(NUM_GOOD)]
        others = [_asking(session, seen, f"{at} any", for_quire=False) for at in range(NUM_ANY)]
        tasks = [asyncio.create_task(one) for one in (*good, *others, _polling(session, seen))]
        await asyncio.sleep(lie_s)
        before_bytes = seen.peak_bytes
        os.kill(seen.pid, signal.SIGUSR1)
        await asyncio.sleep(lie_s)
        quiet = await _turns(proof.folder / "turns.json", seen.pid)
        quiet_health_s, seen.health_s = seen.health_s, []
        longest = {}
        for lie in ALL_LIES:
            os.kill(seen.pid, signal.SIGUSR1)
            await _told(session, liar_url, lie, lie_s)
            longest[lie] = await _turns(proof.folder / "turns.json", seen.pid)
            say(f"    {lie:14} longest turn {longest[lie]:6.1f} ms, memory {seen.peak_bytes >> 20} MB")
        num_told = await (await session.get(f"{liar_url}/lies")).json(content_type=None)
        seen.is_over = True
        await asyncio.gather(*tasks)
    for lie in ALL_LIES:
        proof.report(f"gateway_lie_{lie}", num_told.get(lie, 0), f"times; longest turn {longest[lie]:.1f} ms")
    proof.holds("gateway_lied_to", all(num_told.get(lie, 0) for lie in ALL_LIES), "each lie was sent at least once")
    proof.report("gateway_quiet_turn_ms", quiet, "the same without a lie")
    proof.at_most("gateway_turn_ms", max(longest.values()), 50, "longest turn of the event loop in processor time")
    proof.report("gateway_quiet_health_p99_ms", 1000 * percentile(quiet_health_s, 0.99), "the same without a lie")
    proof.at_most("gateway_health_p99_ms", 1000 * percentile(seen.health_s, 0.99), 150)
    over = max(0, seen.peak_bytes - before_bytes - BUDGET_BYTES)
    proof.equals("gateway_over_budget_bytes", over, 0, f"growth beyond {BUDGET_BYTES >> 20} MB")
    proof.report("gateway_grown_mb", (seen.peak_bytes - before_bytes) >> 20)
    proof.report("gateway_streams_whole", seen.num_whole)
    proof.report("gateway_streams_of_liar_ended", seen.num_other_ends, "with an error, by the liar's own word")
    proof.equals("gateway_streams_lost", seen.num_lost, 0, "of those that only the good member can serve")


async def _told(session: aiohttp.ClientSession, url: str, lie: str, seconds: float) -> None:
    """So long, and until it was sent once: a member that was left is met again only after a while."""
    await (await session.get(f"{url}/lie/{lie}")).read()
    least_s, most_s = monotonic() + seconds, monotonic() + seconds + LATE_S
    while monotonic() < most_s:
        num_told = await (await session.get(f"{url}/lies")).json(content_type=None)
        if num_told.get(lie, 0) and monotonic() >= least_s:
            return
        await asyncio.sleep(0.2)


async def _turns(file: Path, pid: int) -> float:
    """The longest turn since the last beginning, in ms."""
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    while not file.exists():
        await asyncio.sleep(0.01)
    turns: list[float] = json.loads(file.read_text())
    return max(turns, default=0.0)


async def _ready(admin: Path) -> None:
    """Both members are there."""
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(admin))) as session:
        while True:
            async with session.get("http://admin/stats") as response:
                if (await response.text()).count('"ready"') >= 2:
                    return
            await asyncio.sleep(0.1)


async def _polling(session: aiohttp.ClientSession, seen: Watched) -> None:
    while not seen.is_over:
        began_s = monotonic()
        async with session.get(f"{seen.url}/health") as response:
            await response.read()
        seen.health_s.append(monotonic() - began_s)
        status = Path(f"/proc/{seen.pid}/statm").read_text().split()
        seen.peak_bytes = max(seen.peak_bytes, int(status[1]) * os.sysconf("SC_PAGE_SIZE"))
        await asyncio.sleep(0.02)


async def _asking(session: aiohttp.ClientSession, seen: Watched, words: str, *, for_quire: bool) -> None:
    """Streams, one after the other."""
    number = 0
    while not seen.is_over:
        number += 1
        text = await _answer(session, seen.url, f"{words} {number}", for_quire=for_quire)
        is_whole = f'"completion_tokens":{ANSWER_TOKENS}' in text.replace(" ", "") and "[DONE]" in text
        if for_quire and not is_whole and seen.num_lost < SHOWN:
            say(f"    lost: {text[-300:]!r}")
        seen.num_whole += is_whole
        seen.num_lost += for_quire and not is_whole
        seen.num_other_ends += not for_quire and not is_whole


async def _answer(session: aiohttp.ClientSession, url: str, prompt: str, *, for_quire: bool) -> str:
    """All of a stream, or why there is none."""
    body: dict[str, Any] = {"model": "oracle", "prompt": prompt, "max_tokens": ANSWER_TOKENS}
    body |= {"structured_outputs": {"regex": "[a-f]{400}"}} if for_quire else {"ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            return (await response.read()).decode()
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"


# -- processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def liar() -> Iterator[tuple[str, int]]:
    """Its line in a list of members, and its process."""
    with spawned([sys.executable, "-m", "proofs.findings.members.lying_member"], None, in_checkout(), stops_s=0) as one:
        yield one.wait_for(MEMBER_AT), one.pid


@contextmanager
def gateway(listed: Path, turns: Path) -> Iterator[tuple[str, int]]:
    """Its URL and its process, once it listens."""
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "proofs.findings.members.probed_gateway",
        str(turns),
        "fleet",
        "gateway",
        "--members",
        str(listed),
    ]
    own = ["--name", "oracle", "--port", str(port), "--admin-socket", str(turns.parent / "admin.sock")]
    with spawned([*words, *own], None, in_checkout()) as one:
        one.wait_for(LISTENING)
        yield f"http://{HOST}:{port}", one.pid
