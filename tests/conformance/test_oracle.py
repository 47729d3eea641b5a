"""The oracle passes the kit, and a runner with any one fault does not."""

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from quire.backends.conformance import contract as conformance
from quire.backends.conformance.contract import check_all
from quire.backends.conformance.harness import ConformanceError
from quire.backends.oracle import OracleRunner, answer_alone
from quire.backends.protocol import Capacity
from quire.core.request import ResolvedSampling
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.step import NO_MASKS, ROW_FAILED, BlockCopy, Masks, RowError, Sampling, StepPlan, StepResult, WorkItem
from quire.errors import InvariantError
from tests.support.changed import changed
from tests.support.errors import raises_code
from tests.support.servers.server import VOCABULARY, Server


def capacity(block_size: int = 4) -> Capacity:
    return Capacity(48, block_size, 1 << 20, 256, VOCABULARY, 8 * block_size)


@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_the_oracle_keeps_the_contract(block_size: int) -> None:
    assert check_all(lambda: OracleRunner(capacity(block_size))) == [check.__name__ for check in conformance.CHECKS]


class Broken(OracleRunner):
    """An oracle whose plan or result is bent on the way."""

    bend_plan: Callable[[StepPlan], StepPlan] = staticmethod(lambda plan: plan)
    bend_result: Callable[[StepResult], StepResult] = staticmethod(lambda result: result)

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        return type(self).bend_result(super().run(type(self).bend_plan(plan), masks))


def bent(**functions: object) -> type[Broken]:
    return type("Bent", (Broken,), {name: staticmethod(function) for name, function in functions.items()})  # type: ignore[arg-type]


def without_copies(plan: StepPlan) -> StepPlan:
    return changed(plan, copies=())


def with_copies_in_reverse(plan: StepPlan) -> StepPlan:
    return changed(plan, copies=plan.copies[::-1])


def with_blocks_in_order(plan: StepPlan) -> StepPlan:
    return changed(plan, items=tuple(changed(item, block_ids=tuple(sorted(item.block_ids))) for item in plan.items))


def one_position_late(plan: StepPlan) -> StepPlan:
    def late(item: WorkItem) -> WorkItem:
        if item.first_position == 0:
            return item
        return changed(item, first_position=item.first_position - 1, token_ids=(*item.token_ids, item.token_ids[-1]))

    return changed(plan, items=tuple(late(item) for item in plan.items))


def with_the_first_seed(plan: StepPlan) -> StepPlan:
    items = [changed(item, sampling=changed(item.sampling, seed=0)) if item.sampling else item for item in plan.items]
    return changed(plan, items=tuple(items))


def without_known_tokens(plan: StepPlan) -> StepPlan:
    items = [
        changed(item, sampling=changed(item.sampling, sequence_index=0)) if item.sampling else item
        for item in plan.items
    ]
    return changed(plan, items=tuple(items))


def with_constant_logprobs(result: StepResult) -> StepResult:
    shift = len(result.rows)
    rows = {
        key: changed(row, logprobs=tuple(changed(entry, logprob=-1.0 * shift) for entry in row.logprobs))
        for key, row in result.rows.items()
    }
    return changed(result, rows=rows)


def with_any_token(plan: StepPlan) -> StepPlan:
    items = [
        changed(item, sampling=changed(item.sampling, params=replace(item.sampling.params, allowed_token_ids=None)))
        if item.sampling
        else item
        for item in plan.items
    ]
    return changed(plan, items=tuple(items))


def with_another_step(result: StepResult) -> StepResult:
    return changed(result, step=result.step + 1)


def without_a_row(result: StepResult) -> StepResult:
    return changed(result, rows=dict(list(result.rows.items())[1:]))


def with_two_tokens(result: StepResult) -> StepResult:
    return changed(result, rows={key: changed(row, token_ids=row.token_ids * 2) for key, row in result.rows.items()})


def without_logprobs(result: StepResult) -> StepResult:
    return changed(result, rows={key: changed(row, logprobs=()) for key, row in result.rows.items()})


def with_failed_rows(result: StepResult) -> StepResult:
    failed = RowError(ROW_FAILED, "no")
    return changed(result, rows={key: changed(row, error=failed) for key, row in result.rows.items()})


def depending_on_company(result: StepResult) -> StepResult:
    shift = len(result.rows) - 1
    return changed(
        result,
        rows={
            key: changed(row, token_ids=tuple((token + shift) % VOCABULARY for token in row.token_ids))
            for key, row in result.rows.items()
        },
    )


class Greedy(OracleRunner):
    """Reads the whole last block, not just what the sequence has written."""

    def _context(self, item: object, length: int) -> bytes:
        return super()._context(item, -(-length // 4) * 4)  # type: ignore[arg-type]


class Scribbler(OracleRunner):
    """Leaves a mark in a block that is not its own."""

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        self.write_blocks([40], [bytes([plan.step % 256]) * 32])
        return super().run(plan, masks)


class Timid(OracleRunner):
    """Promises more tokens in a step than it can do."""

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        return super().run(changed(plan, items=plan.items[:6]), masks)


def with_one_draw_for_all_positions(plan: StepPlan) -> StepPlan:
    class OneDraw(WorkItem):
        __slots__ = ()

        def samplings(self) -> tuple[Sampling, ...]:
            return (self.sampling,) * (self.num_drafts + 1) if self.sampling else ()

    return changed(plan, items=tuple(OneDraw(*item) for item in plan.items))


def without_drafts(plan: StepPlan) -> StepPlan:
    def known(item: WorkItem) -> WorkItem:
        return changed(item, token_ids=item.token_ids[: len(item.token_ids) - item.num_drafts])

    return changed(plan, items=tuple(known(item) for item in plan.items))


def with_scores_of_what_was_fed(plan: StepPlan) -> StepPlan:
    items = [
        changed(item, scoring=changed(item.scoring, first_position=item.first_position + 1)) if item.scoring else item
        for item in plan.items
    ]
    return changed(plan, items=tuple(items))


def without_hidden_states(result: StepResult) -> StepResult:
    return changed(result, rows={key: changed(row, hidden_states=()) for key, row in result.rows.items()})


def ending_at_stops(plan: StepPlan) -> StepPlan:
    """Feeds no draft after a stop token: where a sequence ends is not the runner's to say."""

    def cut(item: WorkItem) -> WorkItem:
        if item.sampling is None:
            return item
        stops = [at for at, token_id in enumerate(item.drafts) if token_id in item.sampling.params.stop_token_ids]
        num_cut = item.num_drafts - stops[0] if stops else 0
        return changed(item, token_ids=item.token_ids[: len(item.token_ids) - num_cut])

    return changed(plan, items=tuple(cut(item) for item in plan.items))


class Lenient(OracleRunner):
    """Takes any draft for right."""

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        result = super().run(plan, masks)
        drafts = {item.sequence_id: item.drafts for item in plan.items}
        rows = {
            key: changed(row, token_ids=(*drafts[key], row.token_ids[-1])) if drafts[key] and not row.error else row
            for key, row in result.rows.items()
        }
        return changed(result, rows=rows)


class Maskless(OracleRunner):
    """Does not look at masks."""

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        return super().run(plan)


class FirstMask(OracleRunner):
    """Takes the mask of the first position for all."""

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        return super().run(plan, {key: (rows[0],) * len(rows) for key, rows in masks.items()})


class Strict(OracleRunner):
    """A mask that allows nothing fails everybody."""

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        result = super().run(plan, masks)
        error = next((row.error for row in result.rows.values() if row.error), None)
        return changed(result, rows={key: changed(row, error=error) for key, row in result.rows.items()})


class Forgetful(OracleRunner):
    """Takes blocks back without keeping them."""

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        pass


@pytest.mark.parametrize(
    "runner",
    [
        bent(bend_plan=without_copies),
        bent(bend_plan=with_copies_in_reverse),
        bent(bend_plan=with_blocks_in_order),
        bent(bend_plan=one_position_late),
        bent(bend_plan=with_the_first_seed),
        bent(bend_plan=without_known_tokens),
        bent(bend_plan=with_any_token),
        bent(bend_result=with_constant_logprobs),
        bent(bend_result=with_another_step),
        bent(bend_result=without_a_row),
        bent(bend_result=with_two_tokens),
        bent(bend_result=without_logprobs),
        bent(bend_result=with_failed_rows),
        bent(bend_result=depending_on_company),
        Greedy,
        Scribbler,
        Timid,
        Forgetful,
        bent(bend_plan=with_one_draw_for_all_positions),
        bent(bend_plan=without_drafts),
        bent(bend_plan=with_scores_of_what_was_fed),
        bent(bend_plan=ending_at_stops),
        bent(bend_result=without_hidden_states),
        Lenient,
        Maskless,
        FirstMask,
        Strict,
    ],
)
def test_a_runner_with_a_fault_fails_the_kit(runner: type[OracleRunner]) -> None:
    with pytest.raises(ConformanceError):
        check_all(lambda: runner(capacity()))


def test_a_runner_too_small_for_the_kit_is_told_so() -> None:
    with raises_code(ConformanceError, "runner_too_small"):
        check_all(lambda: OracleRunner(capacity(block_size=2)))


def test_a_closed_runner_does_not_run() -> None:
    runner = OracleRunner(capacity())
    runner.close()
    with raises_code(InvariantError, "runner_is_closed"):
        runner.start(StepPlan(1, (BlockCopy(1, 2),), ())).wait()


def test_a_step_over_the_budget_is_refused() -> None:
    server = Server()
    server.ask([1, 2, 3], 1)
    plan = server.plan()
    small = OracleRunner(Capacity(64, 4, 100, 2, VOCABULARY, 32))
    with raises_code(InvariantError, "step_too_large"):
        small.start(plan).wait()


def test_a_block_written_and_read_in_one_step_is_noticed() -> None:
    runner = OracleRunner(capacity())
    server = Server()
    server.ask(range(9), 1)
    item = server.plan().items[0]
    twice = changed(item, sequence_id=2)
    with raises_code(InvariantError, "block_written_twice"):
        runner.start(StepPlan(1, (), (item, twice))).wait()
    reader = changed(item, sequence_id=3, first_position=8, token_ids=(1,), block_ids=(*item.block_ids[:2], 9))
    with raises_code(InvariantError, "invariant_broken"):
        runner.start(StepPlan(1, (), (item, reader))).wait()


def test_a_mask_of_another_size_than_the_plan_and_the_vocabulary_is_a_bug() -> None:
    server = Server(propose=lambda _sequence, _limit: Draft((1, 2)))
    server.ask([1, 2, 3], 5)
    plan = server.plan()
    whole = b"\xff" * 7
    for rows in ((whole,) * 2, (whole, whole, b"\xff" * 6), (whole,) * 4):
        with raises_code(InvariantError, "invariant_broken"):
            server.runner.start(plan).wait({1: rows})
    assert server.runner.start(plan).wait({1: (whole,) * 3}) == server.runner.start(plan).wait()


def test_an_oracle_without_a_choice_says_so() -> None:
    params = ResolvedSampling(max_tokens=3, allowed_token_ids=(7,), banned_token_ids=(7,))
    assert answer_alone([1, 2, 3], params, 1, VOCABULARY) == []


def test_alone_means_alone() -> None:
    params = ResolvedSampling(max_tokens=30, stop_token_ids=frozenset({7}), min_tokens=3)
    server = Server(num_blocks=100)
    server.ask([1, 2, 3], 30, stop_token_ids=frozenset({7}), min_tokens=3)
    server.run()
    assert server.ledger.entries["r1"].tokens[0] == answer_alone([1, 2, 3], params, 1, VOCABULARY)
