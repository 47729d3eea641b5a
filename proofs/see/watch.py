"""What it costs to look: output tokens/s with three readers of the watch stream over none, snapshots that are made
while nobody looks, and what a snapshot takes of a step.

The server is whole, with an oracle in its worker whose steps take as long as those of a small model: 20,000 blocks, 64
streams. Rounds with readers and without take turns, and a reader comes and goes with each.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from benchmarks.servers import HOST
from proofs.api.load import Server, Streams, started
from proofs.framework.proof import Proof, section
from proofs.framework.ratios import spread
from quire.core.digests import BlockHasher, Namespace
from quire.core.inspect.pool_map import PoolDrawing
from quire.core.inspect.snapshots import EngineSnapshot
from quire.core.memory.block_table import BlockTable
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.engine.engine_watch import EngineWatch
from quire.lasting_objects import freeze_startup_objects

STEP_S = 0.02
BLOCKS = 20_000
STREAMS = Streams(64, 150)
NUM_READERS = 3
PERIOD_S = 0.4
BLOCK_SIZE, CHAIN_BLOCKS, SHARED_BLOCKS = 16, 24, 8


class Reader:
    """One who watches: takes all that comes, and counts the events."""

    def __init__(self, port: int) -> None:
        self.num_events = 0
        self.num_bytes = 0
        self._wire = socket.create_connection((HOST, port))
        self._wire.sendall(b"GET /v1/admin/watch HTTP/1.1\r\nhost: localhost\r\n\r\n")
        self.seen = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := self._wire.recv(1 << 16):
            self.num_bytes += len(data)
            self.num_events += data.count(b"event: snapshot")
            self.seen.set()

    def leave(self) -> None:
        self._wire.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._wire.close()


@contextmanager
def readers(port: int, count: int) -> Iterator[list[Reader]]:
    """So many, each of which has seen something."""
    looking = [Reader(port) for _ in range(count)]
    try:
        for one in looking:
            one.seen.wait(60)
        yield looking
    finally:
        for one in looking:
            one.leave()


def processor_s(server: Server) -> float:
    """That the server and its worker have used."""
    used = 0
    for pid in server.pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")


def num_snapshots(server: Server) -> int:
    """That the worker had made when it said so last: with its last event."""
    return int(server.admin("/stats")["models"][0]["engine"]["num_snapshots"])


@contextmanager
def serving(proof: Proof) -> Iterator[Server]:
    words = ("--step-s", str(STEP_S), "--blocks", str(BLOCKS), "--running", str(STREAMS.count))
    with started(proof.folder, *words, "--insecure", "1") as server:
        STREAMS.tokens_per_s(server.port, "oracle", -1)
        yield server


@section("watch cost")
def watch_cost(proof: Proof) -> None:
    """Pairs of rounds; the ratio is the median of theirs."""
    num_pairs = proof.sized(quick=4, full=20)
    speed: dict[bool, list[float]] = {True: [], False: []}
    used: dict[bool, list[float]] = {True: [], False: []}
    rates: list[float] = []
    with serving(proof) as server:
        for number in range(2 * num_pairs):
            is_watched = number % 4 in (1, 2)  # whoever was first is last in the next pair
            with readers(server.port, NUM_READERS if is_watched else 0) as looking:
                began_s = time.perf_counter()
                before, used_s = [one.num_events for one in looking], processor_s(server)
                speed[is_watched].append(STREAMS.tokens_per_s(server.port, "oracle", number))
                taken_s = time.perf_counter() - began_s
                used[is_watched].append(processor_s(server) - used_s)
                rates += [(one.num_events - had) / taken_s for one, had in zip(looking, before, strict=True)]
    ratios = [one / other for one, other in zip(speed[True], speed[False], strict=True)]
    proof.report("unwatched_tokens_per_s", median(speed[False]))
    proof.report("watched_tokens_per_s", median(speed[True]), f"{NUM_READERS} readers, {BLOCKS} blocks")
    proof.report("watch_cost_spread", spread(ratios))
    more = median(used[True]) / median(used[False])
    proof.report("watch_processor", more, "processor time of a round, of server and worker, over unwatched")
    proof.at_least("watch_cost", median(ratios), 0.97, f"median of {num_pairs} pairs of rounds")
    proof.at_least("watch_events_per_s", min(rates), 2, "the fewest that a reader had")


@section("unwatched snapshots")
def unwatched_snapshots(proof: Proof) -> None:
    """Counted in the worker, over loads before anybody looks, between two looks and after."""
    num_loads = proof.sized(quick=2, full=10)
    unwatched = watched = 0
    with serving(proof) as server:
        unwatched += num_snapshots(server)
        for number in range(num_loads):
            before = num_snapshots(server)
            with readers(server.port, 1 + number % NUM_READERS):
                STREAMS.tokens_per_s(server.port, "oracle", 2 * number)
            # What was under way when the last one left is said with these events.
            STREAMS.tokens_per_s(server.port, "oracle", -2)
            after = num_snapshots(server)
            watched += after - before
            STREAMS.tokens_per_s(server.port, "oracle", 2 * number + 1)
            unwatched += num_snapshots(server) - after
    proof.at_least("watched_snapshots", watched, num_loads, "or the counter counts nothing")
    proof.equals("unwatched_snapshots", unwatched, 0, f"{2 * num_loads + 1} loads of {STREAMS.count} streams")


def filled(num_blocks: int) -> KVMemory:
    """A memory that is full of cached chains with forks; 64 tables hold a few of them."""
    memory = KVMemory(KVMemoryConfig(num_blocks, BLOCK_SIZE), BlockHasher(bytes(32)))
    space = Namespace(1, "model", "", "layout", BLOCK_SIZE, "tenant:someone")
    number, held = 0, list[BlockTable]()
    while memory.pool.num_blank > CHAIN_BLOCKS:
        shared = [number % 97] * (BLOCK_SIZE * (1 + number % SHARED_BLOCKS))
        own = [100 + number] * (BLOCK_SIZE * CHAIN_BLOCKS - len(shared))
        table = memory.open(space)
        memory.match(table, [*shared, *own])
        num_tokens = len(shared) + len(own) - table.num_computed
        memory.reserve(table, [*shared, *own], num_tokens)
        memory.commit(table, num_tokens)
        if number < 64:
            held.append(table)
        else:
            memory.release(table)
        number += 1
    return memory


def drawn_ms(memory: KVMemory) -> float:
    """A map of the pool, from its first piece to its last."""
    began_s = time.thread_time()
    drawing = PoolDrawing(memory.pool, memory.pins, memory.tables.values(), BLOCK_SIZE)
    for _ in drawing.pieces():
        pass
    drawing.result()
    return 1e3 * (time.thread_time() - began_s)


def stops_ms(memory: KVMemory, num_steps: int) -> tuple[list[float], float]:
    """How long each of so many steps, 20 ms apart, would have waited for what is drawn; and the share of the time."""
    shown: list[EngineSnapshot] = []
    scheduler = Scheduler(SchedulerConfig(max_step_tokens=256, max_running=64), memory)
    watch = EngineWatch(scheduler, memory, PERIOD_S, shown.append)
    stops: list[float] = []
    for number in range(num_steps):
        began_s = time.thread_time()
        watch.work(partial(_clock, STEP_S * number))
        stops.append(1e3 * (time.thread_time() - began_s))
    if not shown:
        raise RuntimeError("nothing was shown")
    return stops, sum(stops) / (1e3 * STEP_S * num_steps)


def _clock(slept_s: float) -> float:
    return slept_s + time.thread_time()


@section("what a snapshot takes")
def snapshot_costs(proof: Proof) -> None:
    """In processor time: a busy neighbour makes it slow, but does not stand in it."""
    large = proof.sized(quick=200_000, full=1_000_000)
    freeze_startup_objects()  # as a worker does: what proofs import is not a part of it
    for name, num_blocks in (("20k", BLOCKS), ("large", large)):
        memory = filled(num_blocks)
        stops, share = stops_ms(memory, proof.sized(quick=500, full=4000))
        proof.report(f"map_ms_{name}", median(drawn_ms(memory) for _ in range(9)), f"{num_blocks:,} blocks")
        proof.report(f"stop_p99_ms_{name}", quantiles(stops, n=100)[98], "that a step waits, tree and all")
        proof.at_most(f"stop_longest_ms_{name}", max(stops), 25, "the links of the tree are copied at once")
        proof.at_most(f"drawing_share_{name}", share, 0.03, f"of the time, with steps of {STEP_S * 1e3:.0f} ms")
