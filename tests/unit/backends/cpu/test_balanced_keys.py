"""Keys in 8 bits are evened out by factors that leave every score what it was."""

import numpy as np

from quire.backends.cpu.layer_weights import MAX_FACTOR, factors_of, output_magnitudes

DICE = np.random.default_rng(3)
HEADS, KV_HEADS, SIZE = 6, 2, 16


def rotated(values: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """As positions turn a head: its first half with its second."""
    low, high = np.split(values, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def some_sizes() -> tuple[np.ndarray, np.ndarray]:
    queries = np.exp(DICE.normal(0, 1, (HEADS, SIZE))).astype(np.float32)
    keys = np.exp(DICE.normal(0, 2, (KV_HEADS, SIZE))).astype(np.float32)
    return queries, keys


def test_scores_are_the_same_with_and_without_factors_at_any_position() -> None:
    factors = factors_of(*some_sizes())
    queries, keys = DICE.normal(size=(KV_HEADS, SIZE)), DICE.normal(size=(KV_HEADS, SIZE))
    for _ in range(20):
        here, there = DICE.uniform(0, 6, SIZE // 2), DICE.uniform(0, 6, SIZE // 2)
        plain = (rotated(queries, here) * rotated(keys, there)).sum(axis=1)
        evened = (rotated(queries * factors, here) * rotated(keys / factors, there)).sum(axis=1)
        np.testing.assert_allclose(evened, plain, rtol=1e-5)


def test_numbers_that_turn_together_share_a_factor() -> None:
    low, high = np.split(factors_of(*some_sizes()), 2, axis=1)
    np.testing.assert_array_equal(low, high)


def test_a_number_that_is_large_in_every_key_is_no_longer_so() -> None:
    queries, keys = np.ones((HEADS, SIZE), np.float32), np.ones((KV_HEADS, SIZE), np.float32)
    keys[:, 3] = keys[:, 3 + SIZE // 2] = 100.0
    evened = keys / factors_of(queries, keys)
    assert evened.max() / np.median(evened) < 0.2 * keys.max() / np.median(keys)


def test_factors_have_limits_whatever_the_weights_are() -> None:
    queries, keys = np.zeros((HEADS, SIZE), np.float32), np.ones((KV_HEADS, SIZE), np.float32)
    keys[0, 0] = 1e30
    factors = factors_of(queries, keys)
    assert np.isfinite(factors).all()
    assert (factors >= 1 / MAX_FACTOR).all() and (factors <= MAX_FACTOR).all()  # noqa: PT018 - one sentence


def test_an_outputs_size_is_that_of_its_row_and_its_bias() -> None:
    weight, bias = np.array([[3.0, 4.0]], np.float32), np.array([12.0], np.float32)
    assert output_magnitudes(weight, None) == 5.0
    assert output_magnitudes(weight, bias) == 13.0
