"""Parents, packing, caps."""

import pytest

from quire.core.memory.block_table import BlockTable, max_hit_blocks, num_blocks_for, pack_tokens, unpack_tokens


def test_the_parent_of_the_first_block_is_the_root() -> None:
    table = BlockTable(1, -5, block_size=4)
    table.blocks = [17, 4]
    assert (table.parent_of(0), table.parent_of(1)) == (-5, 17)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_are_counted_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 4) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_full_hit_is_capped_so_that_one_token_is_left_to_compute(num_tokens: int, expected: int) -> None:
    assert max_hit_blocks(num_tokens, 4) == expected


def test_tokens_pack_as_little_endian_u32_and_unpack_again() -> None:
    assert pack_tokens([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    assert unpack_tokens(pack_tokens([7, 4294967295])) == (7, 4294967295)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_not_a_u32_cannot_be_packed(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])
