"""The overhead of a gateway: the same oracle behind a plain server and behind a gateway with keys, in alternation; and
how soon a member is idle after its client has disconnected."""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.record import say
from proofs.api.load import Streams
from proofs.fleet.processes import member_processes, oracle_command
from proofs.framework.proof import Proof, section
from quire.client.request.params import SamplingParams
from quire.fleet.gateway.client import FleetModel
from quire.fleet.protocol.keys import make_keys
from tests.support.fleet.small_fleets import SmallMember, small_fleet
from tests.support.machine.spawned import LISTENING, in_checkout, spawned

STEP_S = 0.01
STREAMS = Streams(32, 200)
HOST = "127.0.0.1"
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@contextmanager
def serve(*arguments: str) -> Iterator[int]:
    """Start a server, and yield its port."""
    with spawned([sys.executable, "-m", *arguments], None, in_checkout(), stops_s=0) as server:
        yield int(server.wait_for(LISTENING))


@contextmanager
def plain_and_fleet(folder: Path) -> Iterator[dict[str, int]]:
    """Yield the ports of a plain server and of a gateway with one member."""
    member_keys, gateway_keys = make_keys(folder / "keys")
    members_file = folder / "members.txt"
    options = ("--port", "0", "--admin-socket")
    with member_processes(oracle_command(STEP_S, member_keys), 1) as members:
        members_file.write_text(members[0].address)
        gateway = ("quire", "fleet", "gateway", "--members", str(members_file), "--fleet-keys", str(gateway_keys))
        server = ("tests.support.servers.oracle_server", "--step-s", str(STEP_S), *options, str(folder / "one.sock"))
        with serve(*server) as alone, serve(*gateway, *options, str(folder / "many.sock")) as fleet:
            yield {"alone": alone, "fleet": fleet}


def model_at(port: int) -> str:
    """Return the name of the server's model."""
    connection = HTTPConnection(HOST, port, timeout=60)
    connection.request("GET", "/v1/models")
    name: str = json.loads(connection.getresponse().read())["data"][0]["id"]
    connection.close()
    return name


def ttft_ms(port: int, model: str, number: int) -> float:
    """Return the milliseconds from the request to its first chunk."""
    body = {"model": model, "prompt": f"{number} begins", "max_tokens": 2, "stream": True, "ignore_eos": True}
    connection = HTTPConnection(HOST, port, timeout=60)
    connection.connect()
    start_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while not response.readline().startswith(b"data:"):
        pass
    duration_s = time.perf_counter() - start_s
    response.read()
    connection.close()
    return 1e3 * duration_s


def alternate(ports: dict[str, int], number: int) -> Sequence[tuple[str, int]]:
    """Return the servers in an order that is reversed in every round."""
    return list(ports.items()) if number % 2 else list(reversed(ports.items()))


@section("cost")
def cost(proof: Proof) -> None:
    """TTFT and throughput through a gateway, compared with those of a plain server."""
    with plain_and_fleet(proof.folder) as ports:
        names = {kind: model_at(port) for kind, port in ports.items()}
        ttfts_ms: dict[str, list[float]] = {kind: [] for kind in ports}
        for number in range(proof.sized(quick=40, full=400)):
            for kind, port in alternate(ports, number):
                ttfts_ms[kind].append(ttft_ms(port, names[kind], number))
        speed: dict[str, list[float]] = {kind: [] for kind in ports}
        for number in range(proof.sized(quick=4, full=20)):
            for kind, port in alternate(ports, number):
                speed[kind].append(STREAMS.tokens_per_s(port, names[kind], number))
    medians = {kind: statistics.median(times_ms) for kind, times_ms in ttfts_ms.items()}
    ratios = [fleet / alone for fleet, alone in zip(speed["fleet"], speed["alone"], strict=True)]
    say(f"  ratios of tokens/s: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    proof.at_most(
        "fleet_overhead_ttft", medians["fleet"] - medians["alone"], 5.0, f"ms more; {medians['alone']:.1f} alone"
    )
    proof.at_least(
        "fleet_throughput", statistics.median(ratios), 0.93, f"{STREAMS.count} streams, 10 ms a step, with keys"
    )


@section("leaving")
async def leaving(proof: Proof) -> None:
    """Milliseconds from closing a stream early until its member is idle."""
    times_ms = list[float]()
    async with small_fleet(2, step_s=STEP_S) as (model, members):
        for number in range(proof.sized(quick=50, full=500)):
            times_ms.append(await _idle_after_ms(model, members, number))
    times_ms.sort()
    note = f"p99 of {len(times_ms)}; p50 {statistics.median(times_ms):.1f}"
    proof.at_most("leave_ms", times_ms[int(0.99 * (len(times_ms) - 1))], 250, note)


async def _idle_after_ms(model: FleetModel, members: list[SmallMember], number: int) -> float:
    stream = model.submit_ids(await model.prompt_ids(f"{number} begins"), LONG)
    async for _piece in stream:
        break
    start_s = time.perf_counter()
    stream.close()
    while any(member.supervisor.num_open for member in members):
        await asyncio.sleep(0.001)
    return 1e3 * (time.perf_counter() - start_s)
