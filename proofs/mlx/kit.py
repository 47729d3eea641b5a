"""The runner's contract on MLX, and how exact it is there."""

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
"""Checks of equal bits across batches and chunks, which a library that chooses its kernels by shape cannot keep."""
MOST_APART = 0.05
"""Roundings of bfloat16 through a few layers stay below it; a wrong block or mask does not."""
KINDS: tuple[tuple[str, int | None, str], ...] = (
    *((name, None, "float32") for name in MODELS),
    ("llama", 4, "auto"),
    ("qwen3-moe", 8, "auto"),
    ("llama", None, "bfloat16"),
)
"""Model, bits, type of weights."""


def _runners(name: str, bits: int | None, dtype: str) -> Callable[[], Runner]:
    return runners_of(made_by_mlx(name, bits), **{**SETTINGS, "dtype": dtype})


@section("conformance")
def conformance(proof: Proof) -> None:
    """Every check for every kind of model; what MLX cannot keep is told by name, and may be no other than those."""
    near: set[str] = set()
    failed: set[str] = set()
    kinds = KINDS if proof.is_full else KINDS[:2] + KINDS[-3:]
    for kind in kinds:
        for name in _failing(_runners(*kind)):
            (near if name in ACROSS_SHAPES else failed).add(name)
    for name in sorted(near | failed):
        say(f"  {'near' if name in near else 'failed'}: {name}")
    proof.report("conformance_models", len(kinds))
    proof.report("near", len(near), f"of {len(CHECKS)} checks, kept up to rounding alone")
    proof.holds("conformance", not failed, f"{len(CHECKS)} checks for each; no other than near ones fail")


def _failing(make: MakeRunner) -> Iterator[str]:
    for check in CHECKS:
        try:
            check(make)
        except ConformanceError as error:
            say(f"  {check.__name__}: {str(error)[:200]}")
            yield check.__name__


@section("how exact")
def how_exact(proof: Proof) -> None:
    """Last hidden states of all rows of sequences: in company, in chunks, behind a cached prefix, token by token; each
    against the sequence alone and whole."""
    unequal = dict.fromkeys(("batched", "chunked", "cached", "resumed"), 0)
    num_rows, worst = 0, 0.0
    for kind in KINDS:
        make = _runners(*kind)
        texts = [_text(proof.random) for _ in range(proof.sized(quick=2, full=12))]
        alone = [_states(make(), [[(0, len(text))]], [text])[0] for text in texts]
        for way, states in _ways(make, texts, proof.random):
            for got, expected in zip(states, alone, strict=True):
                num_rows += len(got)
                unequal[way] += sum(one != other for one, other in zip(got, expected[-len(got) :], strict=True))
                worst = max(worst, _apart(got, expected[-len(got) :]))
    proof.report("exact_rows", num_rows)
    for way, count in unequal.items():
        proof.report(f"unequal_{way}", count, "rows that differ in any bit from the sequence alone")
    told = "the largest difference of a number, over the largest number of its row: what is called near must be near"
    proof.at_most("exact_worst", worst, MOST_APART, told)


def _ways(make: MakeRunner, texts: list[list[int]], random: Random) -> Iterator[tuple[str, list[list[bytes]]]]:
    """The same sequences in other circumstances."""
    yield "batched", _states(make(), [[(0, len(text))] for text in texts], texts)
    yield "chunked", [_states(make(), [_cuts(random, len(text))], [text])[0] for text in texts]
    yield "cached", [_behind_a_prefix(make(), text) for text in texts]
    yield "resumed", [_states(make(), [[(at, at + 1) for at in range(len(text))]], [text])[0] for text in texts]


def _text(random: Random) -> list[int]:
    return [random.randrange(VOCABULARY_SIZE) for _ in range(random.randint(2, 90))]


def _cuts(random: Random, length: int) -> list[tuple[int, int]]:
    cuts = sorted({0, length, *(random.randrange(length) for _ in range(3))})
    return list(pairwise(cuts))


def _item(text: Sequence[int], span: tuple[int, int], number: int, size: int) -> WorkItem:
    """Some tokens of a sequence in blocks of its own, and the hidden states of all of them."""
    blocks = tuple(range(1 + 8 * number, 9 + 8 * number))
    fed = tuple(text[span[0] : span[1]])
    return WorkItem(number, fed, span[0], blocks[: -(-len(text) // size)], hidden_positions=tuple(range(*span)))


def _states(runner: Runner, spans: list[list[tuple[int, int]]], texts: Sequence[Sequence[int]]) -> list[list[bytes]]:
    """Of each text, all its rows, fed in these spans; the first spans of all texts in one step, and so on."""
    found: list[list[bytes]] = [[] for _ in texts]
    size, most = runner.capacity.block_size, runner.capacity.max_step_tokens
    for turn in range(max(map(len, spans))):
        items = [_item(text, spans[at][turn], at, size) for at, text in enumerate(texts) if turn < len(spans[at])]
        while items:
            num_fed, step = 0, []
            while items and num_fed + len(items[0].token_ids) <= most:
                num_fed += len(items[0].token_ids)
                step.append(items.pop(0))
            rows = runner.start(StepPlan(1, (), tuple(step))).wait().rows
            for item in step:
                found[item.sequence_id] += rows[item.sequence_id].hidden_states
    return found


def _behind_a_prefix(runner: Runner, text: Sequence[int]) -> list[bytes]:
    """The rows behind the last full block, whose blocks another sequence has filled."""
    size = runner.capacity.block_size
    num_cached = (len(text) - 1) // size * size
    if num_cached:
        runner.start(StepPlan(1, (), (_item(text, (0, num_cached), 0, size),))).wait()
    item = _item(text, (num_cached, len(text)), 0, size)._replace(sequence_id=9)
    return list(runner.start(StepPlan(2, (), (item,))).wait().rows[9].hidden_states)


def _apart(found: Sequence[bytes], expected: Sequence[bytes]) -> float:
    one, other = (np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), -1) for rows in (found, expected))
    return float((np.abs(one - other).max(axis=1) / np.abs(other).max(axis=1)).max())
