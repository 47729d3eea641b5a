"""What a router calls blocks."""

import pytest

from quire.core.memory.block_table import max_hit_blocks
from quire.fleet.routing.block_names import names_of, root_name

ROOT = root_name("model", "", "group")
TOKENS = [5, 6, 7, 8, 9, 10, 11]


def test_full_blocks_have_names_and_a_partial_last_one_has_none() -> None:
    assert [len(names_of(ROOT, TOKENS[:count], 2)) for count in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_prompt_of_whole_blocks_has_one_name_more_than_it_may_hit() -> None:
    assert len(names_of(ROOT, TOKENS[:6], 2)) == max_hit_blocks(6, 2) + 1


def test_names_are_integers_of_63_bits_and_stay_what_they_are() -> None:
    names = names_of(ROOT, range(4000), 4)
    assert len(set(names)) == 1000
    assert all(0 <= name < 2**63 for name in names)
    assert max(names) > 2**62
    assert names[0] == names_of(ROOT, [0, 1, 2, 3], 4)[0]


def test_a_name_says_everything_before_it() -> None:
    here, there = names_of(ROOT, [1, 2, 3, 4, 5, 6], 2), names_of(ROOT, [1, 2, 9, 4, 5, 6], 2)
    assert here[0] == there[0]
    assert not set(here[1:]) & set(there[1:])


@pytest.mark.parametrize(
    "other",
    [("other", "", "group"), ("model", "lora", "group"), ("model", "", "other"), ("model", "g", "roup")],
)
def test_model_adapter_and_cache_group_are_in_the_root(other: tuple[str, str, str]) -> None:
    assert not set(names_of(ROOT, TOKENS, 2)) & set(names_of(root_name(*other), TOKENS, 2))


def test_a_key_makes_names_that_nobody_else_can_make() -> None:
    assert len({root_name("m", "a", "g", key) for key in (b"", b"one", b"two")}) == 3


def test_blocks_of_different_sizes_never_meet() -> None:
    assert not set(names_of(ROOT, range(64), 16)) & set(names_of(ROOT, range(64), 32))
    assert not set(names_of(ROOT, [0] * 64, 2)) & set(names_of(ROOT, [0] * 64, 4))


def test_whoever_knows_a_blocks_parent_names_it_alone() -> None:
    names = names_of(ROOT, TOKENS, 2)
    assert names_of(names[0], TOKENS[2:], 2) == names[1:]
