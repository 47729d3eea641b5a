"""The router of a fleet at its size: what the index takes, how fast it learns, how long a choice takes, how a burst
spreads.

64 members with 100,000 blocks each; a tenth of them are everybody's. Prompts of 400 blocks: some that all members hold,
some that one holds, and the rest new.
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
"""Blocks that one event tells of."""
NUM_SHARED = 2
"""Chains of everybody that prompts begin with."""
BURST, BURST_MEMBERS = 64, 4


def _members(proof: Proof) -> tuple[int, int]:
    """How many there are, and how many blocks each has."""
    return proof.sized(quick=16, full=64), proof.sized(quick=5_000, full=100_000)


def _chains(random: Random, num_blocks: int) -> list[list[int]]:
    """Names as good as digests, and quicker made."""
    chains = num_blocks // CHAIN_BLOCKS
    return [[random.getrandbits(63) for _ in range(CHAIN_BLOCKS)] for _ in range(chains)]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _timed(do: Callable[[], object]) -> float:
    """In processor time: a busy neighbour makes it slow, but does not stand in it."""
    start_s = time.thread_time()
    do()
    return time.thread_time() - start_s


def _filled(router: Router, random: Random, num_members: int, num_blocks: int) -> tuple[list[list[int]], float]:
    """All members with all their blocks; a few chains of prompts to come, and how long the index took to learn."""
    shared = _chains(random, num_blocks // 10)
    kept, taken_s = shared[:NUM_SHARED], 0.0
    for number in range(num_members):
        member = f"m{number}"
        router.join(member, BLOCK_SIZE, 0.0)
        router.mark_ready(member, 0.0)
        chains = [*shared, *_chains(random, num_blocks - num_blocks // 10)]
        events = [chain[at : at + EVENT_BLOCKS] for chain in chains for at in range(0, CHAIN_BLOCKS, EVENT_BLOCKS)]
        taken_s += _timed(partial(_tell, router.index, member, events))
        kept += chains[-8:]
    return kept, taken_s


def _tell(index: BlockIndex, member: str, events: list[list[int]]) -> None:
    for names in events:
        index.add_blocks(member, names)


def _prompts(random: Random, chains: list[list[int]], count: int) -> Iterator[RoutedPrompt]:
    """Some blocks of everybody, some of one member's behind them, and the rest new: so the depths of members differ."""
    shared, own = chains[:NUM_SHARED], chains[NUM_SHARED:]
    for number in range(count):
        chain = random.randrange(len(own))
        # Names are chained: what stands before a block is always the same.
        names = shared[chain % NUM_SHARED][: 10 + 7 * chain % 90] + own[chain][: random.randrange(CHAIN_BLOCKS)]
        names += [random.getrandbits(63) for _ in range(PROMPT_BLOCKS - len(names))]
        yield RoutedPrompt(f"r{number}", PROMPT_BLOCKS * BLOCK_SIZE + 1, {BLOCK_SIZE: tuple(names)})


@section("the index")
def index(proof: Proof) -> None:
    """Resident memory before and after, the names counted in: nobody else keeps them."""
    num_members, num_blocks = _members(proof)
    router = Router()
    gc.collect()
    before = _resident_bytes()
    chains, taken_s = _filled(router, proof.random, num_members, num_blocks)
    gc.collect()
    num_entries, num_told = len(router.index), num_members * num_blocks
    taken = _resident_bytes() - before
    told = f"{num_entries:,} entries of {num_members} x {num_blocks:,} blocks, {taken / 2**20:,.0f} MiB"
    proof.at_most("index_bytes", taken / num_entries, 200, told)
    proof.at_least("events_per_s", num_told / taken_s, 100_000, "blocks that events tell of, applied")
    _choices(proof, router, chains)
    _leaving(proof, router)


def _choices(proof: Proof, router: Router, chains: list[list[int]]) -> None:
    """A choice is depths, costs and the least of them; `reserving_us` has the reservation and the blocks believed to
    come as well. As many prompts as there are members are being computed at each moment, and members confirm nothing:
    the index has much to believe."""
    num_members = len(router.membership.ready_members)
    searches, choices, reserving, now_s = list[float](), list[float](), list[float](), 0.0
    for number, prompt in enumerate(_prompts(proof.random, chains, proof.sized(quick=3_000, full=9_000))):
        now_s += 0.02
        # One of the three for each prompt: what comes second would find everything in the processor's cache.
        if number % 3 == 0:
            searches.append(_timed(partial(router.index.depths, prompt.names[BLOCK_SIZE])))
        elif number % 3 == 1:
            choices.append(_timed(partial(router.best, prompt)))
        taken_s = _timed(partial(router.choose, prompt, now_s))
        if number % 3 == 2:
            reserving.append(taken_s)
        router.mark_computed(f"r{number - num_members}")
        for member in router.membership.ready_members:
            router.record_heartbeat(member, now_s)
        router.advance(now_s)
    proof.report("depth_us", median(searches) * 1e6, "the search of depths alone, p50")
    proof.report("depth_p99_us", quantiles(searches, n=100)[98] * 1e6)
    told = f"p50: {PROMPT_BLOCKS} blocks, {num_members} members"
    proof.at_most("choice_us", median(choices) * 1e6, 50, told)
    proof.at_most("choice_p99_us", quantiles(choices, n=100)[98] * 1e6, 1_000)
    proof.report("reserving_us", median(reserving) * 1e6, "the choice and what it leaves behind, p50")
    proof.report("reserving_p99_us", quantiles(reserving, n=100)[98] * 1e6)


def _leaving(proof: Proof, router: Router) -> None:
    """Leaving takes no time; the longest sweep is what an event loop would stand still for."""
    left_s = _timed(lambda: router.leave("m0"))
    sweeps = list[float]()
    while not is_swept(router.index):
        sweeps.append(_timed(lambda: router.index.sweep(1e9)))
    proof.report("leave_us", left_s * 1e6)
    proof.report("sweep_max_ms", max(sweeps) * 1e3, f"the longest of {len(sweeps)} until nothing of it was left")


@section("names")
def names(proof: Proof) -> None:
    root = root_name("model", "", "group")
    tokens = [proof.random.randrange(100_000) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)]
    taken = [_timed(lambda: names_of(root, tokens, BLOCK_SIZE)) for _ in range(proof.sized(quick=50, full=500))]
    proof.report("names_ms", median(taken) * 1e3, f"of a prompt of {PROMPT_BLOCKS} blocks, p50")


@section("burst")
def burst(proof: Proof) -> None:
    """64 requests of one size at once on 4 members: of prompts that have nothing in common, and of one prompt, which by
    its cost stays where it is computed."""
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
                raise RuntimeError("four members are ready, and none was chosen")
            counts[choice.member] += 1
        imbalance = max(counts.values()) * BURST_MEMBERS / BURST
        if is_same:
            proof.report(key, imbalance, "most over mean, 64 times one prompt")
        else:
            proof.at_most(key, imbalance, 1.25, "most over mean, 64 prompts of one size")
