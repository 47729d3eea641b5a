"""Logits to tokens: each parameter by a small example, and everything at once against the plain sampler."""

import math
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.backends.host import drawing
from quire.backends.host.drawing import NUM_CANDIDATES
from quire.backends.host.exponential import exp_of
from quire.backends.host.sampler import Choice, choose, logprobs_of
from quire.backends.kernels import extension
from quire.backends.kernels.threads import num_threads, use_threads
from quire.core.request import ResolvedSampling
from quire.core.step import NO_TOKEN_LEFT, ROW_FAILED, Sampling
from tests.support.changed import changed
from tests.support.models.plain_sampler import Row, SamplerSurvey, compare, random_sampling, survey

NUM_SEEDS = 4_000
FLAT = [0.0, 0.0, 0.0, 0.0]
HUGE_SEED = 2**80


def sampling(seed: int = 0, known: tuple[int, ...] = (0,), num_prompt_tokens: int = 1, **given: Any) -> Sampling:
    return Sampling(ResolvedSampling(**given), seed, 0, len(known), num_prompt_tokens, known)


def greedy(logits: list[float], known: tuple[int, ...] = (0,), **given: Any) -> int | None:
    return choose(np.array([logits], np.float32), [sampling(known=known, temperature=0.0, **given)])[0].token_id


def tokens_of(logits: list[float], seeds: Iterable[int] = range(300), **given: Any) -> Counter[int | None]:
    """How often each token is drawn over these seeds."""
    samplings = [sampling(seed, **given) for seed in seeds]
    choices = choose(np.array([logits] * len(samplings), np.float32), samplings)
    return Counter(choice.token_id for choice in choices)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "availability", lambda: extension.Availability(False, "asked for"))


# --- which tokens may be chosen -------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert greedy([1.0, 3.0, 2.0]) == 1


def test_top_k_one_takes_the_likeliest_token_at_any_temperature() -> None:
    assert tokens_of([1.0, 1.25, 1.0], top_k=1, temperature=100.0).keys() == {1}


def test_the_smallest_id_wins_among_equals() -> None:
    assert greedy([1.0, 3.0, 2.0, 3.0]) == 1
    assert greedy([-0.0, 0.0]) == 0
    assert greedy([2.0, 3.0, 3.0], banned_token_ids=(1,)) == 2
    assert greedy([2.0, 3.0, 1.0], logit_bias=((0, 1.0),)) == 0


def test_repetition_penalty_lowers_prompt_and_output_tokens_once() -> None:
    assert greedy([4.0, 3.0, 1.0], known=(0,), repetition_penalty=2.0) == 1
    assert greedy([4.0, 3.0, 1.0], known=(2, 0), repetition_penalty=2.0) == 1
    assert greedy([4.0, 1.5, 1.0], known=(0, 0, 0), repetition_penalty=2.0) == 0


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    assert greedy([-1.0, -1.5], known=(0,), repetition_penalty=2.0) == 1
    assert greedy([-1.5, -1.0], known=(0,), repetition_penalty=0.5) == 0


def test_presence_penalty_counts_a_produced_token_once_and_no_prompt_token() -> None:
    assert greedy([2.0, 1.0], known=(0,), presence_penalty=1.5) == 0
    assert greedy([2.0, 1.0], known=(1, 0), presence_penalty=1.5) == 1
    assert greedy([2.0, 1.0], known=(1, 0, 0, 0), presence_penalty=0.75) == 0


def test_frequency_penalty_counts_every_time_a_token_was_produced() -> None:
    assert greedy([2.0, 1.0], known=(0, 0), frequency_penalty=0.75) == 0
    assert greedy([2.0, 1.0], known=(0, 0, 0), frequency_penalty=0.75) == 1


def test_penalties_come_in_order_repetition_first() -> None:
    assert greedy([4.0, 1.25], known=(1, 0), num_prompt_tokens=1, repetition_penalty=2.0, presence_penalty=1.5) == 1


def test_all_biases_of_a_token_are_added() -> None:
    assert greedy([0.0, 1.5], logit_bias=((0, 1.0),)) == 1
    assert greedy([0.0, 1.5], logit_bias=((0, 1.0), (0, 1.0))) == 0


def test_bias_comes_after_the_penalties() -> None:
    assert greedy([1.0, 2.0], known=(0,), repetition_penalty=2.0, logit_bias=((0, 1.75),)) == 0


def test_only_allowed_tokens_are_chosen() -> None:
    assert greedy([3.0, 2.0, 1.0], allowed_token_ids=(2, 1, 2)) == 1
    assert tokens_of(FLAT, allowed_token_ids=(0, 3)).keys() == {0, 3}


def test_banned_tokens_are_not_chosen_even_if_allowed_and_favoured() -> None:
    assert greedy([3.0, 2.0], allowed_token_ids=(0, 1), banned_token_ids=(0, 0), logit_bias=((0, 100.0),)) == 1
    assert tokens_of(FLAT, banned_token_ids=(0, 3)).keys() == {1, 2}


def test_stop_tokens_wait_for_min_tokens() -> None:
    stop: dict[str, Any] = {"stop_token_ids": frozenset({0}), "min_tokens": 2}
    assert greedy([3.0, 2.0], known=(1,), **stop) == 1
    assert greedy([3.0, 2.0], known=(1, 1), **stop) == 1
    assert greedy([3.0, 2.0], known=(1, 1, 1), **stop) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (1,), "banned_token_ids": (1,)},
        {"banned_token_ids": (0, 1)},
        {"allowed_token_ids": (1,), "stop_token_ids": frozenset({1}), "min_tokens": 1},
    ],
)
def test_a_row_with_nothing_left_fails_alone(given: dict[str, Any], temperature: float) -> None:
    rows = [sampling(temperature=0.0), sampling(temperature=temperature, **given), sampling(banned_token_ids=(0,))]
    first, second, third = choose(np.array([[1.0, 2.0]] * 3, np.float32), rows)
    assert (first, third) == (Choice(1), Choice(1))
    assert second.token_id is None
    assert second.error == NO_TOKEN_LEFT


def test_the_likeliest_tokens_are_the_same_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(4).integers(-9, 9, (12, 700)).astype(np.float32)
    logits[3, 5], logits[4, 699], logits[5, 0] = math.nan, math.inf, -math.inf
    samplings = [sampling(temperature=0.0)] * len(logits)
    found = choose(logits, samplings)
    without_kernels(monkeypatch)
    assert choose(logits, samplings) == found
    assert [at for at, choice in enumerate(found) if choice.error] == [3, 4, 5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    logits = np.array([[1.0, 2.0], [value, 1.0], [3.0, 2.0]], np.float32)
    for temperature in (0.0, 1e-6):
        first, second, third = choose(logits, [sampling(temperature=temperature)] * 3)
        assert (first, third) == (Choice(1), Choice(0))
        assert second.token_id is None
        assert second.error is not None
        assert second.error.code == ROW_FAILED


def test_a_batch_of_no_rows_chooses_nothing() -> None:
    assert choose(np.zeros((0, 5), np.float32), []) == []


# --- which of them is drawn -----------------------------------------------------------------------------------------


def test_min_p_keeps_tokens_by_their_ratio_to_the_likeliest() -> None:
    logits = [math.log(8.0), math.log(4.0), math.log(3.0)]
    assert tokens_of(logits, min_p=0.45).keys() == {0, 1}
    assert tokens_of(logits, min_p=0.55).keys() == {0}
    assert tokens_of([1.0, 1.0, 0.5], min_p=1.0).keys() == {0, 1}


def test_min_p_looks_at_heated_logits() -> None:
    assert tokens_of([1.0, 0.0], min_p=0.5).keys() == {0}
    assert tokens_of([1.0, 0.0], min_p=0.5, temperature=10.0).keys() == {0, 1}


def test_top_k_keeps_equals_of_the_kth() -> None:
    assert tokens_of([1.0, 3.0, 2.0, 2.0, 2.0], top_k=2, temperature=5.0).keys() == {1, 2, 3, 4}
    assert tokens_of([1.0, 3.0, 2.5, 2.0, 2.0], top_k=2, temperature=5.0).keys() == {1, 2}


def test_top_k_does_not_count_tokens_struck_out() -> None:
    assert tokens_of([9.0, 9.0, 2.0, 1.0, 0.0], top_k=2, temperature=5.0, banned_token_ids=(0, 1)).keys() == {2, 3}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert tokens_of(FLAT, top_k=1_000_000) == tokens_of(FLAT)
    assert tokens_of(FLAT, top_k=3, banned_token_ids=(0, 1)).keys() == {2, 3}


def test_top_p_keeps_the_token_that_crosses_it_and_its_equals() -> None:
    logits = [math.log(part) for part in (0.1, 0.5, 0.2, 0.2)]
    assert tokens_of(logits, top_p=0.45).keys() == {1}
    assert tokens_of(logits, top_p=0.55).keys() == {1, 2, 3}
    assert tokens_of(logits, top_p=0.95).keys() == {0, 1, 2, 3}
    assert tokens_of(FLAT, top_p=0.01).keys() == {0, 1, 2, 3}


def test_top_p_is_a_part_of_what_top_k_left() -> None:
    logits = [math.log(part) for part in (0.4, 0.3, 0.2, 0.1)]
    assert tokens_of(logits, top_p=0.5).keys() == {0, 1}
    assert tokens_of(logits, top_p=0.5, top_k=2).keys() == {0}


def test_huge_and_tiny_temperatures_leave_no_number_behind() -> None:
    assert tokens_of([3e38, -3e38, 3e38], temperature=1e-300).keys() == {0, 2}
    assert tokens_of([5.0, -5.0, 0.0], temperature=1e300).keys() == {0, 1, 2}


@pytest.mark.parametrize(("number", "token_id"), [(0.0, 1), (0.5 - 2**-53, 1), (0.5, 3), (1.0 - 2**-53, 3)])
def test_a_number_on_a_border_names_the_next_token_that_is_left(
    number: float, token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "uniform", lambda *_: number)
    assert tokens_of([0.0] * 5, seeds=[0], allowed_token_ids=(1, 3)).keys() == {token_id}


# --- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, -1, 2**63, HUGE_SEED, -HUGE_SEED])
def test_the_same_seed_gives_the_same_token(seed: int) -> None:
    assert len(tokens_of([0.1 * at for at in range(50)], [seed] * 20)) == 1


def test_seed_continuation_and_position_each_change_the_draw() -> None:
    params = ResolvedSampling()
    logits = np.zeros((32, 1000), np.float32)
    by_seed = [Sampling(params, at, 0, 5, 1, None) for at in range(32)]
    by_index = [Sampling(params, 0, at, 5, 1, None) for at in range(32)]
    by_position = [Sampling(params, 0, 0, 5 + at, 1, None) for at in range(32)]
    for samplings in (by_seed, by_index, by_position):
        assert len({choice.token_id for choice in choose(logits, samplings)}) > 25


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_seeds_draw_tokens_as_often_as_softmax_says(temperature: float) -> None:
    logits = [0.5, -1.0, 1.25]
    counts = tokens_of(logits, range(NUM_SEEDS), temperature=temperature)
    weights = [math.exp(value / temperature) for value in logits]
    for token_id, weight in enumerate(weights):
        part = weight / sum(weights)
        sigma = math.sqrt(NUM_SEEDS * part * (1.0 - part))
        assert abs(counts[token_id] - NUM_SEEDS * part) < 4.0 * sigma


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_equals_share_a_rank() -> None:
    logits = np.array([[math.log(2.0), 0.0, math.log(4.0), 0.0]], np.float32)
    (report,) = logprobs_of(logits, [3], [3])
    assert (report.token_id, report.rank) == (3, 3)
    assert report.logprob == pytest.approx(math.log(1 / 8), abs=1e-6)
    assert [token_id for token_id, _ in report.alternatives] == [2, 0, 1]
    assert [math.exp(logprob) for _, logprob in report.alternatives] == pytest.approx([0.5, 0.25, 0.125], abs=1e-6)


def test_alternatives_stop_at_the_vocabulary() -> None:
    (none, all_of_them) = logprobs_of(np.zeros((2, 3), np.float32), [0, 1], [0, 20])
    assert none.alternatives == ()
    assert [token_id for token_id, _ in all_of_them.alternatives] == [0, 1, 2]


@pytest.mark.parametrize("value", [-1e30, -1e9, 1e9, 1e30])
def test_logprobs_of_huge_equal_logits_share_the_whole(value: float) -> None:
    (report,) = logprobs_of(np.full((1, 4), value, np.float32), [2], [1])
    assert report.logprob == pytest.approx(-math.log(4.0), abs=1e-9)
    assert report.alternatives == ((0, report.logprob),)


# --- everything at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_random_rows_come_out_as_the_plain_sampler_says(seed: int) -> None:
    found = survey(400, seed)
    assert found.wrong == []
    assert found.num_near_ties < found.num_rows // 20
    assert found.num_rows // 50 < found.num_failed < found.num_rows // 4


def test_random_rows_come_out_as_the_plain_sampler_says_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    assert survey(200, 3).wrong == []


@pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)
@pytest.mark.parametrize("size", [2, 17, 1_500, 49_152])
def test_kernels_and_numpy_have_the_same_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, dice = Random(size), np.random.default_rng(size)
    logits = np.concatenate([spread * dice.standard_normal((8, size), np.float32) for spread in (0.01, 1.0, 6.0)])
    logits[0] = 1.5
    samplings = [random_sampling(random, size) for _ in logits]
    tokens = [random.randrange(size) for _ in logits]
    fast = choose(logits, samplings), logprobs_of(logits, tokens, [3] * len(tokens))
    without_kernels(monkeypatch)
    assert (choose(logits, samplings), logprobs_of(logits, tokens, [3] * len(tokens))) == fast


def test_exp_is_right_to_the_last_place_but_one_and_the_same_in_both_rooms() -> None:
    numbers = np.concatenate([-np.linspace(0, 746.5, 100_001), -np.logspace(-300, 2, 10_001), [0.0, -np.inf]])
    found = exp_of(numbers)
    exact = np.array([math.exp(one) for one in numbers])
    assert (np.abs(found - exact) <= np.spacing(exact)).all()
    assert found[-2:].tolist() == [1.0, 0.0]
    if extension.availability().is_available:
        native = np.empty_like(numbers)
        extension.kernels().exp_double(numbers.ctypes.data, native.ctypes.data, len(numbers))
        assert np.array_equal(found, native)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_nothing_is_drawn_from_numbers_that_are_not_finite(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels:
        without_kernels(monkeypatch)
    row = sampling(top_k=2, top_p=0.5, min_p=0.1)
    for strange in (math.inf, math.nan):
        assert drawing.draw([np.array([0.0, strange, 1.0])], [row]) == [3]


def large_logits(random: Random, shape: str, size: int) -> list[float]:
    if shape == "equal":
        return [1.5] * size
    if shape == "steps":
        return [random.randint(0, 8) / 8 for _ in range(size)]
    spread = {"flat": 0.1, "rolling": 1.5, "peaked": 6.0}[shape]
    return [random.gauss(0.0, spread) for _ in range(size)]


@pytest.mark.parametrize("shape", ["equal", "steps", "flat", "rolling", "peaked"])
def test_vocabularies_beyond_the_candidates_come_out_as_the_plain_sampler_says(shape: str) -> None:
    random = Random(f"large {shape}")
    found = SamplerSurvey()
    for size in (1_500, 2_000, 3_000):
        rows = [
            Row(large_logits(random, shape, size), changed(random_sampling(random, size), params=params), 5)
            for top_p in (1e-4, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0)
            for params in (
                ResolvedSampling(top_p=top_p),
                ResolvedSampling(top_p=top_p, top_k=NUM_CANDIDATES + random.randint(-1, 1)),
                ResolvedSampling(top_p=top_p, min_p=0.05, temperature=1.5, banned_token_ids=tuple(range(0, size, 3))),
            )
        ]
        compare(rows, "float32", found, f"{shape}, {size} tokens")
    assert found.wrong == []
    assert found.num_near_ties < found.num_rows // 20


def test_a_row_that_needs_every_token_changes_nothing_for_a_row_that_needs_few() -> None:
    random = Random(5)
    flat, peaked = ([random.gauss(0.0, spread) for _ in range(2_500)] for spread in (0.01, 5.0))
    rows = [Row(logits, sampling(seed, top_p=0.95)) for seed in range(20) for logits in (flat, peaked)]
    found = SamplerSurvey()
    compare(rows, "float32", found, "flat beside peaked")
    assert found.wrong == []


@pytest.mark.parametrize("size", [999, 49_152, 50_257])
def test_threads_and_other_rows_change_no_bit_of_a_logprob_or_draw(size: int) -> None:
    random, before = Random(size), num_threads()
    logits = 4 * np.random.default_rng(size).standard_normal((6, size), np.float32)
    samplings = [sampling(random.getrandbits(60), temperature=1.3, top_p=0.99, min_p=0.001) for _ in logits]
    tokens = [random.randrange(size) for _ in logits]
    together, drawn = logprobs_of(logits, tokens, [3] * 6), choose(logits, samplings)
    try:
        for count in (1, 2, 3):
            use_threads(count)
            for at in range(len(logits)):
                row = logits[at : at + 1]
                assert logprobs_of(row, tokens[at : at + 1], [3]) == together[at : at + 1]
                assert choose(row, samplings[at : at + 1]) == drawn[at : at + 1]
    finally:
        use_threads(before)
