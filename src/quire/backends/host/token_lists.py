"""Token lists as arrays, converted once per request, and token counts that grow with a sequence.

A client may ban, allow or stop at every token of a vocabulary. Iterating over such a list in Python costs milliseconds,
so each list is converted once, when the request is first sampled, to a mask with one byte per token.

Kept lists never affect which token is chosen. A row's lists are matched to its parameters by identity; its counts are
compared with the tokens counted before, and extended or rebuilt. Only sequences sampled in the last step are kept; all
others are rebuilt when needed.
"""

from array import array
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Ids, Numbers
from quire.core.request import ResolvedSampling
from quire.core.step import WorkItem

Mask = NDArray[np.bool_]


class TokenLists:
    """The lists of one request's parameters, each converted when first needed."""

    def __init__(self, params: ResolvedSampling, vocabulary_size: int) -> None:
        self.params = params
        self._vocabulary_size = vocabulary_size

    def struck(self, *, is_early: bool) -> Mask | None:
        """Return a mask of excluded tokens; None if none are. `is_early`: stop tokens are excluded too."""
        return self._early if is_early and self.params.stop_token_ids else self._always

    def left(self, mask: bytes, *, is_early: bool) -> Ids:
        """Return the allowed tokens whose bit is set in the mask: token t is bit t % 8 of byte t // 8."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocabulary_size, bitorder="little")
        if (struck := self.struck(is_early=is_early)) is not None:
            bits[struck] = 0
        return np.flatnonzero(bits)

    @cached_property
    def biases(self) -> tuple[Ids, Numbers]:
        """Biased tokens, possibly with duplicates, and the value to add to each."""
        bias = self.params.logit_bias
        ids = np.fromiter((token_id for token_id, _ in bias), np.int64, len(bias))
        return ids, np.fromiter((value for _, value in bias), np.float64, len(bias))

    @cached_property
    def _always(self) -> Mask | None:
        params = self.params
        if params.allowed_token_ids is None and not params.banned_token_ids:
            return None
        mask = np.full(self._vocabulary_size, params.allowed_token_ids is not None)
        mask[_ids(params.allowed_token_ids or ())] = False
        mask[_ids(params.banned_token_ids)] = True
        return mask

    @cached_property
    def _early(self) -> Mask:
        mask = np.zeros(self._vocabulary_size, bool) if self._always is None else self._always.copy()
        mask[_ids(self.params.stop_token_ids)] = True
        return mask


class TokenCounts:
    """Token counts of a list that grows at its end; each token is counted once, not at every step."""

    def __init__(self) -> None:
        self._counted: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("d")

    def of(self, tokens: tuple[int, ...]) -> tuple[Ids, Numbers]:
        """Return the distinct tokens and their counts."""
        if tokens[: len(self._counted)] != self._counted:
            self._clear()
        for token_id in tokens[len(self._counted) :]:
            at = self._places.setdefault(token_id, len(self._ids))
            if at == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0.0)
            self._counts[at] += 1.0
        self._counted = tokens
        return np.array(self._ids), np.array(self._counts)

    def _clear(self) -> None:
        self._counted = ()
        self._places.clear()
        del self._ids[:], self._counts[:]


class RowLists:
    """Data kept for one sequence: the lists of its request, and the counts of its own tokens."""

    def __init__(self, lists: TokenLists) -> None:
        self.lists = lists
        self.known = TokenCounts()
        self.produced = TokenCounts()


class KeptLists:
    """The lists of the sequences sampled in the last step."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._rows: dict[int, RowLists] = {}

    def of(self, items: Iterable[WorkItem]) -> list[RowLists]:
        """Return the lists of each item that samples, in order, and drop those of all other sequences."""
        # By identity: kept lists refer to their parameters, so no other object can have the same id.
        made = {id(row.lists.params): row.lists for row in self._rows.values()}
        rows = {}
        for item in items:
            if item.sampling is None:
                continue
            params = item.sampling.params
            row = self._rows.get(item.sequence_id)
            if row is None or row.lists.params is not params:
                if id(params) not in made:
                    made[id(params)] = TokenLists(params, self._vocabulary_size)
                row = RowLists(made[id(params)])
            rows[item.sequence_id] = row
        self._rows = rows
        return list(rows.values())


def _ids(tokens: tuple[int, ...] | frozenset[int]) -> Ids:
    return np.fromiter(tokens, np.int64, len(tokens))
