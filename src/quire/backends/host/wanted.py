"""The rows of a step whose outputs are requested, and the results computed from these outputs.

    rows with logits    first rows after which a token is sampled, then rows that score known tokens

A sequence with drafts is sampled after each draft as if the draft were right. Tokens are then accepted up to the first
wrong draft, and only while the model's numbers are finite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from quire.backends.acceptance import accepted_tokens, masks_of
from quire.backends.host import sampler
from quire.backends.host.batch import Batch
from quire.backends.host.token_lists import RowLists
from quire.core.step import ROW_FAILED, Masks, RowError, RowResult, Sampling, TokenLogprobs, WorkItem

LOGPROB_ROWS = 32
"""Rows whose log-probabilities are computed at once; bounds the memory for any step."""
NOT_FINITE = RowError(ROW_FAILED, "the model's numbers are not finite")


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """The outputs of a forward pass."""

    is_finite: NDArray[np.bool_]
    """[row]: whether the row's numbers are finite. If not, the KV that the row wrote must not be used."""
    hidden: NDArray[np.float32]
    """[row, hidden size]: the last hidden states (input of the head); valid for the rows of `needed_rows`."""
    logits: NDArray[np.float32]
    """[requested row, vocabulary]: the logits of `RequestedRows.rows`."""
    likeliest: sampler.Likeliest | None = None
    """The argmax of the sampled rows, if known."""


class RequestedRows:
    """The rows of one step whose logits are requested, in order; also computes the results of the step's items."""

    def __init__(self, items: Sequence[WorkItem], batch: Batch) -> None:
        self._items = items
        self._first_rows = batch.first_rows
        self._sampled_items = [index for index, item in enumerate(items) if item.sampling is not None]
        self._samplings: list[Sampling] = []
        self._starts: list[int] = []
        """For each of `_sampled_items`, the index of its first row in `rows`."""
        self._num_drafts: dict[int, int] = {}
        """Item index -> number of drafts, for items with drafts."""
        rows: list[int] = []
        for index in self._sampled_items:
            end, samplings = self._first_rows[index] + len(items[index].token_ids), items[index].samplings()
            self._starts.append(len(rows))
            self._samplings += samplings
            rows += range(end - len(samplings), end)
            if len(samplings) > 1:
                self._num_drafts[index] = len(samplings) - 1
        for first_row, item in zip(batch.first_rows, items, strict=True):
            if item.scoring is not None:
                first = first_row + item.scoring.first_position - 1 - item.first_position
                rows += range(first, first + len(item.scoring.token_ids))
        self.rows = np.array(rows, np.int64)
        """Rows whose logits are requested; the first `num_sampled` of them are sampled."""

    def needed_rows(self, num_rows: int) -> NDArray[np.int64] | None:
        """Return the rows whose last hidden states are needed, ascending; None means all `num_rows` rows."""
        if len(self.rows) >= num_rows:
            return None
        hidden_rows = [
            self._first_rows[index] + position - item.first_position
            for index, item in enumerate(self._items)
            for position in item.hidden_positions
        ]
        row_indices = np.unique(np.concatenate((self.rows, np.array(hidden_rows, np.int64))))
        return row_indices if len(row_indices) < num_rows else None

    @property
    def num_sampled(self) -> int:
        return len(self._samplings)

    def results(self, computed: PassOutputs, lists: Sequence[RowLists], masks: Masks) -> dict[int, RowResult]:
        """Return a result for each item. An item with non-finite numbers fails alone."""
        logits, num_sampled = computed.logits, len(self._samplings)
        row_lists, row_masks = self._row_lists(lists), self._row_masks(masks, logits.shape[1]) if masks else None
        choices = sampler.choose(logits[:num_sampled], self._samplings, row_lists, row_masks, computed.likeliest)
        is_finite: list[bool] = computed.is_finite.tolist()
        tokens = self._tokens(choices, is_finite)
        errors = self._errors(choices, is_finite)
        logprobs = self._chosen_logprobs(logits, tokens)
        scores = self._scores(logits[num_sampled:])
        results = {}
        for i, item in enumerate(self._items):
            if i in errors:
                results[item.sequence_id] = RowResult(error=errors[i])
                continue
            hidden = self._hidden_states(computed, i) if item.hidden_positions else ()
            results[item.sequence_id] = RowResult(tokens.get(i, ()), logprobs.get(i, ()), scores.get(i, ()), hidden)
        return results

    def _row_lists(self, lists: Sequence[RowLists]) -> Sequence[RowLists]:
        if not self._num_drafts:
            return lists
        pairs = zip(self._sampled_items, lists, strict=True)
        return [row_lists for index, row_lists in pairs for _ in range(self._num_drafts.get(index, 0) + 1)]

    def _row_masks(self, masks: Masks, vocabulary_size: int) -> list[bytes | None]:
        return [mask for index in self._sampled_items for mask in masks_of(masks, self._items[index], vocabulary_size)]

    def _tokens(self, choices: Sequence[sampler.Choice], is_finite: Sequence[bool]) -> dict[int, tuple[int, ...]]:
        tokens: dict[int, tuple[int, ...]] = {}
        for i, start in zip(self._sampled_items, self._starts, strict=True):
            token_id = choices[start].token_id
            if token_id is not None:
                tokens[i] = (token_id,) if i not in self._num_drafts else self._accept(i, start, choices, is_finite)
        return tokens

    def _accept(
        self, index: int, start: int, choices: Sequence[sampler.Choice], is_finite: Sequence[bool]
    ) -> tuple[int, ...]:
        num_drafts, end = self._num_drafts[index], self._first_rows[index] + len(self._items[index].token_ids)
        token_ids: list[int | None] = [choice.token_id for choice in choices[start : start + num_drafts + 1]]
        for number, draft_is_finite in enumerate(is_finite[end - num_drafts : end], 1):
            if not draft_is_finite:
                token_ids[number] = None  # no token can follow a draft whose numbers are not finite
        return accepted_tokens(self._items[index].drafts, token_ids)

    def _errors(self, choices: Sequence[sampler.Choice], is_finite: Sequence[bool]) -> dict[int, RowError]:
        errors = {
            index: error
            for index, start in zip(self._sampled_items, self._starts, strict=True)
            if (error := choices[start].error) is not None
        }
        if all(is_finite):
            return errors
        for index, (first, item) in enumerate(zip(self._first_rows, self._items, strict=True)):
            if not all(is_finite[first : first + len(item.token_ids) - self._num_drafts.get(index, 0)]):
                errors[index] = NOT_FINITE
        return errors

    def _chosen_logprobs(
        self, logits: NDArray[np.float32], tokens_by_item: Mapping[int, tuple[int, ...]]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        rows: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        indices: list[int] = []
        for index, start in zip(self._sampled_items, self._starts, strict=True):
            num_alternatives = self._samplings[start].params.logprobs
            if num_alternatives is not None and index in tokens_by_item:
                indices.append(index)
                rows += range(start, start + len(tokens_by_item[index]))
                tokens += tokens_by_item[index]
                counts += [num_alternatives] * len(tokens_by_item[index])
        logprobs = iter(_logprobs(lambda part: logits[rows[part]], tokens, counts))
        return {index: tuple(islice(logprobs, len(tokens_by_item[index]))) for index in indices}

    def _scores(self, logits: NDArray[np.float32]) -> dict[int, tuple[TokenLogprobs, ...]]:
        scorings = [(index, scoring) for index, item in enumerate(self._items) if (scoring := item.scoring) is not None]
        targets = [token_id for _, scoring in scorings for token_id in scoring.token_ids]
        counts = [scoring.num_alternatives for _, scoring in scorings for _ in scoring.token_ids]
        logprobs = iter(_logprobs(lambda part: logits[part], targets, counts))
        return {index: tuple(islice(logprobs, len(scoring.token_ids))) for index, scoring in scorings}

    def _hidden_states(self, computed: PassOutputs, index: int) -> tuple[bytes, ...]:
        item = self._items[index]
        rows = [self._first_rows[index] + position - item.first_position for position in item.hidden_positions]
        return tuple(state.tobytes() for state in computed.hidden[rows].astype("<f4", copy=False))


def _logprobs(
    logits_of: Callable[[slice], NDArray[np.float32]], token_ids: Sequence[int], num_alternatives: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of all rows, computed LOGPROB_ROWS at a time."""
    parts = [slice(first, first + LOGPROB_ROWS) for first in range(0, len(token_ids), LOGPROB_ROWS)]
    return [
        entry
        for part in parts
        for entry in sampler.logprobs_of(logits_of(part), token_ids[part], num_alternatives[part])
    ]
