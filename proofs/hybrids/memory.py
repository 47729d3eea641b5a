"""Slots for recurrent state: random operations, a reference cache, simulated servers, and hit rates of conversations.

Every run uses new seeds; a failure prints its seed, with which it can be replayed.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from benchmarks.record import say
from proofs.core.memory import run_random_operations
from proofs.core.scheduler import report_totals, run_simulations
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
"""For the conversations: enough blocks for all of them, so that only states can be missing."""
NUM_TURNS = 5
SAVED_SLOTS_PER_RUNNING = 4
MIN_STATE_HITS = 0.9
OTHERS = (memory, scheduler, seam, guesses)
"""Mutants of the core without recurrent states."""


# -- any operations ----------------------------------------------------------------------------------------------------


@section("random operations")
def random_operations(proof: Proof) -> None:
    runs = run_random_operations(proof, has_state=True)
    least = proof.sized(quick=200, full=20_000)
    proof.at_least("slot_evictions", sum(one.num_slot_evictions for one in runs), least, "otherwise nothing was tested")
    proof.at_least("state_hit_tokens", sum(one.hit_tokens for one in runs), least)


@section("state machines")
def machines(proof: Proof) -> None:
    state_machines(proof, HybridMemoryMachine, proof.sized(quick=10_000, full=200_000))


class Comparison(NamedTuple):
    """Counts of one comparison with the reference."""

    num_lookups: int
    num_hits: int
    num_states_missed: int
    num_block_evictions: int
    num_state_evictions: int
    num_mismatches: int


def compare(seed: int) -> Comparison:
    comparison = StateComparison(seed)
    comparison.run(LOOKUPS_OF_A_JOB)
    if comparison.num_mismatches:
        say(f"  StateComparison({seed}): {comparison.num_mismatches} mismatches")
    reference = comparison.reference
    return Comparison(
        comparison.num_lookups,
        comparison.num_hits,
        comparison.num_states_missed,
        reference.num_block_evictions,
        reference.num_state_evictions,
        comparison.num_mismatches,
    )


@section("reference")
def reference(proof: Proof) -> None:
    """Hits equal those of a reference of token tuples with exact LRU queues, for blocks and for states."""
    num_lookups = proof.sized(quick=20_000, full=200_000)
    seeds = [proof.random.getrandbits(60) for _ in range(-(-num_lookups // LOOKUPS_OF_A_JOB))]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        total = Comparison(*map(sum, zip(*pool.map(compare, seeds), strict=True)))
    proof.at_least("reference_lookups", total.num_lookups, num_lookups)
    proof.at_least("reference_hits", total.num_hits, num_lookups // 20)
    proof.at_least("reference_states_missed", total.num_states_missed, num_lookups // 20, "blocks cached, state not")
    proof.at_least("reference_block_evictions", total.num_block_evictions, num_lookups // 20)
    proof.at_least("reference_slot_evictions", total.num_state_evictions, num_lookups // 20)
    proof.equals("reference_mismatches", total.num_mismatches, 0)


@section("mutants")
def mutants(proof: Proof) -> None:
    """Mutants of the state slots and of the rest of the core; the tests must notice each."""
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
    """Simulate small servers with few slots and many faults: every answer equals that of a request alone."""
    num_seeds = proof.sized(quick=60, full=2_000)
    runs = run_simulations(proof, num_seeds, "hybrid")
    totals = [one.totals for one in runs]
    proof.at_least("sim_state_hit_tokens", sum(one.hit_tokens for one in totals), 100 * num_seeds)
    proof.at_least("sim_slot_evictions", sum(one.num_slot_evictions for one in totals), 10 * num_seeds)
    proof.at_least("sim_crashes", sum(one.num_crashes for one in totals), num_seeds // 10)
    proof.at_least("sim_preemptions", sum(one.num_preemptions for one in totals), num_seeds)
    proof.equals("sim_divergences", sum(one.num_divergences for one in runs), 0)
    report_totals(proof, runs)


# -- what conversations find -------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """One conversation: its tokens, its next turns, and the step at which the next one is submitted."""

    tokens: list[int]
    turns: list[list[int]]
    """Prompt tokens of the turns that follow."""
    due_step: int
    answer_tokens: list[int] = field(default_factory=list)


class ConversationRun:
    """Runs conversations on one scheduler, at most `max_running` at once, with pauses between turns.

    The simulated device takes no time, and its tokens depend on seed and position only: all models get the same tokens.
    """

    def __init__(self, max_running: int, *, has_state: bool) -> None:
        num_running = max_running + 1 if has_state else 0
        num_slots = num_running + SAVED_SLOTS_PER_RUNNING * max_running if has_state else 0
        config = KVMemoryConfig(NUM_BLOCKS, BLOCK_SIZE, num_slots=num_slots, num_running_slots=num_running)
        self.memory = KVMemory(config, BlockHasher(KEY))
        self.scheduler = Scheduler(SchedulerConfig(2 * max_running + 256, max_running), self.memory)
        self.open: dict[str, Conversation] = {}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def run(self, conversations: Iterator[Conversation]) -> None:
        """Run until all conversations have ended."""
        num_open, step = self.scheduler.config.max_running, 0
        self.open = {f"c{index}": one for index, one in zip(range(num_open), conversations, strict=False)}
        while self.open:
            for name, conversation in self.open.items():
                if conversation.due_step == step:
                    self._ask(name, conversation, step)
            plan = self.scheduler.plan(float(step))
            step += 1
            events = self.scheduler.apply(result_of(plan), float(step)) if plan.items else self.scheduler.take_events()
            for event in events:
                if isinstance(event, Token):
                    self.open[event.request_id].answer_tokens.append(event.token_id)
                elif isinstance(event, Finished):
                    self._finish(event, step, conversations)
        invariants.check_at_rest(self.memory)

    def _ask(self, name: str, conversation: Conversation, step: int) -> None:
        conversation.tokens += [*conversation.answer_tokens, *conversation.turns.pop(0)]
        conversation.answer_tokens, random = [], Random(f"{conversation.tokens}")
        params = ResolvedSampling(max_tokens=random.randint(20, 200))
        space = namespace(BLOCK_SIZE)
        prompt, seed = tuple(conversation.tokens), random.getrandbits(32)
        self.scheduler.submit(Request(name, prompt, space, float(step), params, seed))

    def _finish(self, event: Finished, step: int, conversations: Iterator[Conversation]) -> None:
        """Schedule the next turn after a pause; after the last turn, another conversation begins."""
        self.num_prompt_tokens += event.num_prompt_tokens
        self.num_cached_tokens += event.num_cached_tokens
        conversation = self.open[event.request_id]
        if not conversation.turns:
            next_one = next(conversations, None)
            if next_one is None:
                del self.open[event.request_id]
                return
            self.open[event.request_id] = conversation = next_one
        conversation.due_step = step + 1 + Random(f"{conversation.tokens} {len(conversation.turns)}").randrange(100)


def result_of(plan: StepPlan) -> StepResult:
    rows = {
        item.sequence_id: RowResult((token_of(item.sampling),)) if item.sampling else RowResult() for item in plan.items
    }
    return StepResult(plan.step, rows)


def token_of(sampling: Sampling) -> int:
    return (sampling.seed * 31 + sampling.position * 7919) % 50_000


def conversations_of(seed: int, count: int) -> Iterator[Conversation]:
    """Generate conversations with random turns; some begin with one of three system prompts."""
    random = Random(seed)
    system_prompts = [[random.randrange(50_000) for _ in range(random.randint(50, 600))] for _ in range(3)]
    for _ in range(count):
        system_prompt = random.choice([[], *system_prompts])
        turns = [[random.randrange(50_000) for _ in range(random.randint(5, 200))] for _ in range(NUM_TURNS)]
        yield Conversation(list(system_prompt), turns, due_step=random.randrange(50))


def run_conversations(max_running: int, seed: int, count: int, *, has_state: bool) -> ConversationRun:
    talk = ConversationRun(max_running, has_state=has_state)
    talk.run(conversations_of(seed, count))
    return talk


@section("state hits")
def state_hits(proof: Proof) -> None:
    """Cached prompt tokens of a hybrid, relative to those of a model without recurrent state."""
    min_share = 1.0
    for max_running in (2, 4, 16, 64):
        count = max(proof.sized(quick=24, full=400), proof.sized(quick=3, full=40) * max_running)
        seed = proof.random.getrandbits(60)
        hybrid, plain = (run_conversations(max_running, seed, count, has_state=one) for one in (True, False))
        if hybrid.num_prompt_tokens != plain.num_prompt_tokens:
            raise RuntimeError("expected equal prompts for both models")
        share = hybrid.num_cached_tokens / plain.num_cached_tokens
        proof.report(f"state_hits_{max_running}", share, f"{plain.num_cached_tokens} of a plain model")
        min_share = min(min_share, share)
    proof.at_least("state_hits", min_share, MIN_STATE_HITS, "the lowest of them")
