"""Memory that a step on MLX allocates: it must not grow with the pool, and a cached prefix must cost nothing."""

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
MAX_GROWTH = 1.2
GREEDY = Sampling(ResolvedSampling(temperature=0.0), 0, 0, 1, 1, None)


def _runner(num_blocks: int) -> MlxRunner:
    runner = load_runner(made_by_mlx("llama"), **SETTINGS)
    if not isinstance(runner, MlxRunner):
        raise TypeError(f"expected an MlxRunner, got {type(runner).__name__}")
    (model, store), thread = runner._opened(), runner._mlx_thread
    new_store = thread.call(lambda: KVStore(model.kv_shapes, num_blocks, store.block_size, store.dtype))
    return MlxRunner(thread, model, new_store, runner.capacity)


def _peak_bytes(runner: MlxRunner, *items: WorkItem) -> int:
    """Return the peak memory of a step, minus the memory before it."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.run(StepPlan(1, (), items))
    return mx.get_peak_memory() - before


@section("a step and the pool")
def pool_growth(proof: Proof) -> None:
    """The same steps with a small and a large pool, in alternation."""
    runners = {num_blocks: _runner(num_blocks) for num_blocks in (SMALL, LARGE)}
    table = tuple(range(1, 9))
    steps = (WorkItem(0, (5,) * 100, 0, table), WorkItem(0, (7,), 100, table, GREEDY))
    peaks: dict[int, list[int]] = {num_blocks: [] for num_blocks in runners}
    for _ in range(proof.sized(quick=3, full=15)):
        for num_blocks, runner in runners.items():
            peaks[num_blocks].append(max(_peak_bytes(runner, item) for item in steps))
    note = f"{median(peaks[LARGE]):,.0f} bytes with {LARGE:,} blocks, {median(peaks[SMALL]):,.0f} with {SMALL}"
    proof.at_most("pool_growth", median(peaks[LARGE]) / median(peaks[SMALL]), MAX_GROWTH, note)
    pool = sum(array.nbytes for array in runners[LARGE]._opened()[1].arrays)
    proof.report("step_over_pool", max(peaks[LARGE]) / pool, "peak memory of a step over the bytes of the large pool")


@section("a prefix that is found")
def zero_copy(proof: Proof) -> None:
    """A sequence continues after cached blocks of another one: those stay unchanged, are not copied, and the step takes
    as much memory as after blocks of its own."""
    runner = _runner(SMALL)
    size = runner.capacity.block_size
    prompt = tuple(range(3, 3 + 4 * size))
    shared, own, end = (1, 2, 3, 4), (11, 12, 13, 14), len(prompt)
    for table in (shared, own):
        runner.run(StepPlan(1, (), (WorkItem(0, prompt, 0, table),)))
    others = [block for block in range(SMALL + 1) if block not in (5, 15)]
    before = runner.read_blocks(others)
    peaks: dict[tuple[int, ...], list[int]] = {own: [], shared: []}
    for _ in range(7):
        for table, new_block in ((own, 15), (shared, 5)):
            peaks[table].append(_peak_bytes(runner, WorkItem(2, (9,), end, (*table, new_block), GREEDY)))
    shared_bytes, own_bytes = median(peaks[shared]), median(peaks[own])
    is_untouched = runner.read_blocks(others) == before
    is_equal = runner.read_blocks([5]) == runner.read_blocks([15])
    note = f"{shared_bytes:,} bytes after cached blocks, {own_bytes:,} after own ones"
    num_bytes = len(shared) * runner.capacity.num_kv_bytes
    proof.report("found_bytes", num_bytes, "bytes of the cached blocks")
    proof.holds("zero_copy", is_untouched and is_equal and shared_bytes - own_bytes < num_bytes / 4, note)
