"""What a step on MLX allocates: nothing that grows with the pool, and nothing for a prefix that is found."""

from statistics import median

import mlx.core as mx

from proofs.framework.proof import Proof, section
from quire.backends.mlx.kv_store import KVStore
from quire.backends.mlx.runner import MlxRunner
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, StepPlan, WorkItem
from tests.support.models.mlx_models import SETTINGS, made_by_mlx
from tests.support.models.models import load_runner

SMALL, LARGE = 100, 10_000
MOST_GROWTH = 1.2
GREEDY = Sampling(ResolvedSampling(temperature=0.0), 0, 0, 1, 1, None)


def _runner(num_blocks: int) -> MlxRunner:
    first = load_runner(made_by_mlx("llama"), **SETTINGS)
    if not isinstance(first, MlxRunner):
        raise TypeError(f"an MLX runner was asked for, {type(first).__name__} came")
    (model, store), owner = first._opened(), first._mlx_thread
    made = owner.call(lambda: KVStore(model.kv_shapes, num_blocks, store.block_size, store.dtype))
    return MlxRunner(owner, model, made, first.capacity)


def _taken(runner: MlxRunner, *items: WorkItem) -> int:
    """Bytes that a step held at its peak beside what was held before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.run(StepPlan(1, (), items))
    return mx.get_peak_memory() - before


@section("a step and the pool")
def pool_growth(proof: Proof) -> None:
    """The same steps over a small pool and a large one, turn about."""
    runners = {num_blocks: _runner(num_blocks) for num_blocks in (SMALL, LARGE)}
    table = tuple(range(1, 9))
    steps = (WorkItem(0, (5,) * 100, 0, table), WorkItem(0, (7,), 100, table, GREEDY))
    taken: dict[int, list[int]] = {num_blocks: [] for num_blocks in runners}
    for _ in range(proof.sized(quick=3, full=15)):
        for num_blocks, runner in runners.items():
            taken[num_blocks].append(max(_taken(runner, item) for item in steps))
    told = f"{median(taken[LARGE]):,.0f} bytes with {LARGE:,} blocks, {median(taken[SMALL]):,.0f} with {SMALL}"
    proof.at_most("pool_growth", median(taken[LARGE]) / median(taken[SMALL]), MOST_GROWTH, told)
    pool = sum(array.nbytes for array in runners[LARGE]._opened()[1].arrays)
    proof.report("step_over_pool", max(taken[LARGE]) / pool, "the most a step took, over the large pool's bytes")


@section("a prefix that is found")
def zero_copy(proof: Proof) -> None:
    """Another sequence goes on behind blocks it found: their bytes stay, no block is taken for them, and the step takes
    what the same step takes behind blocks of its own."""
    runner = _runner(SMALL)
    size = runner.capacity.block_size
    prompt = tuple(range(3, 3 + 4 * size))
    shared, own, end = (1, 2, 3, 4), (11, 12, 13, 14), len(prompt)
    for table in (shared, own):
        runner.run(StepPlan(1, (), (WorkItem(0, prompt, 0, table),)))
    others = [block for block in range(SMALL + 1) if block not in (5, 15)]
    before = runner.read_blocks(others)
    behind: dict[tuple[int, ...], list[int]] = {own: [], shared: []}
    for _ in range(7):
        for table, last in ((own, 15), (shared, 5)):
            behind[table].append(_taken(runner, WorkItem(2, (9,), end, (*table, last), GREEDY)))
    found, behind_own = median(behind[shared]), median(behind[own])
    is_untouched = runner.read_blocks(others) == before
    is_equal = runner.read_blocks([5]) == runner.read_blocks([15])
    told = f"{found:,} bytes behind found blocks, {behind_own:,} behind own ones"
    num_bytes = len(shared) * runner.capacity.num_kv_bytes
    proof.report("found_bytes", num_bytes, "what the found blocks hold")
    proof.holds("zero_copy", is_untouched and is_equal and found - behind_own < num_bytes / 4, told)
