"""Which of the tokens chosen after drafts count, and among which tokens they were chosen: alike on every backend."""

from collections.abc import Iterable, Sequence

from quire.core.step import Masks, WorkItem
from quire.errors import InvariantError


def accepted(drafts: Sequence[int], chosen: Iterable[int | None]) -> tuple[int, ...]:
    """The tokens chosen one after the other, up to the first that is not the draft in its place.

    What was chosen after a wrong draft followed a token that is not there. None: none could be chosen; the tokens
    before it stand, and the next step will say what is wrong.
    """
    tokens: list[int] = []
    for at, token_id in enumerate(chosen):
        if token_id is None:
            break
        tokens.append(token_id)
        if at == len(drafts) or token_id != drafts[at]:
            break
    return tuple(tokens)


def masks_of(masks: Masks, item: WorkItem, vocabulary_size: int) -> Sequence[bytes | None]:
    """What may be chosen at each position at which the item samples; None: any token."""
    num_positions = item.num_drafts + 1
    item_masks = masks.get(item.sequence_id)
    if item_masks is None:
        return (None,) * num_positions
    num_bytes = -(-vocabulary_size // 8)
    if len(item_masks) != num_positions or any(len(one) != num_bytes for one in item_masks):
        raise InvariantError(
            f"expected a mask of {num_positions} rows of {num_bytes} bytes for sequence {item.sequence_id}, got rows "
            f"of {[len(one) for one in item_masks]}"
        )
    return item_masks
