"""Who holds which blocks."""

from random import Random

import pytest

from quire.errors import InvariantError
from quire.fleet.routing import block_index as module
from quire.fleet.routing.block_index import MARKS, UNCONFIRMED_S, BlockIndex
from tests.support.errors import raises_code
from tests.support.fleet.router_invariants import holders_of, is_swept, num_unconfirmed

PROMPT = tuple(range(100, 500))


def index_of(*members: str, num_shards: int = 8) -> BlockIndex:
    index = BlockIndex(num_shards)
    for member in members:
        index.join(member)
    return index


def swept(index: BlockIndex, now_s: float = 0.0) -> BlockIndex:
    for _ in range(1000):
        index.sweep(now_s)
    assert is_swept(index)
    return index


def groups(index: BlockIndex, among: frozenset[str]) -> list[tuple[int, tuple[str, ...]]]:
    found: list[tuple[int, tuple[str, ...]]] = []

    def look(depth: int, members: tuple[str, ...]) -> int:
        found.append((depth, members))
        return 0

    index.visit(PROMPT, among, look)
    return found


def test_each_member_has_its_own_depth_and_who_lacks_the_first_block_has_none() -> None:
    index = index_of("a", "b", "c", "d")
    for member, depth in (("a", 400), ("b", 17), ("c", 17)):
        index.add_blocks(member, PROMPT[:depth])
    index.add_blocks("d", (1, 2, 3))
    assert index.depths(PROMPT) == {"a": 400, "b": 17, "c": 17}
    assert index.depths(PROMPT[:17]) == {"a": 17, "b": 17, "c": 17}
    assert index.depths(()) == {}


@pytest.mark.parametrize("seed", range(10))
def test_the_search_finds_what_a_walk_finds(seed: int) -> None:
    random = Random(seed)
    depths = {f"m{number}": random.randrange(401) for number in range(70)}
    index = index_of(*depths)
    for member, depth in depths.items():
        index.add_blocks(member, PROMPT[:depth])
    assert index.depths(PROMPT) == {member: depth for member, depth in depths.items() if depth}


def test_members_with_the_same_blocks_cost_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(*(f"m{number}" for number in range(64)))
    for member in index.members:
        index.add_blocks(member, PROMPT[:123])
    index.add_blocks("m7", PROMPT)
    assert sorted(depth for depth, _ in groups(index, frozenset(index.members))) == [123, 400]


@pytest.mark.parametrize(
    ("enough", "shown"), [(0, [400, 124, 30, 0]), (31, [400, 124, 30, 0]), (128, [400]), (500, [400])]
)
def test_nobody_is_searched_for_once_all_others_hold_too_little(enough: int, shown: list[int]) -> None:
    index = index_of("a", "b", "c", "d")
    for member, depth in (("a", 400), ("b", 30)):
        index.add_blocks(member, PROMPT[:depth])
    index.expect_blocks("c", PROMPT[:125], 0.0)
    found: list[int] = []

    def look(depth: int, members: tuple[str, ...]) -> int:
        found.append(depth)
        return enough

    index.visit(PROMPT, frozenset(index.members), look)
    assert sorted(found, reverse=True) == shown


def test_who_left_is_not_read_at_once_and_not_heard_later() -> None:
    index = index_of("a", "b")
    index.add_blocks("a", PROMPT)
    index.add_blocks("b", PROMPT[:3])
    index.expect_blocks("a", PROMPT, 0.0)
    index.leave("a")
    assert index.depths(PROMPT) == {"b": 3}
    index.add_blocks("a", PROMPT)
    index.remove_blocks("a", PROMPT[:1])
    index.expect_blocks("a", PROMPT, 0.0)
    index.withdraw_expected("a", PROMPT, 0.0)
    index.clear_blocks("a")
    assert index.depths(PROMPT) == {"b": 3}
    assert index.members == ("b",)


def test_who_comes_next_inherits_nothing_however_little_was_swept() -> None:
    index = BlockIndex(num_shards=64, swept_at_once=1)
    index.join("a")
    index.add_blocks("a", PROMPT)
    index.expect_blocks("a", PROMPT, 0.0)
    index.leave("a")
    for number in range(100):
        index.join(f"m{number}")
        assert index.depths(PROMPT) == {}
        index.sweep(0.0)
    assert is_swept(index)
    assert len(index) == 0


def test_bits_are_used_again_once_they_are_swept() -> None:
    index = index_of("a")
    for _ in range(50):
        index.add_blocks("a", PROMPT)
        index.clear_blocks("a")
        swept(index)
    assert index.num_bits == 2
    for _ in range(50):
        index.clear_blocks("a")
    index.leave("a")
    index.join("b")
    assert index.num_bits == 2, "without entries there was nothing to sweep"


def test_a_bit_that_is_anothers_goes_by_its_name() -> None:
    index = index_of("a")
    index.add_blocks("a", PROMPT)
    assert index.depths(PROMPT) == {"a": 400}
    index.leave("a")
    swept(index).join("b")
    index.add_blocks("b", PROMPT)
    assert index.depths(PROMPT) == {"b": 400}


def test_a_sweep_is_bounded() -> None:
    index = BlockIndex(num_shards=64, swept_at_once=1)
    index.join("a")
    index.add_blocks("a", range(640))
    index.leave("a")
    index.sweep(0.0)
    assert len(index) == 630
    assert not is_swept(index)


def test_sweeping_takes_nothing_of_those_who_stay() -> None:
    index = index_of("a", "b")
    index.add_blocks("a", PROMPT)
    index.add_blocks("b", PROMPT[:5])
    index.leave("a")
    assert swept(index).depths(PROMPT) == {"b": 5}
    assert len(index) == 5


def test_removed_blocks_are_gone_for_that_member_alone() -> None:
    index = index_of("a", "b")
    index.add_blocks("a", PROMPT[:4])
    index.add_blocks("b", PROMPT[:4])
    index.remove_blocks("a", PROMPT[2:4][::-1])
    index.remove_blocks("a", (1, 2))
    assert index.depths(PROMPT) == {"a": 2, "b": 4}
    index.remove_blocks("b", PROMPT[:4][::-1])
    assert len(index) == 2


def test_a_cleared_member_starts_anew() -> None:
    index = index_of("a", "b")
    index.add_blocks("a", PROMPT[:4])
    index.add_blocks("b", PROMPT[:4])
    index.expect_blocks("a", PROMPT, 0.0)
    index.clear_blocks("a")
    assert index.depths(PROMPT) == {"b": 4}
    assert num_unconfirmed(index) == 0
    index.add_blocks("a", PROMPT[:2])
    assert index.depths(PROMPT) == {"a": 2, "b": 4}
    assert swept(index).depths(PROMPT) == {"a": 2, "b": 4}


def test_a_prompt_on_its_way_counts_at_once_and_is_taken_back_after_half_a_minute() -> None:
    index = index_of("a", "b")
    index.expect_blocks("a", PROMPT[:20], 10.0)
    index.expect_blocks("b", (), 10.0)
    index.sweep(10.0 + UNCONFIRMED_S - 0.1)
    assert index.depths(PROMPT) == {"a": 20}
    index.sweep(10.0 + UNCONFIRMED_S)
    assert index.depths(PROMPT) == {}
    assert num_unconfirmed(index) == 0


def test_what_was_confirmed_stays_and_what_was_removed_goes() -> None:
    index = index_of("a")
    index.expect_blocks("a", PROMPT[:20], 0.0)
    index.add_blocks("a", PROMPT[:8])
    index.remove_blocks("a", PROMPT[15:20][::-1])
    assert index.depths(PROMPT) == {"a": 15}
    index.sweep(UNCONFIRMED_S)
    assert index.depths(PROMPT) == {"a": 8}


def test_believed_again_is_believed_longer() -> None:
    index = index_of("a")
    index.expect_blocks("a", PROMPT[:20], 0.0)
    index.expect_blocks("a", PROMPT[:10], 20.0)
    index.sweep(UNCONFIRMED_S)
    assert index.depths(PROMPT) == {"a": 10}
    index.sweep(20.0 + UNCONFIRMED_S)
    assert index.depths(PROMPT) == {}


def test_what_is_believed_comes_on_top_of_what_is_confirmed() -> None:
    index = index_of("a", "b", "c")
    index.add_blocks("a", PROMPT[:8])
    index.add_blocks("b", PROMPT[:8])
    index.expect_blocks("a", PROMPT[:20], 0.0)
    index.expect_blocks("b", PROMPT[:4], 0.0)
    index.expect_blocks("c", PROMPT[:6], 0.0)
    assert index.depths(PROMPT) == {"a": 20, "b": 8, "c": 6}
    assert holders_of(index, PROMPT[6]) == ["a", "b"]


def test_a_prompt_that_was_not_taken_is_not_believed_unless_another_came_since() -> None:
    index = index_of("a")
    index.expect_blocks("a", PROMPT[:20], 0.0)
    index.expect_blocks("a", PROMPT[:5], 1.0)
    index.withdraw_expected("a", PROMPT[:20], 0.0)
    assert index.depths(PROMPT) == {"a": 5}
    index.add_blocks("a", PROMPT[:2])
    index.withdraw_expected("a", PROMPT[:5], 1.0)
    assert index.depths(PROMPT) == {"a": 2}


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 63, 64, 100, 255, 256, 399, 400])
def test_what_is_believed_is_exact_to_a_sixteenth_and_never_too_much(depth: int) -> None:
    index = index_of("a")
    index.expect_blocks("a", PROMPT[:depth], 0.0)
    found = index.depths(PROMPT)["a"]
    assert depth - depth / 16 <= found <= depth
    assert depth > 32 or found == depth


def test_marks_grow_and_thin_out() -> None:
    assert list(MARKS) == sorted(set(MARKS))
    assert MARKS[:32] == tuple(range(1, 33))
    assert sum(mark <= 400 for mark in MARKS) == 89
    index = index_of("a")
    index.expect_blocks("a", PROMPT, 0.0)
    assert num_unconfirmed(index) == 89


def test_what_is_taken_back_little_by_little_is_a_prefix_all_the_while() -> None:
    index = BlockIndex(num_shards=4, swept_at_once=3)
    index.join("a")
    index.expect_blocks("a", PROMPT[:10], 0.0)
    index.expect_blocks("a", (1, 2, 3), 0.0)
    depths = []
    for _ in range(5):
        depths.append(index.depths(PROMPT).get("a", 0))
        index.sweep(UNCONFIRMED_S)
    assert depths == [10, 7, 4, 1, 0]
    assert num_unconfirmed(index) == 0


@pytest.mark.parametrize("seed", range(20))
def test_of_who_breaks_the_rule_some_block_is_found_that_it_holds(seed: int) -> None:
    random, index = Random(seed), index_of("a", "b")
    held = {member: {name for name in PROMPT[:30] if random.random() < 0.6} for member in index.members}
    for member, names in held.items():
        index.add_blocks(member, sorted(names))
    found = index.depths(PROMPT[:30])
    assert found.keys() == {member for member, names in held.items() if PROMPT[0] in names}
    for member, depth in found.items():
        assert PROMPT[depth - 1] in held[member]
        assert depth == 30 or PROMPT[depth] not in held[member]


def test_sets_of_members_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_GROUPS", 2)
    index = index_of("a", "b", "c")
    for number, members in enumerate(("a", "b", "c", "ab", "bc", "abc")):
        for member in members:
            index.add_blocks(member, [number])
        assert set(index.depths([number])) == set(members)
        assert len(index._groups) <= 2


def test_mistakes_of_the_caller_are_told() -> None:
    index = index_of("a")
    with raises_code(InvariantError, "invariant_broken"):
        index.join("a")
    with raises_code(InvariantError, "invariant_broken"):
        index.leave("b")
    for number in (0, 3):
        with raises_code(InvariantError, "invariant_broken"):
            BlockIndex(num_shards=number)


def test_who_left_is_not_read_even_where_a_set_of_before_is_asked_for() -> None:
    index = BlockIndex()
    for member in ("a", "b"):
        index.join(member)
        index.add_blocks(member, PROMPT)
    both = frozenset(("a", "b"))
    assert groups(index, both) == [(len(PROMPT), ("a", "b"))]
    index.leave("a")
    assert groups(index, both) == [(len(PROMPT), ("b",))]
