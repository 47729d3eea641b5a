"""The conformance tests for runners of models with recurrent layers: the semantics of state slots.

The other conformance tests are for models without recurrent layers, because they continue sequences from blocks alone.
"""

from collections.abc import Callable, Sequence

from quire.backends.conformance.harness import Desk, Job, MakeRunner, job_for, prompt_of, require
from quire.core.memory.state_slots import ZERO_SLOT
from quire.core.step import RowResult, SlotCopy, StepPlan

NUM_TOKENS = 11
CUTS = ([11], [1] * 11, [4, 7], [3, 3, 5], [10, 1])


def check_states(make_runner: MakeRunner) -> list[str]:
    """Run every check and return the names. Raises ConformanceError on failure or with fewer than 4 state slots."""
    for check in CHECKS:
        desk = Desk(make_runner)
        num_slots = desk.capacity.num_slots
        require(num_slots >= 4, f"expected 4 state slots, the runner has {num_slots}", "too_few_state_slots")
        check(desk)
        desk.runner.close()
    return [check.__name__.strip("_") for check in CHECKS]


def _step(
    desk: Desk, tokens: Sequence[int], blocks: Sequence[int], span: tuple[int, int], **moves: object
) -> RowResult:
    """Feed a span of tokens in slot 1; `moves` are slot copies before the item and states to keep after it."""
    job: Job = job_for(1, tokens)
    item = job.item(tokens, blocks, *span)._replace(state_slot=1)
    return desk.run_plan(StepPlan(0, (), (item,))._replace(**moves))[1]  # type: ignore[arg-type]


def _begun() -> dict[str, object]:
    return {"slot_copies": (SlotCopy(ZERO_SLOT, 1),)}


def _alone(desk: Desk, tokens: Sequence[int], blocks: Sequence[int] = (1, 2, 3)) -> RowResult:
    return _step(desk, tokens, blocks, (0, len(tokens)), **_begun())


def _any_cut_gives_the_same_token(desk: Desk) -> None:
    tokens = prompt_of(desk, NUM_TOKENS)
    expected = _alone(desk, tokens)
    for sizes in CUTS:
        first, row, moves = 0, RowResult(), _begun()
        for size in sizes:
            row = _step(desk, tokens, (4, 5, 6), (first, first + size), **moves)
            first, moves = first + size, {}
        require(row.token_ids == expected.token_ids, f"cut as {sizes}: got another token")


def _a_slot_begins_anew_from_slot_zero(desk: Desk) -> None:
    tokens = prompt_of(desk, NUM_TOKENS)
    expected = _alone(desk, tokens)
    _alone(desk, prompt_of(desk, NUM_TOKENS, 1), (7, 8, 9))
    require(_alone(desk, tokens, (4, 5, 6)).token_ids == expected.token_ids, "an old state of the slot is visible")


def _a_state_matters(desk: Desk) -> None:
    """A wrong state must change a token; otherwise a runner that ignores its slots passes all other checks."""
    size, differs = desk.capacity.block_size, False
    for salt in range(8):
        tokens = prompt_of(desk, size + 3, salt)
        expected = _alone(desk, tokens)
        wrong = _step(desk, tokens, (1, 2, 3), (size, len(tokens)), **_begun())
        differs = differs or wrong.token_ids != expected.token_ids
    require(differs, "a wrong state changed none of eight tokens")


def _a_kept_state_is_gone_on_from(desk: Desk) -> None:
    """A state is kept after the items, and copied before the next items."""
    tokens, size = prompt_of(desk, NUM_TOKENS), 4
    expected = _alone(desk, tokens)
    _step(desk, tokens, (4, 5, 6), (0, size), **_begun(), keeps=(SlotCopy(1, 2),))
    _step(desk, tokens, (4, 5, 6), (size, len(tokens)))
    row = _step(desk, tokens, (4, 5, 6), (size, len(tokens)), slot_copies=(SlotCopy(2, 1),))
    require(row.token_ids == expected.token_ids, "the kept state is not the one after its token")


def _copies_are_made_in_their_order(desk: Desk) -> None:
    tokens = prompt_of(desk, NUM_TOKENS)
    expected = _alone(desk, tokens)
    _step(desk, tokens, (4, 5, 6), (0, 5), **_begun(), keeps=(SlotCopy(1, 3),))
    copies = (SlotCopy(3, 2), SlotCopy(ZERO_SLOT, 3), SlotCopy(2, 1))
    row = _step(desk, tokens, (4, 5, 6), (5, len(tokens)), slot_copies=copies)
    require(row.token_ids == expected.token_ids, "a copy ran before the copy that it reads from")


def _rows_of_a_step_have_their_own_states(desk: Desk) -> None:
    prompts = [prompt_of(desk, length, length) for length in (3, 9, 6)]
    tables = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    alone = [_alone(desk, tokens, table).token_ids for tokens, table in zip(prompts, tables, strict=True)]
    items = tuple(
        job_for(at, tokens).item(tokens, tables[at], 0, len(tokens))._replace(state_slot=at + 1)
        for at, tokens in enumerate(prompts)
    )
    copies = tuple(SlotCopy(ZERO_SLOT, at + 1) for at in range(len(prompts)))
    rows = desk.run_plan(StepPlan(0, (), items, copies))
    require([rows[at].token_ids for at in range(len(prompts))] == alone, "in a batch a row has another token")


CHECKS: tuple[Callable[[Desk], None], ...] = (
    _any_cut_gives_the_same_token,
    _a_slot_begins_anew_from_slot_zero,
    _a_state_matters,
    _a_kept_state_is_gone_on_from,
    _copies_are_made_in_their_order,
    _rows_of_a_step_have_their_own_states,
)
