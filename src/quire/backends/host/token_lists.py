"""Lists of tokens as arrays: made once for a request, however many steps it runs; and counts that grow with a sequence.

A client may ban, allow or stop at every token of a vocabulary. Walking such a list in Python costs milliseconds, so it
is walked when its first row is sampled and never again: what stays is a mask with one byte for each token.

Nothing here decides a token. A row's lists are those of its parameters, the very object; its counts are those of the
tokens they are asked about, compared with the ones counted before. So sampling is the same function with and without
what was kept. Kept is what the last step sampled: what is not there any more is made anew.
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
    """The lists of one request's parameters, each made when it is first needed."""

    def __init__(self, params: ResolvedSampling, vocabulary_size: int) -> None:
        self.params = params
        self._vocabulary_size = vocabulary_size

    def struck(self, *, is_early: bool) -> Mask | None:
        """True for each token that may not be chosen; None if all may. Early: while stop tokens may not."""
        return self._early if is_early and self.params.stop_token_ids else self._always

    def left(self, mask: bytes, *, is_early: bool) -> Ids:
        """The tokens that may be chosen and whose bit in the mask is set: bit t % 8 of byte t // 8 is token t's."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocabulary_size, bitorder="little")
        if (struck := self.struck(is_early=is_early)) is not None:
            bits[struck] = 0
        return np.flatnonzero(bits)

    @cached_property
    def biases(self) -> tuple[Ids, Numbers]:
        """Tokens, some perhaps more than once, and what is added to them."""
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
    """How often each token stands in a list that grows at its end: each is counted once, not at every step."""

    def __init__(self) -> None:
        self._counted: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("d")

    def of(self, tokens: tuple[int, ...]) -> tuple[Ids, Numbers]:
        """The tokens in it, each once, and how often."""
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
    """What is kept for one sequence: its request's lists, and the counts of its own tokens."""

    def __init__(self, lists: TokenLists) -> None:
        self.lists = lists
        self.known = TokenCounts()
        self.produced = TokenCounts()


class KeptLists:
    """The lists of the sequences that were sampled in the last step."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._rows: dict[int, RowLists] = {}

    def of(self, items: Iterable[WorkItem]) -> list[RowLists]:
        """Those of each item that asks for tokens, in their order; of all others nothing is kept."""
        # By identity: as long as lists are kept, so are their parameters, and no other object can have their address.
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
