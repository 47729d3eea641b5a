"""The block borders at which a sequence's recurrent state is cached, as pure functions of the sequence.

A state is worth a slot if another sequence is likely to continue from it:

    prompt                                                    output
    ├──────────┼─────────────────────┼───────────┼──┤- - - - - - - - ┼ - -
           sparse border        divergence    last full         newest border
                                              block

The same prompt sent again continues from its last full block. The next turn of the conversation continues from the
newest border of the output. Another prompt with the same beginning continues from where the prompts diverge; this
position is known once blocks match but their state is missing. Until then, a few borders at doubling distances serve.
"""

from quire.core.memory.state_slots import StateCheckpoint
from quire.core.scheduling.sequence import Sequence, table_of

NUM_BLOCKS_TO_FIRST_SPARSE = 16


def run_to_border(sequence: Sequence, num_tokens: int) -> int:
    """Return how many of the next `num_tokens` to compute, so that the step ends on the first border to be cached."""
    table = table_of(sequence)
    start, block_size = table.num_computed, table.block_size
    end = start + num_tokens
    for border in (
        _last_full(sequence.num_prompt_tokens, block_size),
        _last_full(len(sequence.tokens), block_size),
        table.num_matched * block_size,
        _sparse_above(start, block_size),
    ):
        if start < border < end:
            end = border
    return end - start


def keep_behind(sequence: Sequence, num_tokens: int) -> StateCheckpoint | None:
    """Return the reason to cache the state after the next `num_tokens`; None if these do not end on a block border."""
    table = table_of(sequence)
    end, block_size = table.num_computed + num_tokens, table.block_size
    if end % block_size:
        return None
    if end in (_last_full(sequence.num_prompt_tokens, block_size), table.num_matched * block_size):
        return StateCheckpoint.PINNED
    return StateCheckpoint.SPARSE if end == _sparse_above(end - 1, block_size) else StateCheckpoint.TRANSIENT


def _last_full(num_tokens: int, block_size: int) -> int:
    """Return the last block border before the last token, which is always computed."""
    return (num_tokens - 1) // block_size * block_size


def _sparse_above(position: int, block_size: int) -> int:
    """Return the first sparse border after this position: 16, 32, 64, ... blocks from the start."""
    first = NUM_BLOCKS_TO_FIRST_SPARSE * block_size
    return first << (position // first).bit_length()
