"""Checks of the runner's contract on MLX, and the differences of its results across batches and chunks."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random

import numpy as np

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from quire.backends.conformance.contract import CHECKS
from quire.backends.conformance.harness import ConformanceError, MakeRunner
from quire.backends.protocol import Runner
from quire.core.step import StepPlan, WorkItem
from tests.support.models.mlx_models import MODELS, SETTINGS, VOCABULARY_SIZE, made_by_mlx
from tests.support.models.models import runners_of

ACROSS_SHAPES = frozenset({
    "a_row_does_not_depend_on_its_batch",
    "chunk_sizes_do_not_change_the_result",
    "a_shared_prefix_gives_the_same_result",
    "the_largest_step_gives_the_same_results",
    "logprobs_do_not_depend_on_the_batch",
    "many_positions_equal_one_at_a_time",
    "right_drafts_are_accepted_with_one_more_token",
    "drafts_do_not_depend_on_the_batch",
})  # fmt: skip
"""Checks of equal bits across batches and chunks, which MLX cannot pass because it chooses kernels by shape."""
MAX_DIFFERENCE = 0.05
"""Rounding errors of bfloat16 in a few layers stay below it; a wrong block or mask does not."""
KINDS: tuple[tuple[str, int | None, str], ...] = (
    *((name, None, "float32") for name in MODELS),
    ("llama", 4, "auto"),
    ("qwen3-moe", 8, "auto"),
    ("llama", None, "bfloat16"),
)
"""Model, bits of quantised weights, type of weights."""


def _runners(name: str, bits: int | None, dtype: str) -> Callable[[], Runner]:
    return runners_of(made_by_mlx(name, bits), **{**SETTINGS, "dtype": dtype})


@section("conformance")
def conformance(proof: Proof) -> None:
    """Run every check for every kind of model; only checks in `ACROSS_SHAPES` may fail."""
    near, failed = set[str](), set[str]()
    kinds = KINDS if proof.is_full else KINDS[:2] + KINDS[-3:]
    for kind in kinds:
        for name in _failed_checks(_runners(*kind)):
            (near if name in ACROSS_SHAPES else failed).add(name)
    for name in sorted(near | failed):
        say(f"  {'near' if name in near else 'failed'}: {name}")
    proof.report("conformance_models", len(kinds))
    proof.report("near", len(near), f"of {len(CHECKS)} checks, kept up to rounding alone")
    proof.holds("conformance", not failed, f"{len(CHECKS)} checks for each; only those across shapes may fail")


def _failed_checks(make: MakeRunner) -> Iterator[str]:
    for check in CHECKS:
        try:
            check(make)
        except ConformanceError as error:
            say(f"  {check.__name__}: {str(error)[:200]}")
            yield check.__name__


@section("how exact")
def exactness(proof: Proof) -> None:
    """Compare last hidden states of all rows in batches, in chunks, after a cached prefix, and token by token, with
    those of the sequence computed alone in one piece."""
    unequal = dict.fromkeys(("batched", "chunked", "cached", "resumed"), 0)
    num_rows, max_error = 0, 0.0
    for kind in KINDS:
        make = _runners(*kind)
        texts = [_text(proof.random) for _ in range(proof.sized(quick=2, full=12))]
        alone = [_states(make(), [[(0, len(text))]], [text])[0] for text in texts]
        for way, states in _circumstances(make, texts, proof.random):
            for got, expected in zip(states, alone, strict=True):
                num_rows += len(got)
                unequal[way] += sum(a != b for a, b in zip(got, expected[-len(got) :], strict=True))
                max_error = max(max_error, _max_difference(got, expected[-len(got) :]))
    proof.report("exact_rows", num_rows)
    for way, count in unequal.items():
        proof.report(f"unequal_{way}", count, "rows that differ in any bit from the sequence alone")
    note = "the largest difference of a number, over the largest number of its row"
    proof.at_most("exact_worst", max_error, MAX_DIFFERENCE, note)


def _circumstances(make: MakeRunner, texts: list[list[int]], random: Random) -> Iterator[tuple[str, list[list[bytes]]]]:
    """Yield the states of the same sequences in other circumstances."""
    yield "batched", _states(make(), [[(0, len(text))] for text in texts], texts)
    yield "chunked", [_states(make(), [_cuts(random, len(text))], [text])[0] for text in texts]
    yield "cached", [_states_after_prefix(make(), text) for text in texts]
    yield "resumed", [_states(make(), [[(at, at + 1) for at in range(len(text))]], [text])[0] for text in texts]


def _text(random: Random) -> list[int]:
    return [random.randrange(VOCABULARY_SIZE) for _ in range(random.randint(2, 90))]


def _cuts(random: Random, length: int) -> list[tuple[int, int]]:
    cuts = sorted({0, length, *(random.randrange(length) for _ in range(3))})
    return list(pairwise(cuts))


def _item(text: Sequence[int], span: tuple[int, int], number: int, size: int) -> WorkItem:
    """Return a work item for a span of a sequence in its own blocks, which requests all hidden states."""
    blocks = tuple(range(1 + 8 * number, 9 + 8 * number))
    tokens = tuple(text[span[0] : span[1]])
    return WorkItem(number, tokens, span[0], blocks[: -(-len(text) // size)], hidden_positions=tuple(range(*span)))


def _states(runner: Runner, spans: list[list[tuple[int, int]]], texts: Sequence[Sequence[int]]) -> list[list[bytes]]:
    """Return the states of all rows of each text; step i feeds the i-th span of every text."""
    states: list[list[bytes]] = [[] for _ in texts]
    size, max_tokens = runner.capacity.block_size, runner.capacity.max_step_tokens
    for number in range(max(map(len, spans))):
        remaining = [(index, text) for index, text in enumerate(texts) if number < len(spans[index])]
        items = [_item(text, spans[index][number], index, size) for index, text in remaining]
        while items:
            num_fed, step = 0, []
            while items and num_fed + len(items[0].token_ids) <= max_tokens:
                num_fed += len(items[0].token_ids)
                step.append(items.pop(0))
            results = runner.start(StepPlan(1, (), tuple(step))).wait().rows
            for item in step:
                states[item.sequence_id] += results[item.sequence_id].hidden_states
    return states


def _states_after_prefix(runner: Runner, text: Sequence[int]) -> list[bytes]:
    """Return the states of the rows after the last full block, with blocks that another sequence has filled."""
    size = runner.capacity.block_size
    num_cached = (len(text) - 1) // size * size
    if num_cached:
        runner.start(StepPlan(1, (), (_item(text, (0, num_cached), 0, size),))).wait()
    item = _item(text, (num_cached, len(text)), 0, size)._replace(sequence_id=9)
    return list(runner.start(StepPlan(2, (), (item,))).wait().rows[9].hidden_states)


def _max_difference(found: Sequence[bytes], expected: Sequence[bytes]) -> float:
    a, b = (np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), -1) for rows in (found, expected))
    return float((np.abs(a - b).max(axis=1) / np.abs(b).max(axis=1)).max())
