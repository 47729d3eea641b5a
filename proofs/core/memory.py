"""`make proof-memory`: the promises of the KV memory, checked at a scale no unit test has.

Every run uses new seeds; a failure prints its seed, with which it can be replayed.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from random import Random, SystemRandom
from typing import NamedTuple

from benchmarks.record import say
from proofs.framework.machinery import NUM_PROCESSES, mutants_section, state_machines
from proofs.framework.proof import Proof, run, section
from quire.core.digests import BlockHasher, Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.state_slots import StateCheckpoint
from quire.errors import InvariantError, QuireError
from tests.mutants import memory as memory_mutants
from tests.support.core.random_driver import RandomDriver
from tests.support.core.reference_lru import ReferenceCache
from tests.support.core.shadow import KEY, WeakHasher, named_tokens, namespace
from tests.support.machine.machine import KVMemoryMachine

NUM_SEQUENCES_OF_A_SCALE_ROUND = 150


# -- random operations -------------------------------------------------------------------------------------------------


@section("random operations")
def random_operations(proof: Proof) -> None:
    run_random_operations(proof, has_state=False)


def run_random_operations(proof: Proof, *, has_state: bool) -> list["RandomRun"]:
    """Run random operations on pools of many sizes; with `has_state`, on memories with slots for recurrent state."""
    num_ops = proof.sized(quick=200_000, full=20_000_000)
    jobs = []
    random = SystemRandom()
    # Most operations run on small pools. A small share runs on pools of 10,000 and 100,000 blocks, because each full
    # check there walks the whole pool.
    for num_blocks, block_size, share in ((100_000, 4, 0.005), (100_000, 32, 0.005), (10_000, 2, 0.02)):
        jobs.append((random.getrandbits(63), num_blocks, block_size, int(num_ops * share) + 1, has_state))
    remaining = num_ops - sum(job[3] for job in jobs)
    chunk = proof.sized(quick=5_000, full=50_000)
    while remaining > 0:
        num_blocks = max(1, int(1000 ** random.random()))
        block_size = random.choice((1, 1, 2, 4, 8, 16, 32))
        jobs.append((random.getrandbits(63), num_blocks, block_size, min(chunk, remaining), has_state))
        remaining -= chunk
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        results = list(pool.map(random_run, jobs))
    num_done = sum(result.num_ops for result in results)
    num_checks = sum(result.num_checks for result in results)
    # A run without evictions would test little, so the large pools must evict as well.
    num_calm = sum(result.num_evictions == 0 for result, job in zip(results, jobs, strict=True) if job[1] > 1000)
    violations = [result.violation for result in results if result.violation]
    proof.at_least("ops", num_done, num_ops)
    proof.report("full_checks", num_checks)
    proof.equals("large_pools_without_evictions", num_calm, 0)
    proof.none("violations", violations)
    return results


class RandomRun(NamedTuple):
    num_ops: int
    num_checks: int
    num_evictions: int
    num_slot_evictions: int
    hit_tokens: int
    violation: str


def random_run(job: tuple[int, int, int, int, bool]) -> RandomRun:
    number, num_blocks, block_size, num_ops, has_state = job
    driver = RandomDriver(number, num_blocks, block_size, check_every=1000, has_state=has_state)
    try:
        if num_blocks > 1000:
            driver.fill()
        driver.run(num_ops)
        driver.rest()
        violation = ""
    except (QuireError, AssertionError, IndexError, KeyError, ValueError) as error:
        violation = f"RandomDriver{(number, num_blocks, block_size)}, has_state={has_state}: {error!r}"
    stats = driver.shadow.memory.stats()
    evictions = (stats.num_evictions, stats.num_slot_evictions)
    return RandomRun(driver.num_ops, driver.num_checks, *evictions, stats.hit_tokens, violation)


# -- machines and mutants ----------------------------------------------------------------------------------------------


@section("state machines")
def machines(proof: Proof) -> None:
    state_machines(proof, KVMemoryMachine, proof.sized(quick=10_000, full=500_000))


# -- weak digest, reference, namespaces --------------------------------------------------------------------------------


@section("weak digest")
def weak_digest(proof: Proof) -> None:
    """A hasher with few digests: digests are reused for other content, and live sequences collide."""
    num_ops = proof.sized(quick=20_000, full=500_000)
    driver = RandomDriver(proof.random.getrandbits(63), 100, 2, hasher=WeakHasher(KEY), check_every=1000)
    driver.vocabulary, wrong = 20, 0
    try:
        driver.run(num_ops)
        driver.rest()
    except AssertionError as error:
        say(f"  {error!r}")
        wrong = 1
    stats = driver.shadow.memory.stats()
    proof.report("weak_digest_sequences", driver.num_ops, "operations on sequences")
    for key, value in (
        ("weak_digest_collisions", stats.num_collisions),
        ("weak_digest_evictions", stats.num_evictions),
        ("weak_digest_hit_tokens", stats.hit_tokens),
    ):
        proof.at_least(key, value, 1, "otherwise nothing was tested")
    proof.equals("weak_digest_wrong", wrong, 0)


@section("reference cache")
def reference_cache(proof: Proof) -> None:
    num_lookups = proof.sized(quick=20_000, full=300_000)
    random = Random(SystemRandom().getrandbits(63))
    block_size, num_blocks = 4, 300
    space = namespace(block_size)
    reference = ReferenceCache(num_blocks, block_size)
    memory = KVMemory(KVMemoryConfig(num_blocks, block_size), BlockHasher(KEY))
    prompts = [tuple(random.randrange(3) for _ in range(random.randint(1, 160))) for _ in range(60)]
    mismatches = hit_tokens = reference_hit_tokens = 0
    running: list[tuple[object, tuple[int, ...]]] = []
    for _ in range(num_lookups):
        # Some prompts are popular; each request continues its prompt in its own way after some tokens.
        head = prompts[min(int(random.expovariate(0.1)), len(prompts) - 1)]
        tokens = head[: random.randint(1, len(head))] + tuple(random.randrange(3) for _ in range(random.randint(0, 20)))
        table = memory.open(space)
        hit, expected = memory.match(table, tokens), reference.lookup(tokens)
        hit_tokens += hit
        reference_hit_tokens += expected
        # A hit must equal that of the reference, a dictionary of token tuples, and its blocks must hold these tokens.
        block_tokens = [token for block in table.blocks for token in named_tokens(memory, block)]
        mismatches += hit != expected or block_tokens != list(tokens[:hit])
        rest = len(tokens) - table.num_computed
        memory.reserve(table, tokens, rest)
        reference.run(tokens)
        memory.commit(table, rest)
        running.append((table, tokens))
        while len(running) > random.randint(0, 3):
            finished, prompt = running.pop(random.randrange(len(running)))
            memory.release(finished)  # type: ignore[arg-type]
            reference.release(prompt)
    loss = 1 - hit_tokens / reference_hit_tokens
    proof.report("reference_lookups", num_lookups)
    proof.report("reference_evictions", memory.stats().num_evictions)
    proof.equals("reference_mismatches", mismatches, 0)
    proof.at_most("lru_loss", loss, 0.01, "share of the hits of an exact leaf LRU")


@section("namespaces")
def namespaces(proof: Proof) -> None:
    num_lookups = proof.sized(quick=2_000, full=10_000)
    random = Random(SystemRandom().getrandbits(63))
    space = namespace(4)
    leaks = controls = 0
    mutations: list[Callable[[], Namespace]] = [
        lambda: replace(space, format_version=space.format_version + random.randint(1, 9)),
        lambda: replace(space, model=f"model{random.random()}"),
        lambda: replace(space, adapter=f"adapter{random.random()}"),
        lambda: replace(space, kv_layout=f"layout{random.random()}"),
        lambda: replace(space, cache_group=f"group{random.random()}"),
    ]
    for index in range(num_lookups):
        memory = KVMemory(KVMemoryConfig(16, 4), BlockHasher(KEY))
        tokens = [random.randrange(2) for _ in range(random.randint(9, 40))]
        cache(memory, space, tokens)
        if index % 6 == 5:
            # Another block size needs another pool: the same tokens, hashed in the changed namespace, must not hit.
            other_space = replace(space, block_size=random.choice((1, 2, 8)))
            hasher = memory.tree.hasher
            packed = memory.tree.tokens_of(next(memory.tree.children(next(memory.tree.roots()))))
            leaks += memory.tree.named(hasher.child(hasher.root(other_space), packed)) is not None
        else:
            leaks += memory.divergence(mutations[index % 6](), tokens).num_cached_tokens > 0
            table = memory.open(mutations[index % 6]())
            leaks += memory.match(table, tokens) > 0
        controls += memory.divergence(space, tokens).num_cached_tokens > 0
    proof.report("namespace_lookups", num_lookups)
    proof.equals("namespace_leaks", leaks, 0)
    proof.equals("namespace_controls", controls, num_lookups, "every unchanged namespace hits")


def cache(memory: KVMemory, space: Namespace, tokens: list[int]) -> None:
    """Compute a prompt and release it: its full blocks stay cached."""
    table = memory.open(space)
    memory.match(table, tokens)
    rest = len(tokens) - table.num_computed
    memory.reserve(table, tokens, rest)
    memory.commit(table, rest)
    memory.release(table)


# -- misuse ------------------------------------------------------------------------------------------------------------


@section("misuse")
def misuse(proof: Proof) -> None:
    num_injected = proof.sized(quick=2_000, full=10_000)
    random = Random(SystemRandom().getrandbits(63))
    kinds = [
        double_release,
        foreign_block,
        foreign_table,
        use_after_release,
        write_to_a_shared_block,
        fork_while_written,
        release_while_written,
    ]
    num_caught = 0
    for index in range(num_injected):
        memory = KVMemory(KVMemoryConfig(32, 4), BlockHasher(KEY))
        tokens = [random.randrange(2) for _ in range(random.randint(5, 40))]
        attempt = kinds[index % len(kinds)](memory, tokens, random)
        try:
            attempt()
        except InvariantError:
            num_caught += 1
    proof.report("misuse_injected", num_injected)
    proof.equals("misuse_caught", num_caught, num_injected, "each call must raise")


Attempt = Callable[[], object]


def double_release(memory: KVMemory, tokens: list[int], random: Random) -> Attempt:
    table = memory.open(namespace(4))
    memory.reserve(table, tokens, len(tokens))
    memory.commit(table, len(tokens))
    block = random.choice(table.blocks)
    memory.release(table)
    return lambda: memory.pool.release([block])


def foreign_block(memory: KVMemory, tokens: list[int], random: Random) -> Attempt:
    memory.reserve(memory.open(namespace(4)), tokens, len(tokens))
    stranger = random.choice((-random.randint(0, 40), 33 + random.randint(0, 99), 32))
    return lambda: memory.pool.release([stranger])


def foreign_table(memory: KVMemory, tokens: list[int], random: Random) -> Attempt:
    other = KVMemory(KVMemoryConfig(32, 4), BlockHasher(KEY))
    table = other.open(namespace(4))
    memory.open(namespace(4))
    uses: list[Attempt] = [
        lambda: memory.release(table),
        lambda: memory.reserve(table, tokens, 1),
        lambda: memory.match(table, tokens),
    ]
    return random.choice(uses)


def use_after_release(memory: KVMemory, tokens: list[int], random: Random) -> Attempt:
    table = memory.open(namespace(4))
    memory.reserve(table, tokens, len(tokens))
    memory.commit(table, len(tokens))
    memory.release(table)
    uses: list[Attempt] = [
        lambda: memory.match(table, tokens),
        lambda: memory.reserve(table, tokens, 1),
        lambda: memory.commit(table, 1),
        lambda: memory.fork(table, 0),
        lambda: memory.is_computing(table, tokens),
        lambda: memory.num_blocks_needed(table, 1),
    ]
    return random.choice(uses)


def write_to_a_shared_block(memory: KVMemory, tokens: list[int], random: Random) -> Attempt:
    table = memory.open(namespace(4))
    memory.reserve(table, tokens, len(tokens))
    memory.pool.retain(random.choice(table.blocks))
    return lambda: memory.commit(table, len(tokens))


def fork_while_written(memory: KVMemory, tokens: list[int], random: Random) -> Attempt:
    table = memory.open(namespace(4))
    memory.reserve(table, tokens, random.randint(1, len(tokens)))
    return lambda: memory.fork(table, 0)


def release_while_written(memory: KVMemory, tokens: list[int], random: Random) -> Attempt:
    table = memory.open(namespace(4))
    memory.reserve(table, tokens, random.randint(1, len(tokens)))
    return lambda: memory.release(table)


# -- divergence --------------------------------------------------------------------------------------------------------


@section("divergence")
def divergence(proof: Proof) -> None:
    num_misses = proof.sized(quick=300, full=1_000)
    random = Random(SystemRandom().getrandbits(63))
    wrong = 0
    for index in range(num_misses):
        reason = list(MissReason)[index % len(MissReason)]
        got, expected = miss_of(reason, random)
        if got != expected:
            wrong += 1
            say(f"  {reason}: expected {expected}, got {got}")
    proof.report("divergence_misses", num_misses)
    proof.equals("divergence_wrong", wrong, 0)


def miss_of(reason: MissReason, random: Random) -> tuple[Divergence, Divergence]:
    """Build a memory where a prompt misses for exactly this reason, and return the divergence and the expected one."""
    size = random.choice((2, 4, 8, 32))
    space, prefix = namespace(size), [random.randint(0, 9) for _ in range(size * random.randint(0, 5))]
    # The next block begins with tokens that no other prompt has, so no prefix is shared by chance.
    block = [100 + random.randint(0, 9) for _ in range(size)]
    prompt = [*prefix, *block, 7]
    memory = KVMemory(KVMemoryConfig(400, size), BlockHasher(KEY))
    for _ in range(random.randint(0, 5)):
        cache(memory, namespace(size, "theirs"), prompt)
        cache(memory, space, [200 + random.randint(0, 9) for _ in range(size * 3)])
    cached = len(prefix)
    if reason is MissReason.STATE_MISSING:
        return state_miss(space, prompt, random)
    if reason is MissReason.OTHER_NAMESPACE:
        others = (replace(space, model="m2"), replace(space, adapter="a2"), replace(space, kv_layout="l2"))
        other = random.choice(others)
        cache(memory, other, prompt)
        return memory.divergence(space, prompt), Divergence(0, reason, other_namespace=other)
    cache(memory, space, prefix or [300] * size)
    if reason is MissReason.TOO_SHORT:
        prompt = prefix + block[: random.randint(1, size)]
        return memory.divergence(space, prompt), Divergence(cached, reason)
    if reason is MissReason.EVICTED:
        # The prompt is the least recently used: its blocks are evicted first, the leaf before the others.
        memory = KVMemory(KVMemoryConfig(400, size), BlockHasher(KEY))
        cache(memory, space, prompt)
        cache(memory, space, [300] * size)
        now_s, ago_s = float(random.randint(0, 1000)), float(random.randint(0, 1000))
        memory.advance(now_s)
        memory.evict(1)
        memory.advance(now_s + ago_s)
        return memory.divergence(space, prompt), Divergence(cached, reason, evicted_s_ago=ago_s)
    if reason is MissReason.DIVERGED:
        shared = random.randint(1, size - 1)
        for position in {shared, random.randint(0, shared)}:
            cache(memory, space, [*prefix, *block[:position], 50, *block[position + 1 :]])
        sibling = (*block[:shared], 50, *block[shared + 1 :])
        return memory.divergence(space, prompt), Divergence(cached, reason, cached + shared, sibling)
    if reason is MissReason.COMPUTING:
        table = memory.open(space)
        memory.match(table, prompt)
        memory.reserve(table, prompt, size)
        return memory.divergence(space, prompt), Divergence(cached, reason)
    return memory.divergence(space, prompt), Divergence(cached, reason)


def state_miss(space: Namespace, prompt: list[int], random: Random) -> tuple[Divergence, Divergence]:
    """All blocks of the prompt are cached, but no recurrent state, or only one after a block that is not the last."""
    memory = KVMemory(KVMemoryConfig(400, space.block_size, num_slots=3, num_running_slots=1), BlockHasher(KEY))
    table, num_full = memory.open(space), len(prompt) // space.block_size
    num_computed = random.randrange(num_full) * space.block_size
    if num_computed:
        memory.reserve(table, prompt, num_computed, keep=StateCheckpoint.DURABLE)
        memory.commit(table, num_computed)
    memory.reserve(table, prompt, len(prompt) - num_computed)
    memory.commit(table, len(prompt) - num_computed)
    memory.release(table)
    return memory.divergence(space, prompt), Divergence(num_computed, MissReason.STATE_MISSING)


# -- speed and scale ---------------------------------------------------------------------------------------------------


@section("speed and scale")
def speed_and_scale(proof: Proof) -> None:
    num_rounds = proof.sized(quick=9, full=31)
    large_size = proof.sized(quick=200_000, full=1_000_000)
    small, _ = full_pool(1_000)
    large, longest_fill_s = full_pool(large_size)
    open_sequences(small, 100)
    open_sequences(large, 3_000)
    ratios, rates, large_rates, pauses = [], [], [], []
    gc.collect()
    for index in range(num_rounds):
        # Both run the same sequences in alternating order, because the speed of the machine drifts.
        pair = (small, large) if index % 2 else (large, small)
        costs = {}
        for memory in pair:
            costs[id(memory)], longest = scale_round(memory, index)
            if memory is large:
                pauses.append(longest)
        ratios.append(costs[id(large)] / costs[id(small)])
        rates.append(block_rate(small, index))
        large_rates.append(block_rate(large, index))
    ratio = statistics.median(ratios)
    rate = statistics.median(rates)
    proof.report("pool_scale_blocks", large_size)
    proof.at_most("pool_scale_ratio", ratio, 2)
    proof.report("pool_scale_ratio_p90", sorted(ratios)[int(len(ratios) * 0.9)])
    proof.report("longest_pause_ms", max(pauses) * 1e3)
    proof.report("median_longest_pause_ms", statistics.median(pauses) * 1e3)
    proof.report("longest_prompt_while_growing_ms", longest_fill_s * 1e3)
    proof.report("ops_per_s", rate, "below 200,000 needs an explanation")
    proof.report("ops_per_s_best", max(rates))
    proof.report("ops_per_s_large_pool", statistics.median(large_rates))
    start = time.perf_counter()
    large.clear()
    proof.report("clear_ms", (time.perf_counter() - start) * 1e3)


def full_pool(num_blocks: int) -> tuple[KVMemory, float]:
    """Return a memory whose blocks are all cached, so each allocation evicts, and the seconds of its slowest prompt."""
    memory = KVMemory(KVMemoryConfig(num_blocks), BlockHasher(KEY))
    random = Random(num_blocks)
    longest_s = 0.0
    while memory.pool.num_blank:
        tokens = random.choices(range(50_000), k=32 * min(16, memory.pool.num_blank))
        start = time.perf_counter()
        cache(memory, namespace(32), tokens)
        longest_s = max(longest_s, time.perf_counter() - start)
    return memory, longest_s


def open_sequences(memory: KVMemory, num_sequences: int) -> None:
    """Open sequences that stay allocated while others are opened and released."""
    for index in range(num_sequences):
        table, tokens = memory.open(namespace(32)), [index] * 40
        memory.reserve(table, tokens, 40)
        memory.commit(table, 40)


def scale_round(memory: KVMemory, number: int) -> tuple[float, float]:
    """Return seconds per sequence that goes through every operation, and the longest single operation."""
    random, space = Random(number), namespace(32)
    prompts = [random.choices(range(50_000), k=8 * 32 + 5) for _ in range(NUM_SEQUENCES_OF_A_SCALE_ROUND)]
    longest = total = 0.0
    clock = time.perf_counter
    for tokens in prompts:
        table = memory.open(space)
        grown = [*tokens, *range(40)]
        for operation in (
            lambda table=table, tokens=tokens: memory.match(table, tokens),
            lambda table=table, tokens=tokens: memory.reserve(table, tokens, len(tokens)),
            lambda table=table, tokens=tokens: memory.commit(table, len(tokens)),
            lambda table=table, tokens=tokens: memory.release(memory.fork(table, len(tokens) - 1)),
            lambda table=table, grown=grown: memory.reserve(table, grown, 40),
            lambda table=table: memory.commit(table, 40),
            lambda table=table: memory.release(table),
        ):
            start = clock()
            operation()
            seconds = clock() - start
            total += seconds
            longest = max(longest, seconds)
        start = clock()
        second_table = memory.open(space)
        memory.match(second_table, tokens)
        memory.release(second_table)
        total += clock() - start
    return total / len(prompts), longest


def block_rate(memory: KVMemory, number: int) -> float:
    """Return blocks per second of 1,024-token prompts that are reserved, committed and released, with evictions."""
    random, space = Random(-number), namespace(32)
    prompts = [random.choices(range(50_000), k=1024) for _ in range(150)]
    start = time.perf_counter()
    for tokens in prompts:
        table = memory.open(space)
        memory.reserve(table, tokens, 1024)
        memory.commit(table, 1024)
        memory.release(table)
    return 32 * len(prompts) / (time.perf_counter() - start)


PATHS = ("src/quire/core/memory", "src/quire/core/inspect", "src/quire/core/digests.py", "src/quire/core/divergence.py")

if __name__ == "__main__":
    sys.exit(run("memory", sys.modules[__name__], mutants_section(memory_mutants, quick=25, full=25), paths=PATHS))
