"""Measures the router of a large fleet: memory of its index, events per second, time of a choice, spread of a burst.

There are 64 members with 100,000 cached blocks each, a tenth of which all members have. A prompt has 400 blocks: first
some that all members have, then some that one member has, then new ones. The depth of a member is the number of leading
blocks that it has.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles

from proofs.framework.proof import Proof, section
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.block_names import names_of, root_name
from quire.fleet.routing.router import RoutedPrompt, Router
from tests.support.fleet.router_invariants import is_swept

BLOCK_SIZE = 32
CHAIN_BLOCKS, PROMPT_BLOCKS = 250, 400
EVENT_BLOCKS = 25
"""Number of blocks in one KV event."""
NUM_SHARED = 2
"""Number of chains, among those that all members have, with which prompts begin."""
BURST, BURST_MEMBERS = 64, 4


def _fleet_size(proof: Proof) -> tuple[int, int]:
    """Return the number of members, and of blocks that each has."""
    return proof.sized(quick=16, full=64), proof.sized(quick=5_000, full=100_000)


def _chains(random: Random, num_blocks: int) -> list[list[int]]:
    """Random block names, which are quicker to generate than digests and equally distributed."""
    chains = num_blocks // CHAIN_BLOCKS
    return [[random.getrandbits(63) for _ in range(CHAIN_BLOCKS)] for _ in range(chains)]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _cpu_seconds(call: Callable[[], object]) -> float:
    """Return processor time, which does not count the time that other processes take."""
    start_s = time.thread_time()
    call()
    return time.thread_time() - start_s


def _fill(router: Router, random: Random, num_members: int, num_blocks: int) -> tuple[list[list[int]], float]:
    """Add all members and their blocks; return a few chains for prompts, and the time that adding the blocks took."""
    shared = _chains(random, num_blocks // 10)
    prompt_chains, spent_s = shared[:NUM_SHARED], 0.0
    for number in range(num_members):
        member = f"m{number}"
        router.join(member, BLOCK_SIZE, 0.0)
        router.mark_ready(member, 0.0)
        chains = [*shared, *_chains(random, num_blocks - num_blocks // 10)]
        events = [chain[row : row + EVENT_BLOCKS] for chain in chains for row in range(0, CHAIN_BLOCKS, EVENT_BLOCKS)]
        spent_s += _cpu_seconds(partial(_add_events, router.index, member, events))
        prompt_chains += chains[-8:]
    return prompt_chains, spent_s


def _add_events(index: BlockIndex, member: str, events: list[list[int]]) -> None:
    for names in events:
        index.add_blocks(member, names)


def _prompts(random: Random, chains: list[list[int]], count: int) -> Iterator[RoutedPrompt]:
    """Prompts of blocks that all members have, then of one member's, then new ones: the depths of members differ."""
    shared, own = chains[:NUM_SHARED], chains[NUM_SHARED:]
    for number in range(count):
        chain = random.randrange(len(own))
        # Block names are chained: the blocks before a given block are always the same.
        names = shared[chain % NUM_SHARED][: 10 + 7 * chain % 90] + own[chain][: random.randrange(CHAIN_BLOCKS)]
        names += [random.getrandbits(63) for _ in range(PROMPT_BLOCKS - len(names))]
        yield RoutedPrompt(f"r{number}", PROMPT_BLOCKS * BLOCK_SIZE + 1, {BLOCK_SIZE: tuple(names)})


@section("the index")
def index(proof: Proof) -> None:
    """Resident memory before and after; it includes the block names, which only the index references."""
    num_members, num_blocks = _fleet_size(proof)
    router = Router()
    gc.collect()
    before = _resident_bytes()
    chains, spent_s = _fill(router, proof.random, num_members, num_blocks)
    gc.collect()
    num_entries, num_blocks_in_events = len(router.index), num_members * num_blocks
    num_bytes = _resident_bytes() - before
    note = f"{num_entries:,} entries of {num_members} x {num_blocks:,} blocks, {num_bytes / 2**20:,.0f} MiB"
    proof.at_most("index_bytes", num_bytes / num_entries, 200, note)
    proof.at_least("events_per_s", num_blocks_in_events / spent_s, 100_000, "blocks of applied events")
    _time_choices(proof, router, chains)
    _time_leaving(proof, router)


def _time_choices(proof: Proof, router: Router, chains: list[list[int]]) -> None:
    """A choice computes depths and costs, and takes the lowest cost; `reserving_us` adds the reservation and the blocks
    that the member is expected to cache. At any time as many prompts as there are members are being computed, and no
    member confirms its blocks, so the index has many expected blocks."""
    num_members = len(router.membership.ready_members)
    searches, choices, reservations, now_s = list[float](), list[float](), list[float](), 0.0
    for number, prompt in enumerate(_prompts(proof.random, chains, proof.sized(quick=3_000, full=9_000))):
        now_s += 0.02
        # Time only one call per prompt: a second one would find its data in the processor's cache.
        if number % 3 == 0:
            searches.append(_cpu_seconds(partial(router.index.depths, prompt.names[BLOCK_SIZE])))
        elif number % 3 == 1:
            choices.append(_cpu_seconds(partial(router.best, prompt)))
        spent_s = _cpu_seconds(partial(router.choose, prompt, now_s))
        if number % 3 == 2:
            reservations.append(spent_s)
        router.mark_computed(f"r{number - num_members}")
        for member in router.membership.ready_members:
            router.record_heartbeat(member, now_s)
        router.advance(now_s)
    proof.report("depth_us", median(searches) * 1e6, "the search of depths alone, p50")
    proof.report("depth_p99_us", quantiles(searches, n=100)[98] * 1e6)
    note = f"p50: {PROMPT_BLOCKS} blocks, {num_members} members"
    proof.at_most("choice_us", median(choices) * 1e6, 50, note)
    proof.at_most("choice_p99_us", quantiles(choices, n=100)[98] * 1e6, 1_000)
    proof.report("reserving_us", median(reservations) * 1e6, "the choice, the reservation and the expected blocks, p50")
    proof.report("reserving_p99_us", quantiles(reservations, n=100)[98] * 1e6)


def _time_leaving(proof: Proof, router: Router) -> None:
    """A leaving member is removed in sweeps; the longest of them is the longest pause of an event loop."""
    leave_s = _cpu_seconds(lambda: router.leave("m0"))
    sweeps = list[float]()
    while not is_swept(router.index):
        sweeps.append(_cpu_seconds(lambda: router.index.sweep(1e9)))
    proof.report("leave_us", leave_s * 1e6)
    proof.report("sweep_max_ms", max(sweeps) * 1e3, f"the longest of {len(sweeps)} until all its blocks were removed")


@section("names")
def names(proof: Proof) -> None:
    root = root_name("model", "", "group")
    tokens = [proof.random.randrange(100_000) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)]
    times = [_cpu_seconds(lambda: names_of(root, tokens, BLOCK_SIZE)) for _ in range(proof.sized(quick=50, full=500))]
    proof.report("names_ms", median(times) * 1e3, f"of a prompt of {PROMPT_BLOCKS} blocks, p50")


@section("burst")
def burst(proof: Proof) -> None:
    """Send 64 requests of one size at once to 4 members: first different prompts, then one prompt, which the
    lowest cost keeps on the member that computes it."""
    tokens = PROMPT_BLOCKS * BLOCK_SIZE
    for key, is_same in (("burst_imbalance", False), ("burst_same_prompt", True)):
        router = Router()
        for number in range(BURST_MEMBERS):
            router.join(f"m{number}", BLOCK_SIZE, 0.0)
            router.mark_ready(f"m{number}", 0.0)
        counts = dict.fromkeys(router.membership.ready_members, 0)
        common = tuple(proof.random.getrandbits(63) for _ in range(PROMPT_BLOCKS))
        for number in range(BURST):
            own = tuple(proof.random.getrandbits(63) for _ in range(PROMPT_BLOCKS))
            prompt = RoutedPrompt(f"r{number}", tokens, {BLOCK_SIZE: common if is_same else own})
            choice = router.choose(prompt, 1.0)
            if choice is None:
                raise RuntimeError("expected the router to choose one of four ready members, got None")
            counts[choice.member] += 1
        imbalance = max(counts.values()) * BURST_MEMBERS / BURST
        if is_same:
            proof.report(key, imbalance, "maximum over mean, 64 times one prompt")
        else:
            proof.at_most(key, imbalance, 1.25, "maximum over mean, 64 prompts of one size")
