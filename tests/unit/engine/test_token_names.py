"""Tokens under other names: nothing but equal and unequal is left of them."""

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.trace_records import PermutedTokenIds

KEYS = st.binary(min_size=32, max_size=32)


@given(st.integers(1, 300), KEYS)
def test_each_id_of_the_vocabulary_has_one_name_of_the_vocabulary(size: int, key: bytes) -> None:
    assert sorted(PermutedTokenIds(size, key)(range(size))) == list(range(size))


@given(KEYS, KEYS)
def test_names_depend_on_the_key_and_on_nothing_else(key: bytes, other: bytes) -> None:
    assert PermutedTokenIds(300, key)(range(300)) == PermutedTokenIds(300, key)(range(300))
    assert key == other or PermutedTokenIds(300, key)(range(300)) != PermutedTokenIds(300, other)(range(300))


def test_an_id_that_no_model_has_takes_nobodys_name() -> None:
    assert PermutedTokenIds(10, bytes(32))([10, 4_000_000]) == [10, 4_000_000]


def test_few_ids_keep_their_own() -> None:
    names = PermutedTokenIds(50_000, bytes(32))(range(50_000))
    assert sum(token_id == name for token_id, name in enumerate(names)) < 20
