"""Drafts: guesses change no answer, end where the answer ends, and take nothing from anybody."""

import pytest

from quire.backends.oracle import answer_alone
from quire.core.drafts import Propose
from quire.core.events import SequenceFinished, Token
from quire.core.request import FinishReason, ResolvedSampling, Sequence
from quire.core.step import RowResult, StepResult
from quire.errors import InvariantError
from quire.sim.guesses import Guesser
from tests.support.server import VOCABULARY, Server


def right(sequence: Sequence, limit: int) -> tuple[int, ...]:
    """All that follows, and zeros beyond the end."""
    request, said = sequence.request, sequence.num_output_tokens
    answer = answer_alone(request.prompt, request.params, request.seed, VOCABULARY, sequence.index)
    return (*answer[said : said + limit], *(0,) * limit)[:limit]


def wrong(sequence: Sequence, limit: int) -> tuple[int, ...]:
    return tuple((token_id + 1) % VOCABULARY for token_id in right(sequence, limit))


def up_to(count: int, propose: Propose) -> Propose:
    return lambda sequence, limit: propose(sequence, min(count, limit))


def tokens_of(server: Server) -> list[tuple[object, ...]]:
    """What was said, but not when."""
    events = [event for event in server.log if isinstance(event, Token)]
    return sorted((event.request_id, event.sequence_index, event.num_output_tokens, event.token_id, event.logprobs)
                  for event in events)  # fmt: skip


@pytest.mark.parametrize("propose", [right, wrong, Guesser(3, VOCABULARY, 0.6, 5)])
def test_an_answer_is_the_same_with_and_without_guesses(propose: Propose) -> None:
    servers = Server(num_blocks=200, propose=propose), Server(num_blocks=200)
    for server in servers:
        server.ask(range(1, 12), 20, logprobs=1)
        server.ask([3, 4], 9, frequency_penalty=0.5, n=2)
        server.run()
    assert tokens_of(servers[0]) == tokens_of(servers[1])


def test_right_guesses_save_steps() -> None:
    server = Server(num_blocks=200, propose=up_to(3, right))
    server.ask(range(1, 12), 20)
    server.run()
    assert [len(plan.items[0].drafts) for plan in server.plans] == [3] * 5
    stats = server.scheduler.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_output_tokens) == (15, 15, 20)
    assert stats.num_computed_tokens == 11 + 19


def test_tokens_of_one_step_are_told_one_by_one() -> None:
    server = Server(num_blocks=200, propose=up_to(3, right))
    server.ask(range(1, 12), 20)
    server.step()
    told = [event for event in server.log if isinstance(event, Token)]
    assert [event.num_output_tokens for event in told] == [1, 2, 3, 4]
    assert len(server.plans) == 1


def test_wrong_guesses_cost_no_step_and_hold_no_block() -> None:
    guessing, plain = Server(propose=up_to(9, wrong)), Server()
    for server in (guessing, plain):
        server.ask(range(1, 12), 20)
    while plain.scheduler.live:
        for server in (guessing, plain):
            server.step()
        assert guessing.memory.num_free_blocks == plain.memory.num_free_blocks
    assert not guessing.scheduler.live
    stats = guessing.scheduler.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens == 0
    assert stats.num_computed_tokens == plain.scheduler.stats.num_computed_tokens


def test_blocks_are_taken_for_guesses_and_given_back_if_they_were_wrong() -> None:
    server = Server(num_blocks=8, propose=up_to(9, wrong))
    server.ask(range(3), 12)
    plan = server.plan()
    assert (len(plan.items[0].block_ids), server.memory.num_free_blocks) == (3, 5)
    server.finish(plan)
    assert server.memory.num_free_blocks == 7
    server.run()


def test_a_block_with_a_wrong_guess_in_it_is_never_found() -> None:
    server = Server(propose=up_to(9, wrong))
    server.ask(range(3), 6)
    (item,) = server.step().items
    guessed = [*item.token_ids, 1, 1, 1, 1]
    assert server.memory.divergence(server.scheduler.live["r1"].request.namespace, guessed).num_cached_tokens == 0
    server.run()


def test_a_stop_among_several_tokens_ends_the_answer_there() -> None:
    params = ResolvedSampling(max_tokens=40, min_tokens=3, stop_token_ids=frozenset(range(0, 50, 9)))
    answer = answer_alone(range(1, 12), params, 1, VOCABULARY)
    server = Server(num_blocks=200, propose=right)
    server.ask(range(1, 12), 40, min_tokens=3, stop_token_ids=params.stop_token_ids)
    (item,) = server.step().items
    assert 3 < len(answer) < len(item.drafts), "the test wants a stop in the middle"
    assert [token_id for _, _, _, token_id, _ in tokens_of(server)] == answer
    (end,) = (event for event in server.log if isinstance(event, SequenceFinished))
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOP, len(answer))
    assert not server.scheduler.live
    assert server.scheduler.queue.tenants["default"].service == 11 + 4 * len(answer), "what was dropped costs nothing"


@pytest.mark.parametrize(
    ("max_tokens", "settings", "expected"),
    [
        (1, {}, 0),  # one token is chosen anyway
        (3, {}, 2),
        (40, {"max_sequence_tokens": 16}, 4),
        (40, {"max_step_tokens": 12}, 1),
        (0, {}, 0),
    ],
)
def test_nothing_is_guessed_beyond_what_may_come(max_tokens: int, settings: dict[str, object], expected: int) -> None:
    server = Server(**{"num_blocks": 200, "propose": wrong, **settings})  # type: ignore[arg-type]
    server.ask(range(1, 12), max_tokens)
    (item,) = server.step().items
    assert len(item.token_ids) == 11 + expected


def test_guesses_get_what_a_step_has_left() -> None:
    server = Server(propose=wrong, max_step_tokens=20)
    server.ask(range(1, 5), 40)
    server.ask(range(7, 17), 40)
    plan = server.step()
    assert [(item.num_true_tokens(1), item.num_drafts) for item in plan.items] == [(4, 6), (10, 0)]
    assert [item.num_drafts for item in server.step().items] == [18, 0]
    server.run()


def test_guesses_wait_for_prompts_that_are_not_computed() -> None:
    server = Server(num_blocks=200, propose=wrong, max_step_tokens=20)
    server.ask(range(1, 5), 8)
    server.step()
    server.ask(range(100, 150), 1)
    plan = server.step()
    assert [(item.num_drafts, len(item.token_ids)) for item in plan.items] == [(0, 1), (0, 16)]
    server.run()


@pytest.mark.parametrize(("num_blocks", "count", "expected"), [(8, 9, 9), (7, 9, 0), (6, 1, 1), (6, 2, 0)])
def test_guesses_take_no_block_that_somebody_needs(num_blocks: int, count: int, expected: int) -> None:
    server = Server(num_blocks=num_blocks, propose=up_to(count, wrong))
    server.ask(range(3), 10)
    server.ask(range(20, 37), 1)
    plan = server.step()
    assert [item.num_drafts for item in plan.items] == [expected, 0]
    assert len(plan.items[1].token_ids) == 17
    server.run()


def test_guesses_of_one_leave_less_for_those_of_another() -> None:
    server = Server(num_blocks=8, propose=up_to(9, wrong))
    server.ask(range(3), 10)
    server.ask(range(10, 13), 10)
    server.ask(range(20, 33), 1)
    assert [(item.num_true_tokens(1), item.num_drafts) for item in server.step().items] == [(3, 9), (3, 0), (13, 0)]
    server.run()


def test_a_proposer_that_says_too_much_is_cut_short() -> None:
    server = Server(propose=lambda _sequence, _limit: (1,) * 99)
    server.ask(range(1, 12), 6)
    assert server.step().items[0].num_drafts == 5
    server.run()


def test_a_leader_guesses_nothing_before_its_siblings_branch_off() -> None:
    server = Server(propose=right)
    server.ask(range(1, 12), 6, n=2)
    assert server.step().items[0].num_drafts == 0
    server.run()


@pytest.mark.parametrize("wrong_tokens", [(), (1, 2, 3, 4), (9, 2), (1, 9, 3)])
def test_a_result_that_its_drafts_do_not_explain_is_a_bug(wrong_tokens: tuple[int, ...]) -> None:
    server = Server(propose=lambda _sequence, _limit: (1, 2))
    server.ask(range(1, 12), 6)
    plan = server.plan()
    with pytest.raises(InvariantError, match=rf"got {len(wrong_tokens)} tokens.*after the drafts \(1, 2\)"):
        server.scheduler.apply(StepResult(plan.step, {1: RowResult(wrong_tokens)}), 0.0)


def test_tokens_that_nobody_asked_for_are_a_bug() -> None:
    server = Server()
    server.ask(range(1, 12), 0)
    plan = server.plan()
    with pytest.raises(InvariantError, match="got 1 tokens"):
        server.scheduler.apply(StepResult(plan.step, {1: RowResult((1,))}), 0.0)


@pytest.mark.parametrize("propose", [up_to(3, right), up_to(3, wrong)])
def test_a_row_that_is_cancelled_or_fails_with_its_guesses_leaves_nothing(propose: Propose) -> None:
    server = Server(propose=propose)
    server.ask(range(1, 12), 9)
    server.ask(range(20, 31), 9)
    plan = server.plan()
    server.cancel("r1")
    server.finish(plan)
    server.finish(server.plan(), failed=[2])
    server.run()
    assert {event.request_id for event in server.log if isinstance(event, Token)} <= {"r2"}
