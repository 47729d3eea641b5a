from collections import Counter

from quire.backends.host.drawing import uniform


def test_a_number_has_a_name_and_never_changes() -> None:
    assert uniform(7, 0, 3) == 0.6753572838968287


def test_seed_continuation_and_position_each_name_another_number() -> None:
    names = [(seed, index, position) for seed in range(8) for index in range(8) for position in range(8)]
    assert len({uniform(*name) for name in names}) == len(names)


def test_numbers_written_side_by_side_are_not_confused() -> None:
    assert uniform(1, 23, 4) != uniform(12, 3, 4) != uniform(1, 2, 34)


def test_any_seed_will_do() -> None:
    assert all(0.0 <= uniform(seed, 0, 0) < 1.0 for seed in (-1, 0, -(2**63), 2**63, 2**200))


def test_numbers_are_spread_evenly() -> None:
    tenths = Counter(int(uniform(1, 0, position) * 10) for position in range(10_000))
    assert all(abs(tenths[tenth] - 1_000) < 130 for tenth in range(10))
