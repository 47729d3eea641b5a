"""At which block borders the recurrent state of a sequence is kept, as pure functions of that sequence.

A state is worth a slot where a sequence may go on from it:

    prompt                                                    answer
    ├──────────┼─────────────────────┼───────────┼──┤- - - - - - - - ┼ - -
           sparse border      where prompts   last full         newest border
                               have parted     block

The prompt sent again, or another answer's continuation of it, comes to its last full block; the next turn of
the conversation to the newest border of the answer; another prompt with the same beginning to where both part, which is
known once blocks match and their state is missing. Before that, a few borders at doubling distances are a guess.
"""

from quire.core.memory.state_slots import StateCheckpoint
from quire.core.scheduling.sequence import Sequence, table_of

NUM_BLOCKS_TO_FIRST_SPARSE = 16


def run_to_border(sequence: Sequence, num_tokens: int) -> int:
    """How many of its next `num_tokens` to compute, so that the run ends on the first border in it that is worth it."""
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
    """What the state behind its next `num_tokens` is kept for; None where those do not end on a border."""
    table = table_of(sequence)
    end, block_size = table.num_computed + num_tokens, table.block_size
    if end % block_size:
        return None
    if end in (_last_full(sequence.num_prompt_tokens, block_size), table.num_matched * block_size):
        return StateCheckpoint.PINNED
    return StateCheckpoint.SPARSE if end == _sparse_above(end - 1, block_size) else StateCheckpoint.TRANSIENT


def _last_full(num_tokens: int, block_size: int) -> int:
    """The last border below the last token, which is computed whatever is cached."""
    return (num_tokens - 1) // block_size * block_size


def _sparse_above(position: int, block_size: int) -> int:
    """The first border above this position whose distance from the start has doubled."""
    first = NUM_BLOCKS_TO_FIRST_SPARSE * block_size
    return first << (position // first).bit_length()
