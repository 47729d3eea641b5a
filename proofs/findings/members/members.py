"""The proof of malicious members of a fleet: a gateway with a good member and one that lies, over real sockets.

The good member is quire with an oracle, a simulated model. The liar (`lying_member`) is a server of the OpenAI API
that publishes KV events; it sends one kind of lie after the other. Meanwhile streams run that only the good member can
serve, and `/health` is polled. A probe inside the gateway (`probed_gateway`) measures the turns of its event loop.
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
from proofs.fleet.processes import member_processes, oracle_command
from proofs.framework.proof import Proof, section
from quire.fleet.kv_events.batches import MAX_BATCH_BYTES
from quire.fleet.kv_events.reader import MAX_HELD_BYTES
from quire.fleet.kv_events.subscriber import MAX_UNREAD
from quire.fleet.openai.stream import MAX_LINE_BYTES
from quire.http_client import MAX_BODY_BYTES
from tests.support.machine.spawned import LISTENING, MEMBER_AT, in_checkout, spawned

STEP_S = 0.02
NUM_GOOD, NUM_ANY = 6, 4
"""Streams that only the good member can serve, and streams that the liar may get."""
ANSWER_TOKENS = 48
HASH_BYTES = 512
"""Memory for a block's hash in the gateway, with all references to it."""
RECONNECT_S = 15.0
"""Within this time the gateway connects again to a member that it has disconnected."""
SHOWN = 3
OWN_BYTES = 64 << 20
"""By how much the gateway may grow without lies: clients, connections, memory that the allocator keeps."""
BUDGET_BYTES = (
    OWN_BYTES
    + MAX_HELD_BYTES
    + MAX_UNREAD * MAX_BATCH_BYTES
    + 2 * NUM_BLOCKS * HASH_BYTES
    + (NUM_ANY + NUM_GOOD) * MAX_LINE_BYTES
    + MAX_BODY_BYTES
)


@dataclass
class Stats:
    """The gateway, and what was measured of it."""

    url: str
    pid: int
    health_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    num_whole: int = 0
    num_lost: int = 0
    """Incomplete streams of those that only the good member can serve."""
    num_other_ends: int = 0
    """Incomplete streams of the others: the liar had begun them, and its lie ended them."""
    is_over: bool = False


@section("members: a liar beside a good one")
def members(proof: Proof) -> None:
    """No turn of the gateway's loop is long, its memory is bounded, and the good member's streams are complete."""
    lie_s = proof.sized(quick=3.0, full=14.0)
    with member_processes(oracle_command(STEP_S), 1) as (good,), liar() as (line, pid):
        file = proof.folder / "members.txt"
        file.write_text(f"{good.address}\n{line}\n")
        with gateway(file, proof.folder / "turns.json") as (url, gateway_pid):
            asyncio.run(_measure(proof, Stats(url, gateway_pid), line, lie_s))
        say(f"  (the liar was process {pid})")


async def _measure(proof: Proof, stats: Stats, line: str, lie_s: float) -> None:
    liar_url = line.removeprefix("openai:").partition(" ")[0]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await _until_ready(proof.folder / "admin.sock")
        good = [_request_streams(session, stats, f"{i} good", for_quire=True) for i in range(NUM_GOOD)]
        others = [_request_streams(session, stats, f"{i} any", for_quire=False) for i in range(NUM_ANY)]
        tasks = [asyncio.create_task(coroutine) for coroutine in (*good, *others, _poll(session, stats))]
        await asyncio.sleep(lie_s)
        before_bytes = stats.peak_bytes
        os.kill(stats.pid, signal.SIGUSR1)
        await asyncio.sleep(lie_s)
        quiet_ms = await _longest_turn_ms(proof.folder / "turns.json", stats.pid)
        quiet_health_s, stats.health_s = stats.health_s, []
        longest_ms = {}
        for lie in ALL_LIES:
            os.kill(stats.pid, signal.SIGUSR1)
            await _send_lie(session, liar_url, lie, lie_s)
            longest_ms[lie] = await _longest_turn_ms(proof.folder / "turns.json", stats.pid)
            say(f"    {lie:14} longest turn {longest_ms[lie]:6.1f} ms, memory {stats.peak_bytes >> 20} MB")
        num_sent = await (await session.get(f"{liar_url}/lies")).json(content_type=None)
        stats.is_over = True
        await asyncio.gather(*tasks)
    for lie in ALL_LIES:
        proof.report(f"gateway_lie_{lie}", num_sent.get(lie, 0), f"times; longest turn {longest_ms[lie]:.1f} ms")
    proof.holds("gateway_lied_to", all(num_sent.get(lie, 0) for lie in ALL_LIES), "each lie was sent at least once")
    proof.report("gateway_quiet_turn_ms", quiet_ms, "longest turn without lies")
    proof.at_most("gateway_turn_ms", max(longest_ms.values()), 50, "longest turn of the event loop in processor time")
    proof.report("gateway_quiet_health_p99_ms", 1000 * percentile(quiet_health_s, 0.99), "/health without lies")
    proof.at_most("gateway_health_p99_ms", 1000 * percentile(stats.health_s, 0.99), 150)
    excess_bytes = max(0, stats.peak_bytes - before_bytes - BUDGET_BYTES)
    proof.equals("gateway_over_budget_bytes", excess_bytes, 0, f"growth beyond {BUDGET_BYTES >> 20} MB")
    proof.report("gateway_grown_mb", (stats.peak_bytes - before_bytes) >> 20)
    proof.report("gateway_streams_whole", stats.num_whole)
    proof.report("gateway_streams_of_liar_ended", stats.num_other_ends, "with an error, because the liar broke them")
    proof.equals("gateway_streams_lost", stats.num_lost, 0, "of those that only the good member can serve")


async def _send_lie(session: aiohttp.ClientSession, url: str, lie: str, seconds: float) -> None:
    """Make the liar send a lie for some seconds; longer, until it was sent once, if the gateway is disconnected."""
    await (await session.get(f"{url}/lie/{lie}")).read()
    min_end_s, max_end_s = monotonic() + seconds, monotonic() + seconds + RECONNECT_S
    while monotonic() < max_end_s:
        num_sent = await (await session.get(f"{url}/lies")).json(content_type=None)
        if num_sent.get(lie, 0) and monotonic() >= min_end_s:
            return
        await asyncio.sleep(0.2)


async def _longest_turn_ms(file: Path, pid: int) -> float:
    """The longest turn of the gateway's event loop since the last SIGUSR1."""
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    while not file.exists():
        await asyncio.sleep(0.01)
    turns: list[float] = json.loads(file.read_text())
    return max(turns, default=0.0)


async def _until_ready(admin: Path) -> None:
    """Wait until both members are ready."""
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(admin))) as session:
        while True:
            async with session.get("http://admin/stats") as response:
                if (await response.text()).count('"ready"') >= 2:
                    return
            await asyncio.sleep(0.1)


async def _poll(session: aiohttp.ClientSession, stats: Stats) -> None:
    while not stats.is_over:
        start_s = monotonic()
        async with session.get(f"{stats.url}/health") as response:
            await response.read()
        stats.health_s.append(monotonic() - start_s)
        pages = int(Path(f"/proc/{stats.pid}/statm").read_text().split()[1])
        stats.peak_bytes = max(stats.peak_bytes, pages * os.sysconf("SC_PAGE_SIZE"))
        await asyncio.sleep(0.02)


async def _request_streams(session: aiohttp.ClientSession, stats: Stats, words: str, *, for_quire: bool) -> None:
    """Request one stream after the other; with `for_quire`, streams that only the good member can serve."""
    number = 0
    while not stats.is_over:
        number += 1
        text = await _answer(session, stats.url, f"{words} {number}", for_quire=for_quire)
        is_whole = f'"completion_tokens":{ANSWER_TOKENS}' in text.replace(" ", "") and "[DONE]" in text
        if for_quire and not is_whole and stats.num_lost < SHOWN:
            say(f"    lost: {text[-300:]!r}")
        stats.num_whole += is_whole
        stats.num_lost += for_quire and not is_whole
        stats.num_other_ends += not for_quire and not is_whole


async def _answer(session: aiohttp.ClientSession, url: str, prompt: str, *, for_quire: bool) -> str:
    """The whole text of a stream, or the error."""
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
    """Start the liar; yields its line for a list of members, and its process id."""
    command = [sys.executable, "-m", "proofs.findings.members.lying_member"]
    with spawned(command, None, in_checkout(), stops_s=0) as process:
        yield process.wait_for(MEMBER_AT), process.pid


@contextmanager
def gateway(members_file: Path, turns_file: Path) -> Iterator[tuple[str, int]]:
    """Start the gateway with the probe; yields its URL and its process id."""
    port = free_port()
    command = [sys.executable, "-m", "proofs.findings.members.probed_gateway", str(turns_file), "fleet", "gateway"]
    options = ["--members", str(members_file)]
    options += ["--name", "oracle", "--port", str(port), "--admin-socket", str(turns_file.parent / "admin.sock")]
    with spawned([*command, *options], None, in_checkout()) as process:
        process.wait_for(LISTENING)
        yield f"http://{HOST}:{port}", process.pid
