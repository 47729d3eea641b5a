"""Which rows of a step need logits, and the results computed from them.

    rows with logits    those after which a token is chosen, then those that score given tokens

A sequence with drafts is sampled after each draft as if the draft were right. Then the tokens up to the first wrong
draft are accepted, and only while the model's numbers are finite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from quire.backends.acceptance import accepted, masks_of
from quire.backends.host import sampler
from quire.backends.host.batch import Batch
from quire.backends.host.token_lists import RowLists
from quire.core.step import ROW_FAILED, Masks, RowError, RowResult, Sampling, TokenLogprobs, WorkItem

LOGPROB_ROWS = 32
"""Rows whose log-probabilities are computed at once; bounds the memory for any step."""
NOT_FINITE = RowError(ROW_FAILED, "the model's numbers are not finite")


@dataclass(frozen=True, slots=True)
class Computed:
    """The outputs of a forward pass."""

    is_finite: NDArray[np.bool_]
    """[row]: whether the row's numbers are finite. If not, the KV it wrote must not be used."""
    hidden: NDArray[np.float32]
    """[row, hidden size]: for needed rows, the last hidden states (the input of the head)."""
    logits: NDArray[np.float32]
    """[wanted row, vocabulary]: logits of the wanted rows."""
    likeliest: sampler.Likeliest | None = None
    """The argmax of the sampled rows, if known."""


class Wanted:
    """The rows of one step whose logits are needed, in order, and the results computed from the logits."""

    def __init__(self, items: Sequence[WorkItem], batch: Batch) -> None:
        self._items = items
        self._first_rows = batch.first_rows
        self._sampled = [at for at, item in enumerate(items) if item.sampling is not None]
        self._samplings: list[Sampling] = []
        self._starts: list[int] = []
        """For each sampled item, the index of its first sampling."""
        self._num_drafts: dict[int, int] = {}
        """Draft counts of the items that have drafts."""
        rows: list[int] = []
        for at in self._sampled:
            end, samplings = self._first_rows[at] + len(items[at].token_ids), items[at].samplings()
            self._starts.append(len(rows))
            self._samplings += samplings
            rows += range(end - len(samplings), end)
            if len(samplings) > 1:
                self._num_drafts[at] = len(samplings) - 1
        for first_row, item in zip(batch.first_rows, items, strict=True):
            if item.scoring is not None:
                first = first_row + item.scoring.first_position - 1 - item.first_position
                rows += range(first, first + len(item.scoring.token_ids))
        self.rows = np.array(rows, np.int64)
        """Rows that need logits; the first `num_sampled` of them are sampled."""

    def needed_rows(self, num_rows: int) -> NDArray[np.int64] | None:
        """Return the rows whose last hidden states are needed, ascending; None means all `num_rows` rows."""
        if len(self.rows) >= num_rows:
            return None
        hidden_rows = [
            self._first_rows[at] + position - item.first_position
            for at, item in enumerate(self._items)
            for position in item.hidden_positions
        ]
        needed = np.unique(np.concatenate((self.rows, np.array(hidden_rows, np.int64))))
        return needed if len(needed) < num_rows else None

    @property
    def num_sampled(self) -> int:
        return len(self._samplings)

    def results(self, computed: Computed, lists: Sequence[RowLists], masks: Masks) -> dict[int, RowResult]:
        """Return a result for each item. An item with non-finite numbers fails alone."""
        logits, num_sampled = computed.logits, len(self._samplings)
        allowed = self._allowed(masks, logits.shape[1]) if masks else None
        choices = sampler.choose(logits[:num_sampled], self._samplings, self._lists(lists), allowed, computed.likeliest)
        is_finite: list[bool] = computed.is_finite.tolist()
        tokens = self._tokens(choices, is_finite)
        errors = self._errors(choices, is_finite)
        logprobs = self._chosen_logprobs(logits, tokens)
        scores = self._scores(logits[num_sampled:])
        results = {}
        for at, item in enumerate(self._items):
            if at in errors:
                results[item.sequence_id] = RowResult(error=errors[at])
                continue
            hidden = self._hidden_states(computed, at) if item.hidden_positions else ()
            results[item.sequence_id] = RowResult(tokens.get(at, ()), logprobs.get(at, ()), scores.get(at, ()), hidden)
        return results

    def _lists(self, lists: Sequence[RowLists]) -> Sequence[RowLists]:
        if not self._num_drafts:
            return lists
        pairs = zip(self._sampled, lists, strict=True)
        return [one for at, one in pairs for _ in range(self._num_drafts.get(at, 0) + 1)]

    def _allowed(self, masks: Masks, vocabulary_size: int) -> list[bytes | None]:
        return [mask for at in self._sampled for mask in masks_of(masks, self._items[at], vocabulary_size)]

    def _tokens(self, choices: Sequence[sampler.Choice], is_finite: Sequence[bool]) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for at, start in zip(self._sampled, self._starts, strict=True):
            token_id = choices[start].token_id
            if token_id is not None:
                found[at] = (token_id,) if at not in self._num_drafts else self._accepted(at, start, choices, is_finite)
        return found

    def _accepted(
        self, at: int, start: int, choices: Sequence[sampler.Choice], is_finite: Sequence[bool]
    ) -> tuple[int, ...]:
        num_drafts, end = self._num_drafts[at], self._first_rows[at] + len(self._items[at].token_ids)
        chosen: list[int | None] = [one.token_id for one in choices[start : start + num_drafts + 1]]
        for number, is_sound in enumerate(is_finite[end - num_drafts : end], 1):
            if not is_sound:
                chosen[number] = None  # the token after a draft with invalid numbers is unknown
        return accepted(self._items[at].drafts, chosen)

    def _errors(self, choices: Sequence[sampler.Choice], is_finite: Sequence[bool]) -> dict[int, RowError]:
        errors = {
            at: error
            for at, start in zip(self._sampled, self._starts, strict=True)
            if (error := choices[start].error) is not None
        }
        if all(is_finite):
            return errors
        for at, (first, item) in enumerate(zip(self._first_rows, self._items, strict=True)):
            if not all(is_finite[first : first + len(item.token_ids) - self._num_drafts.get(at, 0)]):
                errors[at] = NOT_FINITE
        return errors

    def _chosen_logprobs(
        self, logits: NDArray[np.float32], found: Mapping[int, tuple[int, ...]]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        rows: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        places: list[int] = []
        for at, start in zip(self._sampled, self._starts, strict=True):
            wanted = self._samplings[start].params.logprobs
            if wanted is not None and at in found:
                places.append(at)
                rows += range(start, start + len(found[at]))
                tokens += found[at]
                counts += [wanted] * len(found[at])
        entries = iter(_logprobs(lambda part: logits[rows[part]], tokens, counts))
        return {at: tuple(islice(entries, len(found[at]))) for at in places}

    def _scores(self, logits: NDArray[np.float32]) -> dict[int, tuple[TokenLogprobs, ...]]:
        scorings = [(at, one) for at, item in enumerate(self._items) if (one := item.scoring) is not None]
        targets = [token_id for _, one in scorings for token_id in one.token_ids]
        counts = [one.num_alternatives for _, one in scorings for _ in one.token_ids]
        entries = iter(_logprobs(lambda part: logits[part], targets, counts))
        return {at: tuple(islice(entries, len(one.token_ids))) for at, one in scorings}

    def _hidden_states(self, computed: Computed, at: int) -> tuple[bytes, ...]:
        item = self._items[at]
        rows = [self._first_rows[at] + position - item.first_position for position in item.hidden_positions]
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
