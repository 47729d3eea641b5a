"""A plan in, a result out: copies, one forward pass over all rows, a token for each row that asked for one.

Holds the KV data between steps, and lists of tokens made ready for sampling (`token_lists`), which change no result.
Which blocks, which tokens, in which order: the plan says.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import torch

from quire.backends.protocol import Capacity, PendingStep
from quire.backends.torch import sampler
from quire.backends.torch.inputs import Batch, BatchMaker
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.models.model import Computed, Model
from quire.backends.torch.token_lists import KeptLists, RowLists
from quire.core.step import RowResult, StepPlan, StepResult, TokenLogprobs, WorkItem
from quire.errors import InvariantError

LOGPROB_ROWS = 32
"""Rows whose log-probabilities are taken at once: bounds the memory, whatever the step."""
NOT_FINITE = "the model's numbers are not finite"


class TorchRunner:
    """Runs one model over one store of blocks."""

    def __init__(self, model: Model, store: KVStore, capacity: Capacity) -> None:
        self._model: Model | None = model
        self._store: KVStore | None = store
        self._capacity = capacity
        self._maker = BatchMaker(capacity.block_size, model.padded, store.keys[0].device)
        self._lists = KeptLists(capacity.vocabulary_size)

    @property
    def capacity(self) -> Capacity:
        """Fixed at load."""
        return self._capacity

    def start(self, plan: StepPlan) -> PendingStep:
        """Computed when it is waited for: on a CPU nothing runs beside it anyway."""
        return _TorchStep(self, plan)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """In the layout `kv_store` documents."""
        return self._opened()[1].read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back."""
        self._opened()[1].write_blocks(block_ids, data)

    def close(self) -> None:
        """Give model and blocks back."""
        self._model = self._store = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copies first, then every row at once."""
        model, store = self._opened()
        num_tokens = sum(len(item.token_ids) for item in plan.items)
        if num_tokens > self._capacity.max_step_tokens:
            raise InvariantError(f"a step may feed {self._capacity.max_step_tokens} tokens, {num_tokens} given")
        store.copy(plan.copies)
        if not plan.items:
            return StepResult(plan.step, {})
        batch = self._maker.make(plan.items)
        wanted = _Wanted(plan.items, batch)
        computed = model.compute(batch, store, wanted.rows)
        return StepResult(plan.step, wanted.results(computed, self._lists.of(plan.items)))

    def _opened(self) -> tuple[Model, KVStore]:
        if self._model is None or self._store is None:
            raise InvariantError("the runner is closed")
        return self._model, self._store


class _TorchStep:
    def __init__(self, runner: TorchRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def wait(self) -> StepResult:
        return self._runner.run(self._plan)


class _Wanted:
    """Which rows' logits a step needs, and what becomes of them: sampled rows first, then those of prompt tokens."""

    def __init__(self, items: Sequence[WorkItem], batch: Batch) -> None:
        self._items = items
        self._first_rows = batch.first_rows
        self._sampled = [at for at, item in enumerate(items) if item.sampling is not None]
        self._prompted = [at for at, item in enumerate(items) if item.prompt_targets]
        rows = [batch.first_rows[at] + len(items[at].token_ids) - 1 for at in self._sampled]
        rows += [batch.first_rows[at] + i for at in self._prompted for i in range(len(items[at].prompt_targets))]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=batch.tokens.device)

    def results(self, computed: Computed, lists: Sequence[RowLists]) -> dict[int, RowResult]:
        """A result for each item. One whose numbers are not finite fails alone."""
        logits = computed.logits.cpu()
        is_finite = self._finite_items(computed.is_finite.tolist())
        samplings = [sampling for item in self._items if (sampling := item.sampling) is not None]
        chosen = sampler.choose(logits[: len(samplings)], samplings, lists)
        choices = dict(zip(self._sampled, chosen, strict=True))
        logprobs = self._chosen_logprobs(logits, choices)
        prompt_logprobs = self._prompt_logprobs(logits[len(samplings) :])
        results = {}
        for at, item in enumerate(self._items):
            choice = choices.get(at, sampler.Choice(None))
            error = choice.error if is_finite[at] else NOT_FINITE
            if error is not None:
                results[item.sequence_id] = RowResult(error=error)
                continue
            tokens = () if choice.token_id is None else (choice.token_id,)
            results[item.sequence_id] = RowResult(tokens, logprobs.get(at, ()), prompt_logprobs.get(at, ()))
        return results

    def _finite_items(self, is_finite: Sequence[bool]) -> list[bool]:
        spans = zip(self._first_rows, self._items, strict=True)
        return [all(is_finite[first : first + len(item.token_ids)]) for first, item in spans]

    def _chosen_logprobs(
        self, logits: torch.Tensor, choices: dict[int, sampler.Choice]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        places, rows, tokens, counts = [], [], [], []
        for row, at in enumerate(self._sampled):
            sampling, token_id = self._items[at].sampling, choices[at].token_id
            if sampling is not None and sampling.params.logprobs is not None and token_id is not None:
                places.append(at)
                rows.append(row)
                tokens.append(token_id)
                counts.append(sampling.params.logprobs)
        entries = _logprobs(lambda part: logits[rows[part]], tokens, counts)
        return {at: (entry,) for at, entry in zip(places, entries, strict=True)}

    def _prompt_logprobs(self, logits: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        items = [self._items[at] for at in self._prompted]
        targets = [token_id for item in items for token_id in item.prompt_targets]
        counts = [item.num_prompt_alternatives for item in items for _ in item.prompt_targets]
        entries = iter(_logprobs(lambda part: logits[part], targets, counts))
        return {at: tuple(islice(entries, len(self._items[at].prompt_targets))) for at in self._prompted}


def _logprobs(
    logits_of: Callable[[slice], torch.Tensor], token_ids: Sequence[int], num_alternatives: Sequence[int]
) -> list[TokenLogprobs]:
    """Of all rows, so many at once as the memory for them allows."""
    parts = [slice(first, first + LOGPROB_ROWS) for first in range(0, len(token_ids), LOGPROB_ROWS)]
    return [
        entry
        for part in parts
        for entry in sampler.logprobs_of(logits_of(part), token_ids[part], num_alternatives[part])
    ]
