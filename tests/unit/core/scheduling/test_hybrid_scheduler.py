"""The scheduler on an oracle with recurrent state: every answer is compared with that of the same request alone.

Blocks of four tokens. The oracle hashes its state into every token, so that a wrong slot is a wrong answer.
"""

import pytest

from quire.core.divergence import Divergence, MissReason
from quire.core.events import Admitted, Finished, PromptLogprobs
from quire.core.request import PriorityClass
from quire.core.step import StepPlan
from tests.support.servers.server import VOCABULARY, Server

PROMPT = list(range(1, 34))


def answer(server: Server, name: str, index: int = 0) -> list[int]:
    return server.ledger.entries[name].tokens[index]


def cached_tokens(server: Server, name: str) -> int:
    (event,) = [one for one in server.log if isinstance(one, Finished) and one.request_id == name]
    return event.num_cached_tokens


def computed_for(server: Server, prompt: list[int], max_tokens: int = 1, n: int = 1) -> int:
    """How many tokens are computed for one more request."""
    before = server.num_computed
    server.ask(prompt, max_tokens, n=n)
    server.run()
    return server.num_computed - before


class TestSharing:
    @pytest.mark.parametrize("num_prompt", [32, 33, 34])
    def test_equal_cold_prompts_are_computed_once(self, num_prompt: int) -> None:
        server = Server(num_kept=8)
        for _ in range(6):
            server.ask(PROMPT[:1] * num_prompt, 1)
        server.run()
        border = (num_prompt - 1) // 4 * 4
        assert server.num_computed == border + 6 * (num_prompt - border)

    def test_equal_cold_prompts_that_come_in_chunks_are_computed_once(self) -> None:
        server = Server(num_kept=8, max_step_tokens=14)
        for _ in range(6):
            server.ask(PROMPT, 1)
        server.run()
        assert server.num_computed == 32 + 6

    def test_equal_cold_prompts_with_several_answers_each_are_computed_once(self) -> None:
        server = Server(num_kept=8, max_running=12)
        for _ in range(4):
            server.ask(PROMPT, 1, n=3)
        server.run()
        assert server.num_computed == 32 + 12

    def test_a_prompt_sent_again_is_found_up_to_its_last_full_block(self) -> None:
        server = Server(num_kept=8)
        server.ask(PROMPT, 3)
        server.run()
        assert computed_for(server, PROMPT) == 1
        assert computed_for(server, PROMPT[:32]) == 32, "nobody kept the state before its last block"

    @pytest.mark.parametrize("num_prompt", range(8, 13))
    def test_a_prompt_for_several_answers_is_found_as_far_as_for_one(self, num_prompt: int) -> None:
        server = Server(num_kept=8)
        server.ask(PROMPT[:num_prompt], 2)
        server.run()
        name = server.ask(PROMPT[:num_prompt], 2, n=3)
        server.run()
        assert cached_tokens(server, name) == (num_prompt - 1) // 4 * 4

    def test_the_next_turn_of_a_conversation_goes_on_behind_the_answer(self) -> None:
        server = Server(num_kept=8)
        first = server.ask(PROMPT[:10], 12)
        server.run()
        second = server.ask([*PROMPT[:10], *answer(server, first), 40, 41], 2)
        server.run()
        assert cached_tokens(server, second) == 20, "21 tokens had been computed"

    def test_conversations_side_by_side_go_on_each_behind_its_own(self) -> None:
        server = Server(num_blocks=200, num_kept=4)
        names = [server.ask([30 + at, *PROMPT[:9]], 12) for at in range(4)]
        server.run()
        again = [server.ask([30 + at, *PROMPT[:9], *answer(server, name), 9], 2) for at, name in enumerate(names)]
        server.run()
        assert [cached_tokens(server, name) for name in again] == [20] * 4

    def test_prompts_with_one_beginning_share_it_from_the_third_on(self) -> None:
        server = Server(num_kept=8)
        found = []
        for tail in (40, 41, 42):
            name = server.ask([*PROMPT[:20], *[tail] * 6], 1)
            server.run()
            found.append(cached_tokens(server, name))
        assert found == [0, 0, 20], "where they part is known once the second has come"

    def test_the_miss_between_them_is_told(self) -> None:
        server = Server(num_kept=8)
        server.ask(PROMPT, 1)
        server.run()
        server.ask([*PROMPT[:20], 40], 1, is_explained=True)
        server.run()
        (_, event) = server.events(Admitted)
        assert isinstance(event, Admitted)
        assert event.miss == Divergence(0, MissReason.STATE_MISSING)

    def test_without_a_slot_to_spare_every_answer_is_right_and_nothing_is_shared(self) -> None:
        server = Server(num_kept=0)
        server.ask(PROMPT, 5)
        server.run()
        assert computed_for(server, PROMPT) == 33
        assert server.memory.stats().hit_tokens == 0


class TestSiblings:
    @pytest.mark.parametrize("num_prompt", [1, 2, 4, 5, 6, 9])
    def test_each_goes_on_with_the_state_of_the_prompt(self, num_prompt: int) -> None:
        server = Server(num_kept=8)
        name = server.ask(PROMPT[:num_prompt], 9, n=4)
        server.run()
        assert len({tuple(answer(server, name, index)) for index in range(4)}) == 4
        assert server.num_computed == num_prompt - 1 + 4 * 9

    def test_no_two_rows_of_a_step_share_a_slot(self) -> None:
        server = Server(num_kept=3)
        server.ask(PROMPT[:6], 9, n=4)
        server.ask(PROMPT[:6], 9, n=2)
        server.run()
        for plan in server.plans:
            slots = [item.state_slot for item in plan.items]
            assert len(set(slots)) == len(slots)
            assert 0 not in slots
            assert not {copy.dst for copy in plan.cache_copies} & set(slots), "a state is kept where nobody runs"

    def test_a_sibling_whose_leader_is_cancelled_goes_on(self) -> None:
        server = Server(num_kept=8)
        name = server.ask(PROMPT[:9], 8, n=3)
        server.step()
        server.drop(name, 0)
        server.run()
        assert [len(answer(server, name, index)) for index in (1, 2)] == [8, 8]

    def test_answers_that_were_cut_off_branch_off_at_the_prompt_whatever_is_cached_behind_it(self) -> None:
        server = Server(num_kept=8)
        name = server.ask(PROMPT[:6], 12, n=2)
        server.run()
        produced = [answer(server, name, index)[:11] for index in (0, 1)]
        server.next_name -= 1  # the same request once more, with the tokens it had
        again = server.ask(PROMPT[:6], 12, produced=produced)
        server.run()
        assert [len(answer(server, again, index)) for index in (0, 1)] == [12, 12]


class TestPreemption:
    def test_a_preempted_sequence_goes_on_from_its_last_kept_state(self) -> None:
        server = Server(num_kept=8)
        server.ask(PROMPT[:10], 20)
        for _ in range(13):
            server.step()
        (sequence,) = server.scheduler.running
        assert sequence.table is not None
        num_computed = sequence.table.num_computed
        assert num_computed % 4 > 0
        server.scheduler.preempt_latest()
        assert server.plan().items[0].first_position == num_computed // 4 * 4
        server.finish(server.plans[-1])
        server.run()

    def test_one_preempted_in_every_step_gets_its_answer_all_the_same(self) -> None:
        server = Server(num_kept=2)
        for at in range(3):
            server.ask([at, *PROMPT[:9]], 10)
        while server.scheduler.live:
            server.step()
            server.scheduler.preempt_latest()
        server.run()

    def test_a_pool_too_small_for_all_gives_everybody_the_right_answer(self) -> None:
        server = Server(num_blocks=12, num_kept=3, max_running=4)
        for at in range(6):
            server.ask([at % 2, *PROMPT[:12]], 16, priority=list(PriorityClass)[at % 3])
        server.run()
        assert server.scheduler.stats.num_preemptions > 0

    def test_a_head_that_does_not_fit_leaves_its_slot_and_the_state_it_looked_at(self) -> None:
        server = Server(num_blocks=12, num_kept=3, max_running=2)
        server.ask(PROMPT[:9], 2)
        server.run()
        server.ask([40] * 30, 4)
        server.step()
        waiting = server.ask([*PROMPT[:9], *range(20)], 2)
        server.step()
        assert waiting not in server.running
        server.check()
        server.run()
        assert cached_tokens(server, waiting) == 8


class TestPromptLogprobs:
    def scores(self, server: Server, name: str) -> list[object]:
        events = [one for one in server.log if isinstance(one, PromptLogprobs) and one.request_id == name]
        return [score for event in events for score in event.logprobs]

    def test_they_are_the_same_whatever_is_cached_and_however_it_is_cut(self) -> None:
        alone = Server(num_kept=0)
        expected = self.scores(alone, self.asked(alone))
        server = Server(num_kept=8, max_step_tokens=14)
        server.ask(PROMPT, 4)
        server.run()
        name = self.asked(server)
        assert self.scores(server, name) == expected
        assert len(expected) == len(PROMPT) - 1
        assert cached_tokens(server, name) == 0

    def asked(self, server: Server) -> str:
        name = server.ask(PROMPT, 4, prompt_logprobs=1)
        server.run()
        return name

    def test_after_a_preemption_they_go_on_behind_what_was_reported(self) -> None:
        alone = Server(num_kept=0)
        expected = self.scores(alone, self.asked(alone))
        server = Server(num_kept=8, max_step_tokens=14)
        name = server.ask(PROMPT, 4, prompt_logprobs=1)
        server.step()
        server.step()
        server.scheduler.preempt_latest()
        resumed = server.step()
        assert resumed.items[0].first_position > 0
        server.run()
        assert self.scores(server, name) == expected


class TestPlans:
    def kept_at(self, plan: StepPlan) -> list[int]:
        """Behind how many tokens the states of a plan are kept."""
        ends = {item.state_slot: item.first_position + len(item.token_ids) for item in plan.items}
        return [ends[copy.src] for copy in plan.cache_copies]

    def test_a_run_ends_on_the_border_whose_state_is_kept(self) -> None:
        server = Server(num_kept=8)
        server.ask(PROMPT[:10], 8)
        server.run()
        assert [len(plan.items[0].token_ids) for plan in server.plans] == [8, 2, *[1] * 7]
        assert [self.kept_at(plan) for plan in server.plans] == [[8], [], [], [12], [], [], [], [16], []]

    def test_the_states_of_an_answer_take_one_slot_and_the_prompts_another(self) -> None:
        server = Server(num_kept=8)
        server.ask(PROMPT[:9], 30)
        server.run()
        assert server.memory.slots.num_cached == 2
        assert server.memory.slots.num_evictions == 0

    def test_a_failed_row_keeps_nothing(self) -> None:
        server = Server(num_kept=8)
        server.ask(PROMPT, 4)
        plan = server.plan()
        assert plan.cache_copies
        server.finish(plan, [plan.items[0].sequence_id])
        assert server.memory.slots.num_cached == 0
        assert computed_for(server, PROMPT) == 33

    def test_a_long_prompt_leaves_sparse_states_that_others_find(self) -> None:
        server = Server(num_blocks=200, num_kept=12, max_step_tokens=400)
        long = [at % VOCABULARY for at in range(300)]
        server.ask(long, 1)
        server.run()
        assert [self.kept_at(plan) for plan in server.plans] == [[64], [128], [256], [296], [300]]
        name = server.ask([*long[:150], 7, 7], 1)
        server.run()
        assert cached_tokens(server, name) == 128

    def test_plans_of_a_plain_model_name_no_slot(self) -> None:
        server = Server()
        server.ask(PROMPT, 4, n=2)
        server.run()
        moved = [move for plan in server.plans for move in (*plan.slot_copies, *plan.cache_copies)]
        assert moved == []
        assert {item.state_slot for plan in server.plans for item in plan.items} == {0}
