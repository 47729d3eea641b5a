"""What a gateway costs: the same oracle behind `quire serve` and behind a gateway with keys, turn about; and how soon a
member is idle after its client has left."""

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
from proofs.fleet.processes import member_lives, oracle_command
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
def listening(*words: str) -> Iterator[int]:
    """A server's port."""
    with spawned([sys.executable, "-m", *words], None, in_checkout(), stops_s=0) as one:
        yield int(one.wait_for(LISTENING))


@contextmanager
def both(folder: Path) -> Iterator[dict[str, int]]:
    """Ports of one server, and of a gateway before one member."""
    member_keys, gateway_keys = make_keys(folder / "keys")
    listed = folder / "members.txt"
    own = ("--port", "0", "--admin-socket")
    with member_lives(oracle_command(STEP_S, member_keys), 1) as lives:
        listed.write_text(lives[0].address)
        words = ("quire", "fleet", "gateway", "--members", str(listed), "--fleet-keys", str(gateway_keys))
        server = ("tests.support.servers.oracle_server", "--step-s", str(STEP_S), *own, str(folder / "one.sock"))
        with listening(*server) as alone, listening(*words, *own, str(folder / "many.sock")) as fleet:
            yield {"alone": alone, "fleet": fleet}


def model_at(port: int) -> str:
    """What the server calls its model."""
    connection = HTTPConnection(HOST, port, timeout=60)
    connection.request("GET", "/v1/models")
    name: str = json.loads(connection.getresponse().read())["data"][0]["id"]
    connection.close()
    return name


def ttft_ms(port: int, model: str, number: int) -> float:
    """From the request to its first piece."""
    body = {"model": model, "prompt": f"{number} begins", "max_tokens": 2, "stream": True, "ignore_eos": True}
    connection = HTTPConnection(HOST, port, timeout=60)
    connection.connect()
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while not response.readline().startswith(b"data:"):
        pass
    taken_s = time.perf_counter() - began_s
    response.read()
    connection.close()
    return 1e3 * taken_s


def turns(ports: dict[str, int], number: int) -> Sequence[tuple[str, int]]:
    """Whoever was first is last in the next round."""
    return list(ports.items()) if number % 2 else list(reversed(ports.items()))


@section("cost")
def cost(proof: Proof) -> None:
    """Medians of all rounds."""
    with both(proof.folder) as ports:
        names = {way: model_at(port) for way, port in ports.items()}
        first: dict[str, list[float]] = {way: [] for way in ports}
        for number in range(proof.sized(quick=40, full=400)):
            for way, port in turns(ports, number):
                first[way].append(ttft_ms(port, names[way], number))
        speed: dict[str, list[float]] = {way: [] for way in ports}
        for number in range(proof.sized(quick=4, full=20)):
            for way, port in turns(ports, number):
                speed[way].append(STREAMS.tokens_per_s(port, names[way], number))
    medians = {way: statistics.median(taken) for way, taken in first.items()}
    ratios = [fleet / alone for fleet, alone in zip(speed["fleet"], speed["alone"], strict=True)]
    say(f"  ratios of tokens/s: {', '.join(f'{one:.3f}' for one in ratios)}")
    proof.at_most(
        "fleet_overhead_ttft", medians["fleet"] - medians["alone"], 5.0, f"ms more; {medians['alone']:.1f} alone"
    )
    proof.at_least(
        "fleet_throughput", statistics.median(ratios), 0.93, f"{STREAMS.count} streams, 10 ms a step, with keys"
    )


@section("leaving")
async def leaving(proof: Proof) -> None:
    """A client closes its stream in the middle; its member is idle so soon."""
    taken = list[float]()
    async with small_fleet(2, step_s=STEP_S) as (model, members):
        for number in range(proof.sized(quick=50, full=500)):
            taken.append(await _left_ms(model, members, number))
    taken.sort()
    proof.at_most(
        "leave_ms", taken[int(0.99 * (len(taken) - 1))], 250, f"p99 of {len(taken)}; p50 {statistics.median(taken):.1f}"
    )


async def _left_ms(model: FleetModel, members: list[SmallMember], number: int) -> float:
    asked = model.submit_ids(await model.prompt_ids(f"{number} begins"), LONG)
    async for _piece in asked:
        break
    began_s = time.perf_counter()
    asked.close()
    while any(member.supervisor.num_open for member in members):
        await asyncio.sleep(0.001)
    return 1e3 * (time.perf_counter() - began_s)
