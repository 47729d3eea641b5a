"""Slots for recurrent state: under any operations, beside a reference, in whole lives of servers, and what they find.

Seeds are fresh in every run and printed when something breaks, so that it can be replayed.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from benchmarks.record import say
from proofs.core.memory import operate
from proofs.core.scheduler import report_lives, simulated
from proofs.framework.machinery import NUM_PROCESSES, state_machines
from proofs.framework.proof import Proof, section
from quire.core.digests import BlockHasher
from quire.core.events import Finished, Token
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import Request, ResolvedSampling
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import RowResult, Sampling, StepPlan, StepResult
from tests.mutants import guesses, memory, scheduler, seam, slots
from tests.mutants.kill import survivors
from tests.support.core.shadow import KEY, namespace
from tests.support.core.state_comparison import StateComparison
from tests.support.machine.machine import HybridMemoryMachine

LOOKUPS_OF_A_JOB = 2_000
BLOCK_SIZE, NUM_BLOCKS = 32, 200_000
"""Of the conversations: room for all of them, so that nothing but states can be missed."""
NUM_TURNS = 5
KEPT_PER_RUNNING = 4
LEAST_STATE_HITS = 0.9
OTHERS = (memory, scheduler, seam, guesses)
"""Lists of bugs of a core without states."""


# -- any operations ----------------------------------------------------------------------------------------------------


@section("random operations")
def random_operations(proof: Proof) -> None:
    runs = operate(proof, has_state=True)
    least = proof.sized(quick=200, full=20_000)
    proof.at_least("slot_evictions", sum(one.num_slot_evictions for one in runs), least, "else nothing was tried")
    proof.at_least("state_hit_tokens", sum(one.hit_tokens for one in runs), least)


@section("state machines")
def machines(proof: Proof) -> None:
    state_machines(proof, HybridMemoryMachine, proof.sized(quick=10_000, full=200_000))


class Compared(NamedTuple):
    """One life beside the reference."""

    num_lookups: int
    num_hits: int
    num_states_missed: int
    num_block_evictions: int
    num_state_evictions: int
    num_mismatches: int


def compare(seed: int) -> Compared:
    comparison = StateComparison(seed)
    comparison.run(LOOKUPS_OF_A_JOB)
    if comparison.num_mismatches:
        say(f"  StateComparison({seed}): {comparison.num_mismatches} mismatches")
    reference = comparison.reference
    return Compared(
        comparison.num_lookups,
        comparison.num_hits,
        comparison.num_states_missed,
        reference.num_block_evictions,
        reference.num_state_evictions,
        comparison.num_mismatches,
    )


@section("reference")
def reference(proof: Proof) -> None:
    """Hits equal those of tuples of tokens with exact queues, for blocks and for states."""
    num_lookups = proof.sized(quick=20_000, full=200_000)
    seeds = [proof.random.getrandbits(60) for _ in range(-(-num_lookups // LOOKUPS_OF_A_JOB))]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        found = Compared(*map(sum, zip(*pool.map(compare, seeds), strict=True)))
    proof.at_least("reference_lookups", found.num_lookups, num_lookups)
    proof.at_least("reference_hits", found.num_hits, num_lookups // 20)
    proof.at_least("reference_states_missed", found.num_states_missed, num_lookups // 20, "blocks there, state not")
    proof.at_least("reference_block_evictions", found.num_block_evictions, num_lookups // 20)
    proof.at_least("reference_slot_evictions", found.num_state_evictions, num_lookups // 20)
    proof.equals("reference_mismatches", found.num_mismatches, 0)


@section("mutants")
def mutants(proof: Proof) -> None:
    """Bugs of slots, and all that the core had before it knew them."""
    alive: list[str] = []
    num_total = num_new = 0
    for module in (slots, *OTHERS) if proof.is_full else (slots,):
        chosen = module.MUTANTS if proof.is_full else module.MUTANTS[::3]
        alive += survivors(chosen, module.TESTS, jobs=NUM_PROCESSES)
        num_total += len(chosen)
        num_new += len(chosen) if module is slots else 0
    for name in alive:
        say(f"  survived: {name}")
    proof.report("mutants_total", num_total)
    proof.at_least("mutants_new", num_new, 20)
    proof.equals("mutants_killed", num_total - len(alive), num_total, "all of them")


@section("simulation")
def simulation(proof: Proof) -> None:
    """Whole lives of small servers with few slots, where everything goes wrong: every answer as if alone."""
    num_seeds = proof.sized(quick=60, full=2_000)
    runs = simulated(proof, num_seeds, "hybrid")
    totals = [one.totals for one in runs]
    proof.at_least("sim_state_hit_tokens", sum(one.hit_tokens for one in totals), 100 * num_seeds)
    proof.at_least("sim_slot_evictions", sum(one.num_slot_evictions for one in totals), 10 * num_seeds)
    proof.at_least("sim_crashes", sum(one.num_crashes for one in totals), num_seeds // 10)
    proof.at_least("sim_preemptions", sum(one.num_preemptions for one in totals), num_seeds)
    proof.equals("sim_divergences", sum(one.num_divergences for one in runs), 0)
    report_lives(proof, runs)


# -- what conversations find -------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """One who talks: what was said so far, and when it says more."""

    tokens: list[int]
    turns: list[list[int]]
    """What its user still says, turn by turn."""
    due: int
    said: list[int] = field(default_factory=list)


class Talk:
    """Conversations that take turns on one scheduler, as many as may run at once, with time to think between turns.

    The pretended device takes no time and says what the seed and the place demand: every model gets the same tokens.
    """

    def __init__(self, max_running: int, *, has_state: bool) -> None:
        num_running = max_running + 1 if has_state else 0
        num_slots = num_running + KEPT_PER_RUNNING * max_running if has_state else 0
        config = KVMemoryConfig(NUM_BLOCKS, BLOCK_SIZE, num_slots=num_slots, num_running_slots=num_running)
        self.memory = KVMemory(config, BlockHasher(KEY))
        self.scheduler = Scheduler(SchedulerConfig(2 * max_running + 256, max_running), self.memory)
        self.open: dict[str, Conversation] = {}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def run(self, conversations: Iterator[Conversation]) -> None:
        """Until nobody has anything to say."""
        num_open, now = self.scheduler.config.max_running, 0
        self.open = {f"c{at}": one for at, one in zip(range(num_open), conversations, strict=False)}
        while self.open:
            for name, one in self.open.items():
                if one.due == now:
                    self._ask(name, one, now)
            plan = self.scheduler.plan(float(now))
            now += 1
            events = self.scheduler.apply(answered(plan), float(now)) if plan.items else self.scheduler.take_events()
            for event in events:
                if isinstance(event, Token):
                    self.open[event.request_id].said.append(event.token_id)
                elif isinstance(event, Finished):
                    self._finish(event, now, conversations)
        invariants.check_at_rest(self.memory)

    def _ask(self, name: str, one: Conversation, now: int) -> None:
        one.tokens += [*one.said, *one.turns.pop(0)]
        one.said = []
        dice = Random(f"{one.tokens}")
        params = ResolvedSampling(max_tokens=dice.randint(20, 200))
        space = namespace(BLOCK_SIZE)
        self.scheduler.submit(Request(name, tuple(one.tokens), space, float(now), params, dice.getrandbits(32)))

    def _finish(self, event: Finished, now: int, conversations: Iterator[Conversation]) -> None:
        """The user reads and thinks; when all is said, somebody else begins."""
        self.num_prompt_tokens += event.num_prompt_tokens
        self.num_cached_tokens += event.num_cached_tokens
        one = self.open[event.request_id]
        if not one.turns:
            following = next(conversations, None)
            if following is None:
                del self.open[event.request_id]
                return
            self.open[event.request_id] = one = following
        one.due = now + 1 + Random(f"{one.tokens} {len(one.turns)}").randrange(100)


def answered(plan: StepPlan) -> StepResult:
    rows = {
        item.sequence_id: RowResult((token_of(item.sampling),)) if item.sampling else RowResult() for item in plan.items
    }
    return StepResult(plan.step, rows)


def token_of(sampling: Sampling) -> int:
    return (sampling.seed * 31 + sampling.position * 7919) % 50_000


def conversations_of(seed: int, count: int) -> Iterator[Conversation]:
    """Some begin with one of a few system prompts; everybody says something of their own."""
    random = Random(seed)
    systems = [[random.randrange(50_000) for _ in range(random.randint(50, 600))] for _ in range(3)]
    for _ in range(count):
        system = random.choice([[], *systems])
        turns = [[random.randrange(50_000) for _ in range(random.randint(5, 200))] for _ in range(NUM_TURNS)]
        yield Conversation(list(system), turns, due=random.randrange(50))


def talked(max_running: int, seed: int, count: int, *, has_state: bool) -> Talk:
    talk = Talk(max_running, has_state=has_state)
    talk.run(conversations_of(seed, count))
    return talk


@section("state hits")
def state_hits(proof: Proof) -> None:
    """Prompt tokens of conversations that need not be computed, of those that a plain model need not compute."""
    worst = 1.0
    for max_running in (2, 4, 16, 64):
        count = max(proof.sized(quick=24, full=400), proof.sized(quick=3, full=40) * max_running)
        seed = proof.random.getrandbits(60)
        hybrid, plain = (talked(max_running, seed, count, has_state=one) for one in (True, False))
        if hybrid.num_prompt_tokens != plain.num_prompt_tokens:
            raise RuntimeError("the two were not asked the same")
        share = hybrid.num_cached_tokens / plain.num_cached_tokens
        proof.report(f"state_hits_{max_running}", share, f"{plain.num_cached_tokens} of a plain model")
        worst = min(worst, share)
    proof.at_least("state_hits", worst, LEAST_STATE_HITS, "the worst of them")
