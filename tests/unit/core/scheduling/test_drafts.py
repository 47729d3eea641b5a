"""Drafts: guesses change no answer, end where the answer ends, and take nothing from anybody."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from quire.backends.oracle import answer_alone
from quire.core.events import SequenceFinished, Token
from quire.core.request import FinishReason, ResolvedSampling
from quire.core.scheduling.acceptance_rates import MAX_AGE_TOKENS, UNKNOWN, AcceptanceRate, Draft
from quire.core.scheduling.drafts import MAX_DRAFTS, MAX_SLOWDOWN, Propose
from quire.core.scheduling.sequence import Sequence
from quire.core.scheduling.step_cost import StepCost
from quire.core.step import RowResult, StepResult
from quire.errors import InvariantError
from quire.sim.server.guesses import Guesser
from tests.support.changed import changed
from tests.support.errors import raises_code
from tests.support.servers.server import VOCABULARY, Server


def right(sequence: Sequence, limit: int) -> Draft:
    """All that follows, and zeros beyond the end."""
    request, said = sequence.request, sequence.num_output_tokens
    answer = answer_alone(request.prompt, request.params, request.seed, VOCABULARY, sequence.index)
    return Draft((*answer[said : said + limit], *(0,) * limit)[:limit])


def wrong(sequence: Sequence, limit: int) -> Draft:
    return Draft(tuple((token_id + 1) % VOCABULARY for token_id in right(sequence, limit).token_ids))


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
        assert guessing.memory.pool.num_free == plain.memory.pool.num_free
    assert not guessing.scheduler.live
    stats = guessing.scheduler.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens == 0
    assert stats.num_computed_tokens == plain.scheduler.stats.num_computed_tokens


def test_blocks_are_taken_for_guesses_and_given_back_if_they_were_wrong() -> None:
    server = Server(num_blocks=8, propose=up_to(9, wrong))
    server.ask(range(3), 12)
    plan = server.plan()
    assert (len(plan.items[0].block_ids), server.memory.pool.num_free) == (3, 5)
    server.finish(plan)
    assert server.memory.pool.num_free == 7
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
    server = Server(propose=lambda _sequence, _limit: Draft((1,) * 99))
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
    server = Server(propose=lambda _sequence, _limit: Draft((1, 2)))
    server.ask(range(1, 12), 6)
    plan = server.plan()
    with raises_code(InvariantError, "tokens_not_explained"):
        server.scheduler.apply(StepResult(plan.step, {1: RowResult(wrong_tokens)}), 0.0)


def test_tokens_that_nobody_asked_for_are_a_bug() -> None:
    server = Server()
    server.ask(range(1, 12), 0)
    plan = server.plan()
    with raises_code(InvariantError, "tokens_not_explained"):
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


# -- what pays ---------------------------------------------------------------------------------------------------------

CHEAP = StepCost(((1, 1.0), (64, 1.2)))
DEAR = StepCost(((1, 1.0), (64, 64.0)))


def num_drafts(server: Server) -> list[int]:
    return [sum(item.num_drafts for item in plan.items) for plan in server.plans]


def test_cheap_guesses_that_are_right_are_made_in_growing_numbers() -> None:
    server = Server(num_blocks=200, propose=right, step_cost=CHEAP, max_step_tokens=200)
    server.ask(range(1, 12), 60)
    server.run()
    first, second, third, *_ = num_drafts(server)
    assert first == 6  # at a half each, until one costs more than it brings
    assert first < second <= third == MAX_DRAFTS


def test_guesses_that_are_wrong_become_few_and_are_tried_again_later() -> None:
    server = Server(num_blocks=200, propose=wrong, step_cost=StepCost(((1, 1.0), (64, 16.0))), max_step_tokens=200)
    server.ask(range(1, 12), 110)
    server.run()
    assert num_drafts(server)[:3] == [3, 1, 0]
    tried = [at for at, count in enumerate(num_drafts(server)) if count]
    assert tried[:4] == [0, 1, MAX_AGE_TOKENS + 2, MAX_AGE_TOKENS + 3]
    assert len(tried) == 8


def test_dear_guesses_are_not_even_looked_for() -> None:
    asked: list[int] = []

    def propose(sequence: Sequence, limit: int) -> Draft:
        asked.append(limit)
        return right(sequence, limit)

    server = Server(num_blocks=200, propose=propose, step_cost=DEAR)
    server.ask(range(1, 12), 20)
    server.run()
    assert not asked


def test_the_more_sequences_share_a_step_the_fewer_guesses_each_gets() -> None:
    alone, many = (Server(num_blocks=400, propose=right, step_cost=CHEAP, max_step_tokens=200) for _ in range(2))
    alone.ask(range(1, 5), 30)
    for at in range(8):
        many.ask(range(at, at + 4), 30)
    for server in (alone, many):
        server.run()
    assert num_drafts(many)[0] < 8 * num_drafts(alone)[0]
    assert max(item.num_drafts for plan in many.plans for item in plan.items) > 0


@pytest.mark.parametrize(("tenants", "is_bounded"), [(("a", "a"), False), (("a", "b"), True)])
def test_drafts_make_a_step_of_several_tenants_a_quarter_longer_at_most(
    tenants: tuple[str, str], is_bounded: bool
) -> None:
    cost = StepCost(((1, 1.0), (64, 3.0)))
    server = Server(num_blocks=400, propose=right, step_cost=cost, max_step_tokens=200)
    for at, tenant in enumerate(tenants):
        server.ask([at], 200, tenant=tenant)
    for _ in range(6):
        server.step()
    num_fed = max(sum(len(item.token_ids) for item in plan.items) for plan in server.plans)
    assert (cost.seconds(num_fed) <= MAX_SLOWDOWN * cost.seconds(len(tenants))) == is_bounded
    assert num_fed > len(tenants)


def test_sources_have_chances_of_their_own() -> None:
    calls = count()

    def propose(sequence: Sequence, limit: int) -> Draft:
        is_right = next(calls) % 2 == 0
        return changed((right if is_right else wrong)(sequence, limit), source=int(is_right))

    server = Server(num_blocks=200, propose=propose, step_cost=CHEAP, max_step_tokens=200)
    server.ask(range(1, 12), 100)
    (sequence,) = server.scheduler.live["r1"].sequences
    server.run()
    assert sequence.acceptance_rates[1].likelihood(len(sequence.tokens)) > 0.8
    assert sequence.acceptance_rates[0].likelihood(len(sequence.tokens)) < 0.4


@given(st.lists(st.tuples(st.integers(1, MAX_DRAFTS), st.floats(0, 1), st.integers(1, 60)), max_size=30))
def test_the_chance_of_a_guess_stays_between_never_and_always(results: list[tuple[int, float, int]]) -> None:
    chance, num_tokens = UNKNOWN, 0
    for num_drafts, share, num_more in results:
        chance = chance.with_result(num_drafts, int(num_drafts * share), num_tokens)
        assert 0.0 < chance.likelihood(num_tokens) < 1.0
        num_tokens += num_more
        if num_more > MAX_AGE_TOKENS:
            assert chance.likelihood(num_tokens) == 0.5


def test_tokens_behind_a_wrong_one_were_not_tried() -> None:
    assert AcceptanceRate(1.0, 2.0, 7).with_result(5, 3, 9) == AcceptanceRate(0.8 + 3, 1.6 + 4, 9)
    assert UNKNOWN.with_result(5, 5, 9) == AcceptanceRate(5.0, 5.0, 9)


def test_nothing_is_guessed_where_a_text_may_end_the_answer() -> None:
    server = Server(num_blocks=200, propose=right, step_cost=CHEAP, max_step_tokens=200)
    server.ask(range(1, 12), 20)
    (sequence,) = server.scheduler.live["r1"].sequences
    sequence.request = replace(sequence.request, has_stop_texts=True)
    server.run()
    assert sum(num_drafts(server)) == 0


def test_every_sequence_that_is_over_is_told_once() -> None:
    ended: list[tuple[str, int]] = []
    server = Server(num_blocks=200)
    server.scheduler.on_end = lambda sequence: ended.append((sequence.request.request_id, sequence.index))
    server.ask([1, 2], 3, n=2)
    server.ask([3, 4], 3)
    server.run()
    assert sorted(ended) == [("r1", 0), ("r1", 1), ("r2", 0)]
