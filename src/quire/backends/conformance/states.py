"""The conformance tests for runners of models with recurrent layers: the semantics of state slots.

`contract` tests models without recurrent layers only: its checks resume sequences from KV blocks, without a state.
"""

from collections.abc import Callable, Sequence

from quire.backends.conformance.harness import Job, MakeRunner, StubCore, job_for, prompt_of, require
from quire.core.memory.state_slots import ZERO_SLOT
from quire.core.step import RowResult, SlotCopy, StepPlan

NUM_TOKENS = 11
CHUNK_SIZES = ([11], [1] * 11, [4, 7], [3, 3, 5], [10, 1])


def check_states(make_runner: MakeRunner) -> list[str]:
    """Run every check and return the names. Raises ConformanceError on failure or with fewer than 4 state slots."""
    for check in CHECKS:
        core = StubCore(make_runner)
        num_slots = core.capacity.num_slots
        require(num_slots >= 4, f"expected at least 4 state slots, got {num_slots}", "too_few_state_slots")
        check(core)
        core.runner.close()
    return [check.__name__.strip("_") for check in CHECKS]


def _step(
    core: StubCore, tokens: Sequence[int], blocks: Sequence[int], span: tuple[int, int], **copies: object
) -> RowResult:
    """Feed tokens[first:end] in slot 1; `copies` are the plan's `slot_copies` (before) and `cache_copies` (after)."""
    job: Job = job_for(1, tokens)
    item = job.item(tokens, blocks, *span)._replace(state_slot=1)
    return core.run_plan(StepPlan(0, (), (item,))._replace(**copies))[1]  # type: ignore[arg-type]


def _reset_slot() -> dict[str, object]:
    return {"slot_copies": (SlotCopy(ZERO_SLOT, 1),)}


def _run_in_one_step(core: StubCore, tokens: Sequence[int], blocks: Sequence[int] = (1, 2, 3)) -> RowResult:
    return _step(core, tokens, blocks, (0, len(tokens)), **_reset_slot())


def _chunk_sizes_do_not_change_the_token(core: StubCore) -> None:
    tokens = prompt_of(core, NUM_TOKENS)
    expected = _run_in_one_step(core, tokens)
    for sizes in CHUNK_SIZES:
        first, row, copies = 0, RowResult(), _reset_slot()
        for size in sizes:
            row = _step(core, tokens, (4, 5, 6), (first, first + size), **copies)
            first, copies = first + size, {}
        require(row.token_ids == expected.token_ids, f"chunks {sizes}: expected {expected}, got {row}")


def _copying_slot_zero_resets_a_slot(core: StubCore) -> None:
    tokens = prompt_of(core, NUM_TOKENS)
    expected = _run_in_one_step(core, tokens)
    _run_in_one_step(core, prompt_of(core, NUM_TOKENS, 1), (7, 8, 9))
    require(_run_in_one_step(core, tokens, (4, 5, 6)).token_ids == expected.token_ids, "the slot was not reset")


def _the_state_affects_tokens(core: StubCore) -> None:
    """A wrong state must change a token; otherwise a runner that ignores its slots passes all other checks."""
    size, has_effect = core.capacity.block_size, False
    for salt in range(8):
        tokens = prompt_of(core, size + 3, salt)
        expected = _run_in_one_step(core, tokens)
        wrong = _step(core, tokens, (1, 2, 3), (size, len(tokens)), **_reset_slot())
        has_effect = has_effect or wrong.token_ids != expected.token_ids
    require(has_effect, "expected a wrong state to change one of eight tokens, got none changed")


def _a_sequence_resumes_from_a_kept_state(core: StubCore) -> None:
    """A step caches (copies) a state after its items; a later step copies it back before its items."""
    tokens, size = prompt_of(core, NUM_TOKENS), 4
    expected = _run_in_one_step(core, tokens)
    _step(core, tokens, (4, 5, 6), (0, size), **_reset_slot(), cache_copies=(SlotCopy(1, 2),))
    _step(core, tokens, (4, 5, 6), (size, len(tokens)))
    row = _step(core, tokens, (4, 5, 6), (size, len(tokens)), slot_copies=(SlotCopy(2, 1),))
    require(row.token_ids == expected.token_ids, "expected the kept state to be that after the last token of its step")


def _slot_copies_run_in_order(core: StubCore) -> None:
    tokens = prompt_of(core, NUM_TOKENS)
    expected = _run_in_one_step(core, tokens)
    _step(core, tokens, (4, 5, 6), (0, 5), **_reset_slot(), cache_copies=(SlotCopy(1, 3),))
    copies = (SlotCopy(3, 2), SlotCopy(ZERO_SLOT, 3), SlotCopy(2, 1))
    row = _step(core, tokens, (4, 5, 6), (5, len(tokens)), slot_copies=copies)
    require(row.token_ids == expected.token_ids, "expected slot copies in the order of the plan")


def _rows_of_a_step_have_separate_states(core: StubCore) -> None:
    prompts = [prompt_of(core, length, length) for length in (3, 9, 6)]
    tables = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    alone = [_run_in_one_step(core, tokens, table).token_ids for tokens, table in zip(prompts, tables, strict=True)]
    items = tuple(
        job_for(row, tokens).item(tokens, tables[row], 0, len(tokens))._replace(state_slot=row + 1)
        for row, tokens in enumerate(prompts)
    )
    copies = tuple(SlotCopy(ZERO_SLOT, row + 1) for row in range(len(prompts)))
    rows = core.run_plan(StepPlan(0, (), items, copies))
    require([rows[row].token_ids for row in range(len(prompts))] == alone, f"expected {alone} as alone, got {rows}")


CHECKS: tuple[Callable[[StubCore], None], ...] = (
    _chunk_sizes_do_not_change_the_token,
    _copying_slot_zero_resets_a_slot,
    _the_state_affects_tokens,
    _a_sequence_resumes_from_a_kept_state,
    _slot_copies_run_in_order,
    _rows_of_a_step_have_separate_states,
)
