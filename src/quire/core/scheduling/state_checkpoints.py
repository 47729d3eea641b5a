"""Decides at which block borders a sequence's recurrent state is cached. Pure functions of the sequence.

A state is worth a slot if another sequence is likely to continue from it:

    prompt                                                    output
    ├──────────┼─────────────────────┼───────────┼──┤- - - - - - - - ┼ - -
           sparse border        divergence    last full         newest border
                                              block

The same prompt sent again continues from its last full block. The next turn of the conversation continues from the
newest border of the output. Another prompt with the same beginning continues from where the prompts diverge: the end of
the blocks that matched without a cached state. Before such a match, sparse borders at doubling distances are used.
"""

from quire.core.memory.state_slots import StateCheckpoint
from quire.core.scheduling.sequence import Sequence, table_of

NUM_BLOCKS_TO_FIRST_SPARSE = 16


def tokens_to_border(sequence: Sequence, num_tokens: int) -> int:
    """Return how many of the next `num_tokens` to compute: up to the first border at which the state is cached."""
    table = table_of(sequence)
    start, block_size = table.num_computed, table.block_size
    end = start + num_tokens
    for border in (
        _last_full_border(sequence.num_prompt_tokens, block_size),
        _last_full_border(len(sequence.tokens), block_size),
        table.num_matched * block_size,
        _next_sparse_border(start, block_size),
    ):
        if start < border < end:
            end = border
    return end - start


def checkpoint_after(sequence: Sequence, num_tokens: int) -> StateCheckpoint | None:
    """Return why the state after the next `num_tokens` is cached; None if they do not end on a block border."""
    table = table_of(sequence)
    end, block_size = table.num_computed + num_tokens, table.block_size
    if end % block_size:
        return None
    if end in (_last_full_border(sequence.num_prompt_tokens, block_size), table.num_matched * block_size):
        return StateCheckpoint.DURABLE
    return StateCheckpoint.SPARSE if end == _next_sparse_border(end - 1, block_size) else StateCheckpoint.TRANSIENT


def _last_full_border(num_tokens: int, block_size: int) -> int:
    """Return the last block border before the last token: that token is always computed, to get logits."""
    return (num_tokens - 1) // block_size * block_size


def _next_sparse_border(position: int, block_size: int) -> int:
    """Return the first sparse border after this position: 16, 32, 64, ... blocks from the start."""
    first = NUM_BLOCKS_TO_FIRST_SPARSE * block_size
    return first << (position // first).bit_length()
