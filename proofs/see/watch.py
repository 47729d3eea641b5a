"""The cost of the watch stream: output tokens/s with three readers over none, the snapshots that are made without a
reader (none are allowed), and the time that a snapshot takes within a step.

A complete server runs, with 20,000 blocks and 64 streams; the model in its worker is an oracle whose steps take as long
as those of a small model. Rounds with readers alternate with rounds without; each round opens its readers anew.
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
    """A client of the watch stream that reads all bytes and counts events."""

    def __init__(self, port: int) -> None:
        self.num_events = 0
        self.num_bytes = 0
        self._connection = socket.create_connection((HOST, port))
        self._connection.sendall(b"GET /v1/admin/watch HTTP/1.1\r\nhost: localhost\r\n\r\n")
        self.has_data = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := self._connection.recv(1 << 16):
            self.num_bytes += len(data)
            self.num_events += data.count(b"event: snapshot")
            self.has_data.set()

    def disconnect(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


@contextmanager
def open_readers(port: int, count: int) -> Iterator[list[Reader]]:
    """Open `count` readers, and wait until each has received data."""
    readers = [Reader(port) for _ in range(count)]
    try:
        for reader in readers:
            reader.has_data.wait(60)
        yield readers
    finally:
        for reader in readers:
            reader.disconnect()


def processor_s(server: Server) -> float:
    """The processor time that the server and its worker have used."""
    ticks = 0
    for pid in server.pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def num_snapshots(server: Server) -> int:
    """The number of snapshots that the worker has made, by its last event."""
    return int(server.admin("/stats")["models"][0]["engine"]["num_snapshots"])


@contextmanager
def serving(proof: Proof) -> Iterator[Server]:
    words = ("--step-s", str(STEP_S), "--blocks", str(BLOCKS), "--running", str(STREAMS.count))
    with started(proof.folder, *words, "--insecure", "1") as server:
        STREAMS.tokens_per_s(server.port, "oracle", -1)
        yield server


@section("watch cost")
def watch_cost(proof: Proof) -> None:
    """Compare pairs of rounds, with readers and without; the bound holds for the median of their ratios."""
    num_pairs = proof.sized(quick=4, full=20)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    processor_times: dict[bool, list[float]] = {True: [], False: []}
    rates: list[float] = []
    with serving(proof) as server:
        for number in range(2 * num_pairs):
            is_watched = number % 4 in (1, 2)  # the order within a pair alternates
            with open_readers(server.port, NUM_READERS if is_watched else 0) as readers:
                start_s = time.perf_counter()
                counts, used_s = [reader.num_events for reader in readers], processor_s(server)
                speeds[is_watched].append(STREAMS.tokens_per_s(server.port, "oracle", number))
                elapsed_s = time.perf_counter() - start_s
                processor_times[is_watched].append(processor_s(server) - used_s)
                rates += [(reader.num_events - old) / elapsed_s for reader, old in zip(readers, counts, strict=True)]
    ratios = [watched / unwatched for watched, unwatched in zip(speeds[True], speeds[False], strict=True)]
    proof.report("unwatched_tokens_per_s", median(speeds[False]))
    proof.report("watched_tokens_per_s", median(speeds[True]), f"{NUM_READERS} readers, {BLOCKS} blocks")
    proof.report("watch_cost_spread", spread(ratios))
    processor_ratio = median(processor_times[True]) / median(processor_times[False])
    proof.report("watch_processor", processor_ratio, "processor time of a round, of server and worker, over unwatched")
    proof.at_least("watch_cost", median(ratios), 0.97, f"median of {num_pairs} pairs of rounds")
    proof.at_least("watch_events_per_s", min(rates), 2, "the lowest rate of a reader")


@section("unwatched snapshots")
def unwatched_snapshots(proof: Proof) -> None:
    """Count the worker's snapshots in loads without readers: before, between and after loads with readers."""
    num_loads = proof.sized(quick=2, full=10)
    num_unwatched = num_watched = 0
    with serving(proof) as server:
        num_unwatched += num_snapshots(server)
        for number in range(num_loads):
            num_before = num_snapshots(server)
            with open_readers(server.port, 1 + number % NUM_READERS):
                STREAMS.tokens_per_s(server.port, "oracle", 2 * number)
            # A snapshot that had begun when the last reader disconnected is counted with the events of this load.
            STREAMS.tokens_per_s(server.port, "oracle", -2)
            num_after = num_snapshots(server)
            num_watched += num_after - num_before
            STREAMS.tokens_per_s(server.port, "oracle", 2 * number + 1)
            num_unwatched += num_snapshots(server) - num_after
    proof.at_least("watched_snapshots", num_watched, num_loads, "a control: the counter counts")
    proof.equals("unwatched_snapshots", num_unwatched, 0, f"{2 * num_loads + 1} loads of {STREAMS.count} streams")


def full_memory(num_blocks: int) -> KVMemory:
    """Make a KV memory full of cached chains of blocks with forks; 64 tables hold a few of them."""
    memory = KVMemory(KVMemoryConfig(num_blocks, BLOCK_SIZE), BlockHasher(bytes(32)))
    namespace = Namespace(1, "model", "", "layout", BLOCK_SIZE, "tenant:someone")
    number, held_tables = 0, list[BlockTable]()
    while memory.pool.num_blank > CHAIN_BLOCKS:
        shared_tokens = [number % 97] * (BLOCK_SIZE * (1 + number % SHARED_BLOCKS))
        own_tokens = [100 + number] * (BLOCK_SIZE * CHAIN_BLOCKS - len(shared_tokens))
        table = memory.open(namespace)
        memory.match(table, [*shared_tokens, *own_tokens])
        num_tokens = len(shared_tokens) + len(own_tokens) - table.num_computed
        memory.reserve(table, [*shared_tokens, *own_tokens], num_tokens)
        memory.commit(table, num_tokens)
        if number < 64:
            held_tables.append(table)
        else:
            memory.release(table)
        number += 1
    return memory


def drawing_ms(memory: KVMemory) -> float:
    """The time to draw a whole map of the pool."""
    start_s = time.thread_time()
    drawing = PoolDrawing(memory.pool, memory.pins, memory.tables.values(), BLOCK_SIZE)
    for _ in drawing.pieces():
        pass
    drawing.result()
    return 1e3 * (time.thread_time() - start_s)


def stops_ms(memory: KVMemory, num_steps: int) -> tuple[list[float], float]:
    """Of steps that are 20 ms apart: how long each would wait for the snapshot, and the share of that in all time."""
    snapshots: list[EngineSnapshot] = []
    scheduler = Scheduler(SchedulerConfig(max_step_tokens=256, max_running=64), memory)
    watch = EngineWatch(scheduler, memory, PERIOD_S, snapshots.append)
    stops: list[float] = []
    for number in range(num_steps):
        start_s = time.thread_time()
        watch.work(partial(_clock, STEP_S * number))
        stops.append(1e3 * (time.thread_time() - start_s))
    if not snapshots:
        raise RuntimeError("expected at least one snapshot, got none")
    return stops, sum(stops) / (1e3 * STEP_S * num_steps)


def _clock(slept_s: float) -> float:
    return slept_s + time.thread_time()


@section("what a snapshot takes")
def snapshot_costs(proof: Proof) -> None:
    """Measure snapshots in processor time, which other processes of the machine change little."""
    num_large = proof.sized(quick=200_000, full=1_000_000)
    freeze_startup_objects()  # as a worker does, so that objects of the proofs cost nothing
    for name, num_blocks in (("20k", BLOCKS), ("large", num_large)):
        memory = full_memory(num_blocks)
        stops, share = stops_ms(memory, proof.sized(quick=500, full=4000))
        proof.report(f"map_ms_{name}", median(drawing_ms(memory) for _ in range(9)), f"{num_blocks:,} blocks")
        proof.report(f"stop_p99_ms_{name}", quantiles(stops, n=100)[98], "that a step waits, the tree included")
        proof.at_most(f"stop_longest_ms_{name}", max(stops), 25, "the links of the tree are copied at once")
        proof.at_most(f"drawing_share_{name}", share, 0.03, f"of the time, with steps of {STEP_S * 1e3:.0f} ms")
