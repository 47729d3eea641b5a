"""Forced tokens: known without having been sampled, told like any other, computed as a chunk, paid once."""

from collections.abc import Callable

import pytest

from quire.core.events import SequenceFinished, Token
from quire.core.request import FinishReason
from quire.core.scheduling.policy import reduce_to_budget
from quire.core.scheduling.sequence import FEW_TOKENS
from quire.core.step import RowResult, StepPlan, StepResult
from quire.errors import InvariantError
from tests.support.changed import changed
from tests.support.errors import raises_code
from tests.support.servers.server import Server

Force = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Tokens that a row chose -> what must follow them."""


def forcing(server: Server, force: Force) -> StepPlan:
    """One step, in which every row that samples is forced to go on."""
    plan = server.plan()
    result = server.runner.start(plan).wait()
    rows = {
        name: changed(row, forced=force(row.token_ids) if row.token_ids else ()) for name, row in result.rows.items()
    }
    server.log += server.scheduler.apply(StepResult(plan.step, rows), server.now_s)
    return plan


def finish(server: Server) -> None:
    """Until all answers are there, with nothing forced any more."""
    while server.scheduler.live:
        forcing(server, lambda _: ())
        server.check()


def said(server: Server) -> list[int]:
    return [event.token_id for event in server.log if isinstance(event, Token)]


def test_what_is_forced_is_told_at_once_and_computed_with_the_next_step() -> None:
    server = Server(num_blocks=50)
    server.ask(range(1, 6), 20)
    forcing(server, lambda _: (7, 8, 9))
    first = said(server)
    assert first[1:] == [7, 8, 9]
    (item,) = server.plan().items
    assert (item.token_ids, item.first_position) == (tuple(first), 5)
    assert item.sampling is not None
    assert item.sampling.position == 9
    assert server.scheduler.stats.num_forced_tokens == 3


def test_an_answer_is_what_the_model_says_after_all_that_was_forced() -> None:
    forced, restored = Server(num_blocks=50), Server(num_blocks=50)
    forced.ask(range(1, 6), 9)
    forcing(forced, lambda _: (7, 8))
    finish(forced)
    restored.ask(range(1, 6), 9, produced=[said(forced)[:3]])
    finish(restored)
    assert said(forced)[3:] == said(restored)
    assert len(said(restored)) == 6


@pytest.mark.parametrize(
    ("max_tokens", "stops", "expected"),
    [(2, (), (2, FinishReason.LENGTH)), (20, (8,), (3, FinishReason.STOP)), (20, (), (4, None))],
)
def test_what_is_forced_ends_where_an_answer_ends(
    max_tokens: int, stops: tuple[int, ...], expected: tuple[int, FinishReason | None]
) -> None:
    server = Server(num_blocks=50)
    server.ask(range(1, 6), max_tokens, stop_token_ids=frozenset(stops), banned_token_ids=(8,))
    forcing(server, lambda _: (7, 8, 9))
    ends = [event.reason for event in server.log if isinstance(event, SequenceFinished)]
    assert (len(said(server)), ends[0] if ends else None) == expected


def test_who_was_forced_is_served_before_all_chunks() -> None:
    server = Server(num_blocks=200, max_step_tokens=24)
    server.ask(range(1, 6), 40)
    forcing(server, lambda _: tuple(range(FEW_TOKENS - 1)))
    server.ask(range(100), 5)
    first, second = server.plan().items
    assert (len(first.token_ids), len(second.token_ids)) == (FEW_TOKENS, 24 - FEW_TOKENS)


def test_who_was_forced_far_waits_for_its_turn_like_a_prompt() -> None:
    server = Server(num_blocks=200, max_step_tokens=24)
    server.ask(range(1, 6), 40)
    forcing(server, lambda _: tuple(range(FEW_TOKENS)))
    server.ask([3], 5)
    plan = server.plan()
    assert sorted(len(item.token_ids) for item in plan.items) == [1, FEW_TOKENS + 1]


def test_tokens_that_nobody_chose_before_cannot_be_forced() -> None:
    server = Server(num_blocks=200, max_step_tokens=24)
    server.ask(range(60), 5)
    plan = server.plan()
    with raises_code(InvariantError, "invariant_broken"):
        server.scheduler.apply(StepResult(plan.step, {1: RowResult(forced=(1,))}), 0.0)


@pytest.mark.parametrize(
    ("counts", "budget", "expected"),
    [
        ([1, 1, 1], 3, [1, 1, 1]),
        ([5, 0, 5], 20, [5, 0, 5]),
        ([5, 0, 5], 8, [5, 0, 3]),
        ([5, 0, 5, 1], 4, [2, 0, 1, 1]),
        ([], 0, []),
    ],
)
def test_the_last_give_way_first_and_nobody_gets_nothing(counts: list[int], budget: int, expected: list[int]) -> None:
    assert reduce_to_budget(list(counts), budget) == expected
