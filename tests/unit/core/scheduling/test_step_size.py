"""Steps sized by time: on any machine short enough, a block at least, and the same seconds give the same sizes."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduling.step_size import StepSizer, TokenLoad
from tests.support.servers.server import Server

BLOCK = 32
LIMIT_S = 1.0
MOST = 256


class Machine:
    """Takes time for what it is fed, by prices of its own and with neighbours that slow it down."""

    def __init__(self, token_s: float, pair_s: float, step_s: float, random: Random, most_slowed: float = 1.0) -> None:
        self.token_s, self.pair_s, self.step_s = token_s, pair_s, step_s
        self._random, self._most_slowed = random, most_slowed

    def seconds(self, fed: TokenLoad) -> float:
        quiet_s = self.step_s + self.token_s * fed.num_tokens + self.pair_s * fed.num_pairs
        return quiet_s * self._random.uniform(1.0, self._most_slowed)


def read(sizer: StepSizer, machine: Machine, num_tokens: int, num_decoding: int = 0) -> list[tuple[int, float]]:
    """What each step of a long prompt fed and took, beside so many who decode behind as many tokens."""
    past, steps = 0, []
    while past < num_tokens:
        decoding = TokenLoad(num_decoding, num_decoding * 1000.0)
        count = sizer.chunk_budget(MOST - num_decoding, decoding).num_tokens(past) // BLOCK * BLOCK
        assert BLOCK <= count <= MOST
        fed = TokenLoad(count + num_decoding, count * (past + count / 2) + decoding.num_pairs)
        took_s = machine.seconds(fed)
        sizer.learn(fed, took_s)
        steps.append((count, took_s))
        past += count
    return steps


prices = st.floats(1e-6, 0.05)


class TestASizer:
    @given(prices, st.floats(0.0, 1e-5), st.floats(0.0, 0.3), st.integers(0, 16), st.integers(0, 1 << 30))
    def test_steps_of_a_long_prompt_end_in_time_on_any_machine(
        self, token_s: float, pair_s: float, step_s: float, num_decoding: int, seed: int
    ) -> None:
        machine = Machine(token_s, pair_s, step_s, Random(seed))
        steps = read(StepSizer(LIMIT_S, BLOCK), machine, 20_000, num_decoding)
        late = [took_s for count, took_s in steps if count > BLOCK and took_s > 1.5 * LIMIT_S]
        assert len(late) <= 0.02 * len(steps)

    def test_a_quick_machine_is_given_all_it_may_have_after_a_few_steps(self) -> None:
        steps = read(StepSizer(LIMIT_S, BLOCK), Machine(0.001, 1e-8, 0.01, Random(1)), 20_000)
        assert [count for count, _ in steps[:4]] == [32, 64, 128, 256]
        assert all(count == MOST for count, _ in steps[3:])

    def test_a_slow_machine_uses_its_time(self) -> None:
        steps = read(StepSizer(LIMIT_S, BLOCK), Machine(0.006, 0.0, 0.0, Random(1)), 20_000)
        assert {count for count, _ in steps[5:]} == {128}

    def test_a_token_behind_a_long_past_is_dearer_and_steps_feed_fewer(self) -> None:
        steps = read(StepSizer(LIMIT_S, BLOCK), Machine(0.004, 5e-7, 0.0, Random(1)), 30_000)
        assert steps[5][0] > 2 * steps[-1][0]
        assert all(took_s < 1.2 * LIMIT_S for _, took_s in steps)

    def test_a_long_cached_past_is_met_with_a_block_when_nothing_is_known(self) -> None:
        assert StepSizer(LIMIT_S, BLOCK).chunk_budget(MOST, TokenLoad(0, 0.0)).num_tokens(16_000) == BLOCK

    def test_one_pause_of_a_minute_changes_little(self) -> None:
        sizer, machine = StepSizer(LIMIT_S, BLOCK), Machine(0.003, 0.0, 0.01, Random(1))
        read(sizer, machine, 10_000)
        before = sizer.chunk_budget(MOST, TokenLoad(0, 0.0)).num_tokens(0)
        sizer.learn(TokenLoad(MOST, 0.0), 60.0)
        assert sizer.chunk_budget(MOST, TokenLoad(0, 0.0)).num_tokens(0) > 0.6 * before
        assert read(sizer, machine, 5_000)[-1][0] == MOST

    def test_a_machine_that_becomes_four_times_as_slow_is_noticed_within_some_steps(self) -> None:
        sizer = StepSizer(LIMIT_S, BLOCK)
        read(sizer, Machine(0.003, 0.0, 0.01, Random(1)), 10_000)
        steps = read(sizer, Machine(0.012, 0.0, 0.04, Random(1)), 10_000)
        assert all(took_s <= 1.2 * LIMIT_S for _, took_s in steps[12:])

    @pytest.mark.parametrize("took_s", [0.0, -5.0])
    def test_a_clock_that_stands_still_or_goes_back_says_nothing(self, took_s: float) -> None:
        sizer = StepSizer(LIMIT_S, BLOCK)
        for num_tokens in (32, 64, 128, 256):
            sizer.learn(TokenLoad(num_tokens, 0.0), took_s)
        assert sizer.chunk_budget(MOST, TokenLoad(0, 0.0)).num_tokens(0) == MOST

    def test_without_a_limit_a_step_has_all_its_tokens(self) -> None:
        sizer = StepSizer(0.0, BLOCK)
        sizer.learn(TokenLoad(32, 0.0), 100.0)
        assert sizer.chunk_budget(200, TokenLoad(56, 0.0)).num_tokens(1 << 20) == 200


class TestAScheduler:
    """Its server's steps take a second each, whatever they feed."""

    def test_feeds_a_block_at_least_whatever_steps_take(self) -> None:
        server = Server(num_blocks=64, step_limit_s=0.001)
        server.ask(range(40), 2)
        server.run()
        assert [len(plan.items[0].token_ids) for plan in server.plans] == [4] * 10 + [1]

    def test_feeds_a_block_of_the_most_urgent_beside_those_who_decode(self) -> None:
        server = Server(num_blocks=128, step_limit_s=0.001)
        server.ask([1, 2, 3], 30)
        server.step()
        server.ask(range(10, 26), 2)
        server.ask(range(30, 46), 2)
        server.step()
        assert [len(item.token_ids) for item in server.plans[-1].items] == [1, 4]

    def test_grows_its_steps_while_there_is_time(self) -> None:
        server = Server(num_blocks=64, step_limit_s=60.0)
        server.ask(range(100), 2)
        server.run()
        assert [len(plan.items[0].token_ids) for plan in server.plans] == [4, 8, 16, 32, 40, 1]


def test_steps_without_a_token_before_another_leave_the_price_of_pairs_as_it_was() -> None:
    sizer = StepSizer(LIMIT_S, BLOCK)
    sizer.learn(TokenLoad(BLOCK, 0.0), 0.1)
    before = sizer.costs.pair_s
    sizer.learn(TokenLoad(2 * BLOCK, 0.0), 0.3)
    assert sizer.costs.pair_s == before > 0.0
