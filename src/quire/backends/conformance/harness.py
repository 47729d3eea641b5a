"""The harness of the conformance tests: drives one runner with hand-made block tables and reproducible sequences."""

from collections.abc import Callable, Sequence
from random import Random

from quire.backends.protocol import Runner
from quire.core.request import ResolvedSampling
from quire.core.step import NO_MASKS, BlockCopy, Masks, RowResult, Sampling, StepPlan, WorkItem
from quire.errors import QuireError

MakeRunner = Callable[[], Runner]


class ConformanceError(QuireError):
    """The runner violates the contract of `protocol`."""

    code = "contract_not_kept"


class StubCore:
    """Drives one runner in place of the core; callers choose the blocks."""

    def __init__(self, make_runner: MakeRunner) -> None:
        self.runner = make_runner()
        self.capacity = self.runner.capacity
        self._step = 0
        is_enough = self.capacity.block_size >= 4 and self.capacity.num_blocks >= 48
        require(is_enough, f"expected at least 48 blocks of 4 tokens, got {self.capacity}", "runner_too_small")

    def run(
        self, items: Sequence[WorkItem], copies: Sequence[BlockCopy] = (), masks: Masks = NO_MASKS
    ) -> dict[int, RowResult]:
        """Run one step and require that no row fails."""
        rows = self.try_run(items, copies, masks)
        errors = [row.error for row in rows.values() if row.error is not None]
        require(not errors, f"expected no failed rows, got {errors}")
        return rows

    def try_run(
        self, items: Sequence[WorkItem], copies: Sequence[BlockCopy] = (), masks: Masks = NO_MASKS
    ) -> dict[int, RowResult]:
        """Run one step; require that the result has this step's number and all its rows."""
        return self.run_plan(StepPlan(0, tuple(copies), tuple(items)), masks)

    def run_plan(self, plan: StepPlan, masks: Masks = NO_MASKS) -> dict[int, RowResult]:
        """Run a plan after setting its step number."""
        self._step += 1
        items = plan.items
        result = self.runner.start(plan._replace(step=self._step)).wait(masks)
        require(result.step == self._step, f"expected the result of step {self._step}, got step {result.step}")
        require(result.rows.keys() == {item.sequence_id for item in items}, "expected one row for each item")
        return result.rows

    def feed(self, tokens: Sequence[int], blocks: Sequence[int], sizes: Sequence[int], job: "Job") -> RowResult:
        """Feed tokens in chunks of these sizes, sample after the last chunk, and return its row."""
        first, row = 0, RowResult()
        for size in sizes:
            end = min(first + size, len(tokens))
            row = self.run([job.item(tokens, blocks, first, end)])[job.sequence_id]
            first = end
        return row

    def generate(self, tokens: Sequence[int], blocks: Sequence[int], count: int, job: "Job") -> list[int]:
        """Generate tokens one by one for a sequence that runs alone."""
        sequence, first = list(tokens), 0
        while len(sequence) < len(tokens) + count:
            row = self.run([job.item(sequence, blocks, first, len(sequence))])[job.sequence_id]
            first = len(sequence)
            sequence += row.token_ids
        return sequence[len(tokens) :]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for this many tokens."""
        return -(-num_tokens // self.capacity.block_size)


class Job:
    """The parameters of a sequence that stay the same in all its steps."""

    def __init__(
        self, sequence_id: int, num_prompt: int, params: ResolvedSampling, seed: int = 0, index: int = 0
    ) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.num_prompt = num_prompt
        self.params = params
        self.seed = seed

    def item(
        self, tokens: Sequence[int], blocks: Sequence[int], first: int, end: int, drafts: Sequence[int] = ()
    ) -> WorkItem:
        """Return an item that feeds tokens[first:end] and then drafts; it samples if `end` is the end of the tokens."""
        sampling = None
        if end == len(tokens):
            known_tokens = tuple(tokens) if self.params.needs_known_tokens else None
            sampling = Sampling(self.params, self.seed, self.index, end, self.num_prompt, known_tokens)
        return WorkItem(self.sequence_id, (*tokens[first:end], *drafts), first, tuple(blocks), sampling)


def require(condition: bool, message: str, code: str | None = None) -> None:
    """Raise ConformanceError unless the condition holds."""
    if not condition:
        raise ConformanceError(message, code=code)


def prompt_of(core: StubCore, length: int, salt: int = 0) -> list[int]:
    """Return a reproducible prompt; each salt gives a different prompt."""
    random = Random(f"{length} {salt}")  # noqa: S311
    return [random.randrange(core.capacity.vocabulary_size) for _ in range(length)]


def job_for(sequence_id: int, tokens: Sequence[int]) -> Job:
    """Return a job whose tokens depend on earlier output (frequency penalty)."""
    return Job(sequence_id, len(tokens), ResolvedSampling(frequency_penalty=0.5))


def blocks_of(core: StubCore, row: int, num_tokens: int) -> list[int]:
    """Return the blocks of row number `row` of a batch; rows of up to 30 tokens share no block."""
    span = core.num_blocks_for(30)
    return list(range(1 + row * span, 1 + row * span + core.num_blocks_for(num_tokens)))


def chunk_sizes(sizes: Sequence[int], total: int) -> list[int]:
    """Return the leading sizes whose sum is `total`, with the last one reduced to fit."""
    chunks: list[int] = []
    for size in sizes:
        if sum(chunks) < total:
            chunks.append(min(size, total - sum(chunks)))
    return chunks
