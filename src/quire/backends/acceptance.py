"""Acceptance of draft tokens, and the masks at each sampled position; identical on every backend."""

from collections.abc import Iterable, Sequence

from quire.core.step import Masks, WorkItem
from quire.errors import InvariantError


def accepted_tokens(drafts: Sequence[int], choices: Iterable[int | None]) -> tuple[int, ...]:
    """Return the chosen tokens up to and including the first that differs from the draft at its position.

    Tokens chosen after a rejected draft are invalid, because their context contains that draft. None in `choices` means
    that no token could be chosen: the tokens before it are accepted, and the next step reports the error.
    """
    tokens: list[int] = []
    for index, token_id in enumerate(choices):
        if token_id is None:
            break
        tokens.append(token_id)
        if index == len(drafts) or token_id != drafts[index]:
            break
    return tuple(tokens)


def masks_of(masks: Masks, item: WorkItem, vocabulary_size: int) -> Sequence[bytes | None]:
    """Return the mask of each sampled position (None: any token). Raises InvariantError if a mask's size is wrong."""
    num_positions = item.num_drafts + 1
    item_masks = masks.get(item.sequence_id)
    if item_masks is None:
        return (None,) * num_positions
    num_bytes = -(-vocabulary_size // 8)
    if len(item_masks) != num_positions or any(len(mask) != num_bytes for mask in item_masks):
        raise InvariantError(
            f"expected a mask of {num_positions} rows of {num_bytes} bytes for sequence {item.sequence_id}, got row "
            f"sizes {[len(mask) for mask in item_masks]}"
        )
    return item_masks
