"""Token lists of sampling parameters as arrays, converted once per request, and token counts that grow with a sequence.

A client may ban, allow or stop at every token of a vocabulary. Iterating over such a list in Python takes milliseconds,
so each list is converted once, when the request is first sampled, to a mask with one byte per token.

Cached lists never affect which token is chosen. A row's lists are matched to its parameters by identity; its counts
are compared with the tokens counted before, and extended or rebuilt. The cache contains only the sequences sampled in
the last step; lists of all other sequences are rebuilt when needed.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Doubles, Ids
from quire.core.request import ResolvedSampling
from quire.core.step import WorkItem

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The vocabulary, divided by a mask and by the lists of a request."""

    ids: Ids
    excluded_ids: Ids

    @property
    def is_nearly_all(self) -> bool:
        """Whether it is cheaper to exclude tokens from the whole row than to gather the allowed ones."""
        return 8 * len(self.excluded_ids) < len(self.ids)


class TokenLists:
    """The lists of one request's parameters, each converted when first needed."""

    def __init__(self, params: ResolvedSampling, vocabulary_size: int) -> None:
        self.params = params
        self._vocabulary_size = vocabulary_size
        self._last_allowed: tuple[bytes, bool, AllowedTokens] | None = None
        """The last mask and its result: continuations of a request and consecutive steps often have equal masks."""

    def excluded(self, *, is_early: bool) -> Mask | None:
        """Return a mask of excluded tokens, or None if there are none. `is_early`: stop tokens are excluded too."""
        return self._early_mask if is_early and self.params.stop_token_ids else self._permanent_mask

    def allowed(self, mask: bytes, *, is_early: bool) -> AllowedTokens:
        """Return the allowed tokens whose bit is set in the mask: token t is bit t % 8 of byte t // 8."""
        if (last := self._last_allowed) is not None and last[0] == mask and last[1] == is_early:
            return last[2]
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocabulary_size, bitorder="little")
        if (excluded := self.excluded(is_early=is_early)) is not None:
            bits[excluded] = 0
        allowed = AllowedTokens(np.flatnonzero(bits), np.flatnonzero(bits == 0))
        self._last_allowed = mask, is_early, allowed
        return allowed

    @cached_property
    def biases(self) -> tuple[Ids, Doubles]:
        """Biased tokens, possibly with duplicates, and the value to add to each."""
        bias = self.params.logit_bias
        ids = np.fromiter((token_id for token_id, _ in bias), np.int64, len(bias))
        return ids, np.fromiter((value for _, value in bias), np.float64, len(bias))

    @cached_property
    def _permanent_mask(self) -> Mask | None:
        params = self.params
        if params.allowed_token_ids is None and not params.banned_token_ids:
            return None
        mask = np.full(self._vocabulary_size, params.allowed_token_ids is not None)
        mask[_ids(params.allowed_token_ids or ())] = False
        mask[_ids(params.banned_token_ids)] = True
        return mask

    @cached_property
    def _early_mask(self) -> Mask:
        mask = np.zeros(self._vocabulary_size, bool) if self._permanent_mask is None else self._permanent_mask.copy()
        mask[_ids(self.params.stop_token_ids)] = True
        return mask


class TokenCounts:
    """Token counts of a list that grows at its end; each token is counted once, not at every step."""

    def __init__(self) -> None:
        self._counted_tokens: tuple[int, ...] = ()
        self._indices: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("d")

    def counts_of(self, tokens: tuple[int, ...]) -> tuple[Ids, Doubles]:
        """Return the distinct tokens and their counts."""
        if tokens[: len(self._counted_tokens)] != self._counted_tokens:
            self._clear()
        for token_id in tokens[len(self._counted_tokens) :]:
            index = self._indices.setdefault(token_id, len(self._ids))
            if index == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0.0)
            self._counts[index] += 1.0
        self._counted_tokens = tokens
        return np.array(self._ids), np.array(self._counts)

    def _clear(self) -> None:
        self._counted_tokens = ()
        self._indices.clear()
        del self._ids[:], self._counts[:]


class RowLists:
    """Cached data of one sequence: the lists of its request, and the counts of its own tokens."""

    def __init__(self, lists: TokenLists) -> None:
        self.lists = lists
        self.known_counts = TokenCounts()
        self.output_counts = TokenCounts()


class TokenListCache:
    """The lists of the sequences sampled in the last step."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._rows: dict[int, RowLists] = {}

    def lists_of(self, items: Iterable[WorkItem]) -> list[RowLists]:
        """Return the lists of each item that samples, in order, and drop those of all other sequences."""
        # By identity: cached lists refer to their parameters, so no other object can have the same id.
        lists_by_params = {id(row.lists.params): row.lists for row in self._rows.values()}
        rows = {}
        for item in items:
            if item.sampling is None:
                continue
            params = item.sampling.params
            row = self._rows.get(item.sequence_id)
            if row is None or row.lists.params is not params:
                if id(params) not in lists_by_params:
                    lists_by_params[id(params)] = TokenLists(params, self._vocabulary_size)
                row = RowLists(lists_by_params[id(params)])
            rows[item.sequence_id] = row
        self._rows = rows
        return list(rows.values())


def _ids(tokens: tuple[int, ...] | frozenset[int]) -> Ids:
    return np.fromiter(tokens, np.int64, len(tokens))
