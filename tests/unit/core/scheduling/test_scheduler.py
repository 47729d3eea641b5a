"""The scheduler on the oracle: every answer is compared with that of the same request alone."""

from dataclasses import replace

import pytest

from quire.backends.oracle import answer_alone
from quire.core.events import Admitted, Finished, FirstToken, Preempted, PromptLogprobs, SequenceFinished, Token
from quire.core.inspect import invariants
from quire.core.request import FinishReason, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.policy import PROTECTED_AFTER
from quire.core.scheduling.rows import work_item
from quire.core.scheduling.scheduler import never_waits
from quire.core.scheduling.sequence import Sequence
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import ROW_FAILED, RowError, RowResult, StepResult
from quire.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidParameterError,
    InvariantError,
    QueueFullError,
    RequestTooLargeError,
    TenantShareError,
)
from tests.support.core.shadow import namespace
from tests.support.errors import raises_code
from tests.support.servers.server import Server

HIGH, NORMAL, LOW = PriorityClass.HIGH, PriorityClass.NORMAL, PriorityClass.LOW


def reasons(server: Server) -> dict[str, FinishReason]:
    return {event.request_id: event.reason for event in server.log if isinstance(event, SequenceFinished)}


def ends(server: Server, name: str = "r1") -> dict[int, tuple[FinishReason, int]]:
    """How each continuation of a request ended, and with how many tokens."""
    return {
        event.sequence_index: (event.reason, event.num_output_tokens)
        for event in server.log
        if isinstance(event, SequenceFinished) and event.request_id == name
    }


class TestNoPhases:
    def test_a_request_gets_what_it_gets_alone(self) -> None:
        server = Server()
        server.ask(range(1, 12), 7)
        server.run()
        assert [type(event) for event in server.log] == [Admitted, FirstToken, *[Token] * 7, SequenceFinished, Finished]

    def test_a_long_prompt_comes_in_chunks_that_end_on_block_borders(self) -> None:
        server = Server(max_step_tokens=14, max_running=8)
        server.ask(range(30), 2)
        server.run()
        fed = [len(plan.items[0].token_ids) for plan in server.plans]
        assert fed == [12, 12, 6, 1]

    def test_new_prompts_and_running_answers_share_a_step(self) -> None:
        server = Server()
        server.ask([1, 2, 3], 9)
        server.step()
        server.ask([4, 5, 6, 7], 2)
        plan = server.step()
        assert [len(item.token_ids) for item in plan.items] == [1, 4]
        server.run()

    def test_no_step_feeds_more_than_the_budget(self) -> None:
        server = Server(num_blocks=200, max_step_tokens=20, max_running=8)
        for index in range(20):
            server.ask([index] * (1 + 3 * index), 5)
        server.run()
        assert max(sum(len(item.token_ids) for item in plan.items) for plan in server.plans) <= 20

    def test_whoever_needs_one_token_gets_it_however_long_the_prompts_of_others(self) -> None:
        server = Server(num_blocks=200, max_step_tokens=16, max_running=8)
        talking = server.ask([1], 30)
        server.step()
        server.ask(range(100), 1, priority=HIGH)
        for _ in range(5):
            plan = server.step()
            assert {len(item.token_ids) for item in plan.items} >= {1}, talking
        server.run()

    def test_an_empty_server_plans_nothing(self) -> None:
        server = Server()
        plan = server.plan()
        assert plan.items == ()
        assert server.scheduler.in_flight is None

    def test_a_step_that_has_not_returned_forbids_the_next(self) -> None:
        server = Server()
        server.ask([1, 2])
        server.plan()
        with raises_code(InvariantError, "step_in_flight"):
            server.plan()

    def test_a_result_must_answer_the_plan(self) -> None:
        server = Server()
        with raises_code(InvariantError, "result_not_planned"):
            server.scheduler.apply(StepResult(1, {}), 0.0)
        server.ask([1, 2])
        plan = server.plan()
        rows = server.runner.start(plan).wait().rows
        for step, wrong in ((plan.step + 1, rows), (plan.step, {})):
            with raises_code(InvariantError, "result_not_planned"):
                server.scheduler.apply(StepResult(step, wrong), 0.0)
        with raises_code(InvariantError, "tokens_not_explained"):
            server.scheduler.apply(StepResult(plan.step, {1: RowResult()}), 0.0)

    def test_a_budget_that_could_stall_is_refused(self) -> None:
        with raises_code(ConfigError, "step_budget_too_small"):
            Server(block_size=4, max_running=8, max_step_tokens=11)

    @pytest.mark.parametrize(
        ("setting", "value"),
        [("max_running", 0), ("watermark", 1.0), ("max_sequence_tokens", 1), ("step_limit_s", -1.0)],
    )
    def test_settings_out_of_range_are_refused(self, setting: str, value: float) -> None:
        with raises_code(ConfigError, "invalid_config"):
            Server(64, 4, **{setting: value})  # type: ignore[arg-type]


class TestPromptsAlone:
    """`max_tokens` 0: the prompt is computed, nothing is chosen, and that is the end."""

    def test_a_request_for_its_prompt_alone_computes_no_token(self) -> None:
        server = Server()
        server.ask(range(1, 12), 0, prompt_logprobs=1)
        plan = server.step()
        assert [item.sampling for item in plan.items] == [None]
        assert [type(event) for event in server.log] == [Admitted, PromptLogprobs, SequenceFinished, Finished]
        assert ends(server) == {0: (FinishReason.LENGTH, 0)}
        stats = server.scheduler.stats
        assert (stats.num_steps, stats.num_computed_tokens, stats.num_output_tokens) == (1, 11, 0)
        server.run()

    def test_it_is_charged_for_its_prompt(self) -> None:
        server = Server()
        server.ask(range(1, 12), 0)
        server.run()
        assert server.scheduler.queue.tenants["default"].service == 11

    def test_several_continuations_of_nothing_end_one_by_one(self) -> None:
        server = Server()
        server.ask(range(1, 12), 0, n=3, prompt_logprobs=0)
        server.run()
        assert ends(server) == dict.fromkeys(range(3), (FinishReason.LENGTH, 0))

    def test_it_fills_the_cache_for_who_comes_next(self) -> None:
        server = Server()
        server.ask(range(1, 12), 0)
        server.run()
        server.ask(range(1, 12), 2)
        server.run()
        assert server.memory.stats().hit_tokens == 8

    def test_it_ends_after_preemption_and_after_a_crash_as_well(self) -> None:
        server = Server(max_step_tokens=12)
        server.ask(range(1, 30), 0, prompt_logprobs=0)
        server.step()
        server.scheduler.preempt_latest()
        server.run()
        again = Server()
        again.ask(range(1, 30), 0, produced=[()])
        again.run()
        assert ends(server) == ends(again) == {0: (FinishReason.LENGTH, 0)}

    def test_it_may_be_as_long_as_a_sequence_may_be(self) -> None:
        server = Server(max_sequence_tokens=11)
        server.ask(range(11), 0)
        server.run()
        for num_prompt, max_tokens in ((11, 1), (12, 0)):
            with raises_code(RequestTooLargeError, "request_too_large"):
                server.ask(range(num_prompt), max_tokens)


class TestAdapters:
    def test_an_item_names_the_adapter_of_its_request(self) -> None:
        server = Server()
        server.ask([1, 2], 1)
        assert [item.adapter for item in server.step().items] == [""]
        sequence = Sequence(1, request_of(adapter="a"), (0.0, 1))
        sequence.table = server.memory.open(sequence.request.namespace)
        server.memory.reserve(sequence.table, sequence.tokens, 2)
        assert work_item(sequence, 2, (), reads_cache=True).adapter == "a"

    def test_an_adapter_that_is_not_there_is_refused_by_name(self) -> None:
        server = Server()
        with raises_code(InvalidParameterError, "invalid_parameter") as refused:
            server.scheduler.submit(request_of(adapter="a"))
        assert refused.value.parameter == "adapter"
        assert not server.scheduler.live


def request_of(adapter: str) -> Request:
    return Request("r", (1, 2), namespace(4, adapter=adapter), 0.0)


class TestStops:
    def test_by_a_stop_token(self) -> None:
        server = Server(num_blocks=200)
        server.ask([1, 2, 3], 200, stop_token_ids=frozenset(range(0, 50, 5)))
        server.run()
        assert reasons(server) == {"r1": FinishReason.STOP}

    def test_not_by_a_stop_token_before_min_tokens(self) -> None:
        server = Server(num_blocks=200)
        server.ask([1, 2, 3], 40, stop_token_ids=frozenset(range(40)), min_tokens=20)
        server.run()
        (finished,) = server.events(SequenceFinished)
        assert isinstance(finished, SequenceFinished)
        assert finished.num_output_tokens > 20

    def test_by_length(self) -> None:
        server = Server()
        server.ask([1, 2, 3], 3)
        server.run()
        assert reasons(server) == {"r1": FinishReason.LENGTH}

    def test_by_the_longest_sequence_there_may_be(self) -> None:
        server = Server(max_sequence_tokens=9)
        server.ask([1] * 5, 4)
        server.run()
        with raises_code(RequestTooLargeError, "request_too_large"):
            server.ask([1] * 9, 4)

    def test_by_a_row_error_which_touches_nobody_else(self) -> None:
        server = Server()
        server.ask([1, 2, 3, 4, 5], 4)
        server.ask([1, 2, 3, 4, 5], 4)
        plan = server.plan()
        server.finish(plan, failed=[plan.items[0].sequence_id])
        server.run()
        assert reasons(server) == {"r1": FinishReason.ERROR, "r2": FinishReason.LENGTH}
        (event,) = [event for event in server.log if isinstance(event, SequenceFinished) and event.error]
        assert event.error == "broken"

    def test_a_failed_rows_blocks_are_never_hit(self) -> None:
        server = Server()
        server.ask(range(9), 2)
        plan = server.plan()
        server.finish(plan, failed=[1])
        assert server.memory.stats().num_named_blocks == 0

    def test_by_cancel_while_waiting_running_and_in_flight(self) -> None:
        server = Server(max_running=1, max_step_tokens=8)
        for _ in range(3):
            server.ask([1, 2, 3], 50)
        server.cancel("r3")
        server.take(server.scheduler.take_events())
        server.step()
        server.cancel("r1")
        server.take(server.scheduler.take_events())
        server.check()
        plan = server.plan()
        server.cancel("r2")
        server.cancel("r2")
        assert server.memory.pool.num_referenced > 0, "a step in flight keeps its blocks"
        server.finish(plan)
        invariants.check_at_rest(server.memory)
        assert set(reasons(server).values()) == {FinishReason.CANCELLED}
        assert len(server.events(Finished)) == 3

    def test_cancelling_what_is_gone_or_unknown_does_nothing(self) -> None:
        server = Server()
        name = server.ask([1], 1)
        server.run()
        server.cancel(name)
        server.cancel("never seen")
        assert server.scheduler.take_events() == []

    def test_a_request_that_ends_by_itself_in_the_step_it_is_cancelled_in_ends_once(self) -> None:
        server = Server()
        server.ask([1, 2], 1)
        plan = server.plan()
        server.cancel("r1")
        server.finish(plan)
        assert reasons(server) == {"r1": FinishReason.CANCELLED}
        assert len(server.events(Finished)) == 1

    def test_one_continuation_alone_and_the_others_get_what_they_would_have_got(self) -> None:
        server = Server()
        server.ask(range(6), 8, n=4)
        for _ in range(3):
            server.step()
        server.drop("r1", 2)
        server.take(server.scheduler.take_events())
        server.check()
        assert ends(server) == {2: (FinishReason.CANCELLED, 2)}
        server.run()
        assert [ends(server)[index][0] for index in (0, 1, 3)] == [FinishReason.LENGTH] * 3

    def test_one_continuation_in_flight_alone_when_the_step_has_returned(self) -> None:
        server = Server()
        server.ask(range(6), 8, n=2)
        for _ in range(3):
            server.step()
        plan = server.plan()
        server.drop("r1", 0)
        server.drop("r1", 0)
        assert len(server.scheduler.running) == 2, "a step in flight keeps its blocks"
        server.finish(plan)
        assert ends(server) == {0: (FinishReason.CANCELLED, 2)}
        assert [item.sequence_id for item in server.plan().items] == [2]

    def test_a_sibling_that_waits_for_the_fork_point_alone(self) -> None:
        server = Server(max_step_tokens=12)
        server.ask(range(30), 3, n=3)
        server.step()
        server.drop("r1", 1)
        server.take(server.scheduler.take_events())
        server.check()
        assert server.scheduler.placement.num_places == 2
        server.run()
        assert ends(server) == {
            0: (FinishReason.LENGTH, 3),
            1: (FinishReason.CANCELLED, 0),
            2: (FinishReason.LENGTH, 3),
        }

    def test_a_leader_before_the_fork_point_alone_and_its_siblings_live_on(self) -> None:
        server = Server(max_step_tokens=12)
        server.ask(range(30), 3, n=3)
        plan = server.plan()
        server.drop("r1", 0)
        server.finish(plan)
        num_computed = server.num_computed
        assert ends(server) == {0: (FinishReason.CANCELLED, 0)}
        assert server.scheduler.placement.num_places == 2
        server.run()
        assert [ends(server)[index] for index in (1, 2)] == [(FinishReason.LENGTH, 3)] * 2
        # What the leader had computed of the prompt is not computed again, and each of the two computes its last token.
        assert num_computed == 12
        assert server.num_computed == 30 + 1 + 2 * 2

    def test_a_leader_that_reaches_the_fork_point_in_the_step_it_is_cancelled_in(self) -> None:
        server = Server()
        server.ask(range(6), 3, n=3)
        plan = server.plan()
        server.drop("r1", 0)
        server.finish(plan)
        assert ends(server) == {0: (FinishReason.CANCELLED, 0)}
        assert len(server.scheduler.running) == 2
        server.run()
        assert [ends(server)[index] for index in (1, 2)] == [(FinishReason.LENGTH, 3)] * 2

    def test_a_leader_that_waits_alone_and_its_siblings_start_in_its_place(self) -> None:
        server = Server(max_running=3, max_step_tokens=8)
        server.ask([9], 3, n=1)
        server.ask(range(6), 3, n=3)
        server.step()
        server.drop("r2", 0)
        server.drop("r2", 1)
        server.take(server.scheduler.take_events())
        server.check()
        server.run()
        assert [ends(server, "r2")[index][1] for index in range(3)] == [0, 0, 3]

    def test_a_preempted_continuation_alone(self) -> None:
        server = Server()
        server.ask(range(6), 8, n=2)
        for _ in range(3):
            server.step()
        server.scheduler.preempt_latest()
        server.drop("r1", 1)
        server.run()
        assert ends(server) == {0: (FinishReason.LENGTH, 8), 1: (FinishReason.CANCELLED, 2)}

    def test_resumed_continuations_change_places_with_the_tokens_they_had(self) -> None:
        server = Server()
        alone = [answer_alone(tuple(range(9)), ResolvedSampling(max_tokens=6), 1, 50, index) for index in range(3)]
        server.ask(range(9), 6, produced=[answer[:count] for answer, count in zip(alone, (4, 0, 2), strict=True)])
        server.drop("r1", 0)
        server.run()
        assert ends(server) == {
            0: (FinishReason.CANCELLED, 4),
            1: (FinishReason.LENGTH, 6),
            2: (FinishReason.LENGTH, 6),
        }

    def test_the_last_continuation_alone_ends_the_request(self) -> None:
        server = Server()
        server.ask(range(6), 8, n=2)
        for index in (0, 1, 5):
            server.drop("r1", index)
        server.take(server.scheduler.take_events())
        assert len(server.events(Finished)) == 1
        assert not server.scheduler.live

    def test_a_head_that_asks_for_less_than_before_is_looked_at_again(self) -> None:
        server = Server(num_blocks=20, max_running=16)
        server.ask(range(48), 4)
        server.step()
        server.ask(range(4), 1, n=8)
        server.step()
        assert server.running == ["r1"]
        server.drop("r2", 3)
        server.drop("r2", 0)
        assert "r2" in {sequence.request.request_id for sequence in server.scheduler.queue}
        plan = server.plan()
        assert len(plan.items) == 2, "the first and the leader of the second"
        server.finish(plan)
        server.run()

    def test_by_its_deadline_waiting_or_running(self) -> None:
        server = Server(max_running=1, max_step_tokens=8)
        server.ask([1, 2, 3], 50, timeout_s=3.0)
        server.ask([1, 2, 3], 50, timeout_s=2.0)
        server.ask([4], 1)
        server.run()
        assert reasons(server) == {
            "r1": FinishReason.DEADLINE,
            "r2": FinishReason.DEADLINE,
            "r3": FinishReason.LENGTH,
        }

    def test_an_old_deadline_does_not_end_a_new_request_of_the_same_name(self) -> None:
        server = Server()
        server.ask([1], 1, timeout_s=3.0)
        server.run()
        server.next_name = 0
        server.ask([1], 8, timeout_s=100.0)
        server.run()
        assert reasons(server) == {"r1": FinishReason.LENGTH}

    def test_the_deadline_of_a_request_that_is_over_is_forgotten(self) -> None:
        server = Server()
        for _ in range(200):
            server.ask([1], 1, timeout_s=1000.0)
            server.run()
        assert len(server.scheduler.deadlines._heap) <= 66
        server.now_s += 2000.0
        assert server.plan().items == ()


class TestSharing:
    def test_equal_cold_prompts_that_come_together_are_computed_once(self) -> None:
        server = Server(num_blocks=200, max_step_tokens=64, max_running=8)
        for _ in range(8):
            server.ask(range(40), 2)
        server.run()
        assert server.num_computed == 40 + 7 * 4 + 8 * 1

    def test_who_waits_for_a_block_of_this_step_matches_it_at_the_next(self) -> None:
        server = Server()
        server.ask(range(9), 3)
        server.ask(range(9), 3)
        first, second = server.step(), server.step()
        assert [len(item.token_ids) for item in first.items] == [9]
        assert sorted(len(item.token_ids) for item in second.items) == [1, 1]
        server.run()

    def test_a_single_token_never_waits(self) -> None:
        server = Server()
        server.ask([1], 1)
        server.ask([1], 1)
        assert len(server.step().items) == 2

    def test_cached_tokens_are_told(self) -> None:
        server = Server()
        server.ask(range(9), 1)
        server.run()
        server.ask(range(9), 1)
        server.run()
        first, second = server.events(Finished)
        assert isinstance(first, Finished)
        assert isinstance(second, Finished)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)

    def test_cached_tokens_are_told_once_however_often_the_head_did_not_fit(self) -> None:
        server = Server(num_blocks=24, max_running=4)
        server.ask(range(9), 1)
        server.run()
        server.ask([7] * 40, 20)
        server.step()
        server.ask([*range(9), *range(100, 120)], 4)
        for _ in range(6):
            server.step()
        assert server.running == ["r2"]
        server.run()
        last = [event for event in server.log if isinstance(event, Finished) and event.request_id == "r3"]
        assert last[0].num_cached_tokens == 8
        admitted = [event for event in server.log if isinstance(event, Admitted) and event.request_id == "r3"]
        assert admitted[0].num_cached_tokens == last[0].num_cached_tokens

    def test_tokens_found_while_others_compute_them_count_as_cached(self) -> None:
        server = Server()
        server.ask(range(9), 1)
        server.ask(range(9), 1)
        server.run()
        cached = [event.num_cached_tokens for event in server.log if isinstance(event, Finished)]
        assert sorted(cached) == [0, 8]

    def test_prompt_logprobs_read_no_cached_block_and_are_told_once(self) -> None:
        server = Server(max_step_tokens=12, max_running=4)
        server.ask(range(11), 2)
        server.run()
        computed = server.num_computed
        server.ask(range(11), 2, prompt_logprobs=1, n=2)
        server.step()
        server.scheduler.preempt_latest()
        server.run()
        assert server.num_computed - computed >= 11
        reported = [event for event in server.log if isinstance(event, PromptLogprobs)]
        assert [entry.token_id for event in reported for entry in event.logprobs] == list(range(1, 11))

    def test_prompt_logprobs_get_on_however_often_they_are_preempted(self) -> None:
        server = Server(max_step_tokens=8, max_running=1)
        server.ask([token % 50 for token in range(60)], 2, prompt_logprobs=0)
        for step in range(200):
            if not server.scheduler.live:
                break
            if step % 3 == 2:
                server.scheduler.preempt_latest()
            server.step()
        assert not server.scheduler.live

    def test_a_chunk_of_prompt_logprobs_that_is_computed_again_is_not_told_again(self) -> None:
        server = Server(max_step_tokens=12)
        server.ask(range(30), 2, prompt_logprobs=0)
        server.step()
        server.scheduler.preempt_latest()
        server.memory.evict(64)
        server.step()
        assert server.num_computed == 24
        assert [event.first_position for event in server.log if isinstance(event, PromptLogprobs)] == [1]
        server.run()

    def test_a_resumed_request_for_prompt_logprobs_may_read_what_it_has_reported(self) -> None:
        server = Server()
        server.ask(range(9), 6, prompt_logprobs=0)
        server.step()
        server.scheduler.preempt_latest()
        server.run()
        assert server.scheduler.stats.num_recomputed_tokens <= 4


class TestContinuations:
    def test_several_continuations_share_every_full_block(self) -> None:
        server = Server(num_blocks=100)
        server.ask(range(22), 5, n=4)
        server.step()
        tables = [sequence.table for sequence in server.scheduler.running]
        assert len(tables) == 4
        assert len({tuple(table.blocks[:5]) for table in tables if table}) == 1
        server.run()
        assert server.memory.stats().num_block_copies <= 4

    def test_the_fork_waits_for_all_of_the_prompt_but_its_last_token(self) -> None:
        server = Server()
        server.ask(range(10), 2, n=2)
        first, second = server.step(), server.step()
        assert [len(item.token_ids) for item in first.items] == [9]
        assert [item.token_ids for item in second.items] == [(9,), (9,)]
        assert len(second.copies) == 2, "each gets its own tail"
        server.run()

    def test_a_prompt_of_one_token_forks_at_once(self) -> None:
        server = Server()
        server.ask([5], 3, n=3)
        assert len(server.step().items) == 3
        server.run()

    def test_a_cached_prompt_forks_at_once(self) -> None:
        server = Server()
        server.ask(range(9), 1)
        server.run()
        server.ask(range(9), 3, n=2)
        assert len(server.step().items) == 2
        server.run()

    def test_a_request_needs_a_place_for_each_continuation(self) -> None:
        server = Server(max_running=3, max_step_tokens=16)
        server.ask([1, 2], 5, n=2)
        server.ask([3, 4], 5, n=2)
        server.ask([5, 6], 5)
        server.step()
        assert set(server.running) == {"r1"}, "the head does not fit and is not skipped"
        server.run()
        with raises_code(RequestTooLargeError, "too_many_continuations"):
            server.ask([1], 1, n=4)

    def test_what_ends_the_leader_before_the_fork_ends_all(self) -> None:
        server = Server(max_step_tokens=12, max_running=8)
        server.ask(range(30), 5, n=3)
        plan = server.plan()
        server.finish(plan, failed=[1])
        assert len(server.events(SequenceFinished)) == 3
        assert len(server.events(Finished)) == 1
        server.ask(range(30), 5, n=3)
        server.step()
        server.cancel("r2")
        server.take(server.scheduler.take_events())
        server.check()
        assert len(server.events(SequenceFinished)) == 6

    def test_one_continuation_may_fail_alone(self) -> None:
        server = Server()
        server.ask(range(10), 6, n=3)
        server.step()
        plan = server.plan()
        server.finish(plan, failed=[plan.items[1].sequence_id])
        server.run()
        by_index = {event.sequence_index: event.reason for event in server.log if isinstance(event, SequenceFinished)}
        assert by_index == {0: FinishReason.LENGTH, 1: FinishReason.ERROR, 2: FinishReason.LENGTH}

    def test_a_preempted_continuation_comes_back_alone(self) -> None:
        server = Server()
        server.ask(range(10), 6, n=3)
        server.step()
        server.step()
        server.scheduler.preempt_latest()
        server.run()
        assert server.scheduler.stats.num_preemptions == 1


class TestDisplacement:
    """What a newcomer needs is counted against what the whole set of victims would set free."""

    def test_a_victim_in_the_middle_of_its_prompt_no_longer_needs_the_rest(self) -> None:
        server = Server(num_blocks=340, max_step_tokens=64, max_running=4)
        server.ask([1], 100, priority=HIGH)
        server.ask([token % 50 for token in range(800)], 4, priority=LOW)
        server.step()
        server.ask([7 + token % 40 for token in range(660)], 4, priority=HIGH)
        server.step()
        assert server.running == ["r1", "r3"]
        server.run()

    def test_blocks_the_victims_share_among_themselves_come_free_with_the_last(self) -> None:
        server = Server(num_blocks=60, max_step_tokens=64, max_running=8)
        for last in range(4):
            server.ask([*range(80), last], 30, priority=LOW)
        for _ in range(4):
            server.step()
        assert len(server.running) == 4
        server.ask(range(100, 276), 4, priority=HIGH)
        server.step()
        assert server.running[0] == "r5"
        server.run()

    def test_the_watermark_is_waived_if_nobody_is_left_running(self) -> None:
        server = Server(num_blocks=40, watermark=0.3, max_running=4)
        server.ask([1] * 20, 90, priority=LOW)
        server.step()
        server.ask(range(100), 4, priority=HIGH)
        server.step()
        assert server.running == ["r2"]
        server.run()

    def test_who_is_not_needed_goes_on(self) -> None:
        server = Server(num_blocks=100, max_step_tokens=120, max_running=8)
        server.ask(range(100), 30, priority=LOW)
        server.step()
        server.ask(range(200, 300), 30, priority=LOW)
        server.step()
        server.ask(range(400, 600), 4, priority=HIGH)
        server.step()
        preempted = [event.request_id for event in server.log if isinstance(event, Preempted)]
        server.run()
        assert preempted == ["r2"]


class TestPressure:
    def test_the_latest_key_yields_and_the_most_urgent_finishes_first(self) -> None:
        server = Server(num_blocks=12, max_running=4, max_step_tokens=32)
        for _ in range(4):
            server.ask([1, 2, 3, 4], 20)
        server.run()
        ended = [event.request_id for event in server.log if isinstance(event, Finished)]
        assert ended[0] == "r1"
        preempted = {event.request_id for event in server.log if isinstance(event, Preempted)}
        assert preempted
        assert "r1" not in preempted

    def test_one_that_yields_in_the_middle_of_a_plan_is_not_planned(self) -> None:
        server = Server(num_blocks=13, max_running=4, max_step_tokens=32)
        for first in range(4):
            server.ask([first] * 4, 20)
        while not server.events(Preempted):
            plan = server.step()
        assert len(plan.items) == 3, "the second takes the fourth one's blocks, and the third takes the rest"
        server.run()

    def test_a_preempted_sequence_recomputes_less_than_a_block(self) -> None:
        server = Server(num_blocks=64)
        server.ask(range(20), 9)
        for _ in range(4):
            server.step()
        server.scheduler.preempt_latest()
        server.run()
        assert server.scheduler.stats.num_recomputed_tokens < 4

    def test_what_is_computed_again_or_found_again_is_free(self) -> None:
        server = Server()
        server.ask(range(10), 6)
        for _ in range(3):
            server.step()
            server.scheduler.preempt_latest()
            server.memory.clear()
        server.run()
        assert server.scheduler.stats.num_recomputed_tokens > 20
        assert server.scheduler.queue.tenants["default"].service == 10 + 4 * 6
        (finished,) = server.events(Finished)
        assert isinstance(finished, Finished)
        assert finished.num_cached_tokens == 0

    def test_what_a_resumed_sequence_finds_of_its_own_counts_as_no_hit(self) -> None:
        server = Server()
        server.ask(range(10), 6)
        server.step()
        server.scheduler.preempt_latest()
        server.run()
        stats = server.memory.stats()
        assert (stats.query_tokens, stats.hit_tokens) == (10, 0)
        (finished,) = server.events(Finished)
        assert isinstance(finished, Finished)
        assert finished.num_cached_tokens == 0

    def test_admission_leaves_the_watermark_free(self) -> None:
        server = Server(num_blocks=20, watermark=0.25, max_running=4)
        server.ask(range(20), 1)
        server.step()
        server.ask(range(100, 120), 4)
        server.run()
        server.ask(range(200, 240), 4)
        server.step()
        server.ask(range(300, 320), 4)
        server.step()
        assert server.running == ["r3"], "5 blocks would be enough, but not 5 above the watermark"
        server.run()

    def test_admission_sets_aside_what_those_who_run_still_need(self) -> None:
        server = Server(num_blocks=24, max_step_tokens=24, max_running=4)
        server.ask(range(64), 1)
        server.step()
        server.scheduler.running[0].num_preemptions = PROTECTED_AFTER
        server.ask(range(100, 134), 1, priority=HIGH)
        server.step()
        assert server.running == ["r1"], "there are 18 free blocks, but r1 needs 10 of them"
        server.run()
        assert server.scheduler.stats.num_preemptions == 0

    def test_an_urgent_newcomer_displaces_a_running_low_one(self) -> None:
        server = Server(max_running=2, max_step_tokens=16)
        server.ask([1], 30, priority=LOW)
        server.ask([2], 30, priority=LOW)
        server.step()
        server.ask([3], 2, priority=HIGH)
        server.step()
        assert server.running == ["r3", "r1"]
        server.run()

    def test_a_newcomer_displaces_for_blocks_as_well(self) -> None:
        server = Server(num_blocks=16, max_running=4, max_step_tokens=64)
        server.ask(range(40), 4, priority=LOW)
        server.step()
        server.ask(range(100, 140), 2, priority=HIGH)
        server.step()
        assert server.running[0] == "r2"
        server.run()

    def test_nobody_is_displaced_in_vain(self) -> None:
        server = Server(num_blocks=20, max_running=4, max_step_tokens=64)
        server.ask(range(40), 8, priority=HIGH)
        server.ask([1], 8, priority=LOW)
        server.step()
        server.ask(range(100, 140), 2, priority=HIGH)
        server.step()
        assert set(server.running) == {"r1", "r2"}
        server.run()

    def test_a_sequence_is_displaced_three_times_at_most(self) -> None:
        server = Server(max_running=1, max_step_tokens=16)
        server.ask([1], 60, priority=LOW)
        for _ in range(6):
            while server.running != ["r1"]:
                server.step()
            server.ask([2], 2, priority=HIGH)
            server.step()
        server.run()
        low = [event for event in server.log if isinstance(event, Preempted) and event.request_id == "r1"]
        assert len(low) == PROTECTED_AFTER

    def test_a_head_that_does_not_fit_is_not_skipped(self) -> None:
        server = Server(num_blocks=16, max_running=4, max_step_tokens=64)
        server.ask(range(30), 8)
        server.step()
        server.ask(range(100, 140), 2)
        server.ask([7], 2)
        server.step()
        assert server.running == ["r1"]
        server.run()
        admitted = [event.request_id for event in server.log if isinstance(event, Admitted)]
        assert admitted == ["r1", "r2", "r3"]

    def test_a_head_that_does_not_fit_is_not_matched_anew_at_every_step(self) -> None:
        server = Server(num_blocks=64, max_running=4)
        server.ask([7] * 100, 60)
        server.step()
        server.ask(range(100, 260), 4)
        opened = server.memory.next_id
        for _ in range(17):
            server.step()
            assert server.running == ["r1"]
        assert server.memory.next_id - opened == 1
        server.run()
        admitted = [event.request_id for event in server.log if isinstance(event, Admitted)]
        assert admitted == ["r1", "r2"]

    def test_a_more_urgent_head_is_looked_at_at_once(self) -> None:
        server = Server(num_blocks=64, max_running=4)
        server.ask([7] * 100, 60)
        server.step()
        server.ask(range(100, 260), 4)
        server.step()
        server.step()
        assert server.running == ["r1"]
        server.ask([1], 4, priority=HIGH)
        server.step()
        assert server.running == ["r3", "r1"]
        server.run()

    def test_a_head_fits_when_one_goes_that_held_only_shared_blocks(self) -> None:
        server = Server(num_blocks=42, max_step_tokens=100, max_running=4)
        server.ask(range(120), 4)
        server.step()
        server.ask(range(124), 2)
        server.ask(range(200, 240), 2)
        server.step()
        assert server.running == ["r1", "r2"], "what r2 still needs is set aside"
        free = server.memory.pool.num_free
        server.cancel("r2")
        assert server.memory.pool.num_free == free, "it had computed nothing itself"
        server.step()
        assert server.running == ["r1", "r3"]
        server.run()

    def test_a_clock_that_goes_back_lets_nobody_pass(self) -> None:
        server = Server(max_running=1, max_step_tokens=8)
        server.now_s = 5000.0
        server.ask([1], 4)
        server.ask([2], 4)
        server.step()
        server.now_s -= 3600.0
        server.ask([3], 4)
        server.run()
        admitted = [event.request_id for event in server.log if isinstance(event, Admitted)]
        assert admitted == ["r1", "r2", "r3"]

    def test_a_head_that_this_steps_budget_does_not_reach_waits_in_the_queue(self) -> None:
        server = Server(num_blocks=200, max_step_tokens=16, max_running=8)
        server.ask(range(60), 2)
        server.ask(range(100, 160), 2)
        server.step()
        assert server.running == ["r1"]
        server.run()

    def test_what_could_not_finish_alone_is_refused_at_once(self) -> None:
        server = Server(num_blocks=16)
        with raises_code(RequestTooLargeError, "pool_too_small"):
            server.ask([1] * 60, 6)
        server.ask([1] * 60, 5)
        server.run()
        with raises_code(RequestTooLargeError, "empty_request"):
            server.ask([], 5)

    @pytest.mark.parametrize("num_kept", [None, 12])
    @pytest.mark.parametrize(("num_prompt", "max_tokens"), [(60, 5), (8, 57), (44, 8)])
    def test_pins_yield_to_a_request_that_could_not_finish_otherwise(
        self, num_prompt: int, max_tokens: int, num_kept: int | None
    ) -> None:
        server = Server(num_blocks=16, num_kept=num_kept)
        space = replace(server.namespace, cache_group="default")
        for token, end_s in ((2, 1e4), (3, 1e5)):
            server.ask([token] * 8, 1)
            server.run()
            assert server.memory.pin(space, [token] * 8, end_s).num_tokens == 8
        server.ask([1] * num_prompt, max_tokens)
        server.run()
        num_yielded = 2 - len(server.memory.pins.tables)
        assert server.memory.stats().num_pins_yielded == num_yielded == -(-(num_prompt + max_tokens - 1 - 48) // 8)
        if num_yielded == 1:
            assert server.memory.divergence(space, [3] * 9).num_cached_tokens == 8, "the other is nearer its end"

    def test_pins_do_not_yield_to_requests_that_only_run_together(self) -> None:
        server = Server(num_blocks=16)
        space = replace(server.namespace, cache_group="default")
        server.ask([2] * 16, 1)
        server.run()
        assert server.memory.pin(space, [2] * 16, 1e5).num_tokens == 16
        for token in range(3, 6):
            server.ask([token] * 16, 20)
        server.run()
        assert server.scheduler.stats.num_preemptions > 0
        assert server.memory.stats().num_pins_yielded == 0

    def test_a_full_queue_says_whose_fault_it_is(self) -> None:
        server = Server(queue=QueueConfig(max_requests=20, class_reserve=0.0))
        for _ in range(20):
            server.ask([1], 1, tenant="a")
        with pytest.raises(QueueFullError):
            server.ask([1], 1, tenant="a")
        server.ask([1], 1, tenant="b")
        with pytest.raises(TenantShareError):
            server.ask([1], 1, tenant="a")
        server.run()

    def test_a_displaced_request_ends_with_all_its_answers_and_is_told_when_to_come_back(self) -> None:
        server = Server(queue=QueueConfig(max_requests=4, class_reserve=0.0))
        for _ in range(4):
            server.ask([1], 1, n=3, tenant="a")
        server.ask([1], 1, tenant="b")
        ends = [event for event in server.scheduler.take_events() if isinstance(event, SequenceFinished)]
        assert [(end.request_id, end.sequence_index, end.reason) for end in ends] == [
            ("r4", index, FinishReason.DISPLACED) for index in range(3)
        ]
        assert all(end.retry_after_s is not None and end.retry_after_s >= 1 for end in ends)
        server.ledger.open.pop("r4")
        server.run()

    def test_who_was_displaced_comes_back_when_it_was_told_to(self) -> None:
        server = Server(queue=QueueConfig(max_requests=4, class_reserve=0.0))
        for _ in range(4):
            server.ask([1], 1, tenant="a")
        server.ask([1], 1, tenant="b")
        told = [event for event in server.scheduler.take_events() if isinstance(event, SequenceFinished)]
        server.ledger.open.pop("r4")
        server.now_s += told[0].retry_after_s or 0
        server.ask([1], 1, tenant="a")
        with pytest.raises(TenantShareError):
            server.ask([1], 1, tenant="a")
        server.run()

    def test_how_long_to_wait_goes_by_how_fast_others_have_started(self) -> None:
        server = Server(max_running=1, queue=QueueConfig(max_requests=2, class_reserve=0.0))
        for _ in range(6):
            server.ask([1], 4)
            server.run()
        server.ask([1], 4)
        server.ask([1], 4)
        with pytest.raises(QueueFullError) as refused:
            server.ask([1], 4)
        assert refused.value.retry_after_s == 4, "a request takes four steps of a second each"
        server.run()

    def test_what_has_run_is_not_displaced_though_it_waits_again(self) -> None:
        server = Server(max_running=2, queue=QueueConfig(max_requests=4, class_reserve=0.0))
        for _ in range(4):
            server.ask([1], 3, tenant="a")
        server.step()
        server.scheduler.preempt_latest()
        server.scheduler.preempt_latest()
        server.ask([1], 1, tenant="a")
        server.ask([1], 1, tenant="a")
        server.ask([1], 1, tenant="b")
        server.run()
        assert {name for name, reason in reasons(server).items() if reason is FinishReason.DISPLACED} == {"r6"}

    def test_a_request_that_had_begun_before_a_crash_is_not_displaced_and_takes_no_place(self) -> None:
        server = Server(queue=QueueConfig(max_requests=2, class_reserve=0.0))
        server.ask([1, 2], 6)
        server.run()
        begun = server.ledger.entries["r1"].tokens[0][:2]
        fresh = Server(queue=QueueConfig(max_requests=2, class_reserve=0.0))
        fresh.ask([1, 2], 6, produced=[begun], tenant="a")
        fresh.ask([1], 1, produced=[[]], tenant="a")
        fresh.ask([1], 1, tenant="a")
        fresh.ask([1], 1, tenant="b")
        fresh.run()
        assert {name for name, reason in reasons(fresh).items() if reason is FinishReason.DISPLACED} == {"r3"}

    def test_an_id_in_use_is_refused(self) -> None:
        server = Server()
        server.ask([1], 2)
        with raises_code(DuplicateRequestError, "duplicate_request_id"):
            server.scheduler.submit(server.ledger.entries["r1"].request)
        server.run()


class TestCrash:
    def test_a_request_resumed_with_its_tokens_goes_on_as_if_nothing_had_happened(self) -> None:
        server = Server()
        server.ask(range(7), 12, frequency_penalty=0.5, stop_token_ids=frozenset({3}))
        for _ in range(5):
            server.step()
        had = list(server.ledger.entries["r1"].tokens[0])
        fresh = Server()
        fresh.ask(range(7), 12, produced=[had], frequency_penalty=0.5, stop_token_ids=frozenset({3}))
        fresh.run()
        server.run()
        assert fresh.ledger.entries["r1"].tokens == server.ledger.entries["r1"].tokens

    def test_continuations_resume_each_with_its_own_tokens(self) -> None:
        server = Server()
        server.ask(range(10), 12, n=3)
        for _ in range(6):
            server.step()
        had = [server.ledger.entries["r1"].tokens[index] for index in range(3)]
        fresh = Server()
        fresh.ask(range(10), 12, produced=had)
        fresh.run()
        server.run()
        assert fresh.ledger.entries["r1"].tokens == server.ledger.entries["r1"].tokens

    def test_a_resumed_request_is_told_what_its_leader_did_not_compute(self) -> None:
        server = Server(num_blocks=100)
        server.ask(range(5), 12, n=2, prompt_logprobs=0)
        server.run()
        had = [tokens[:8] for tokens in server.ledger.entries["r1"].tokens.values()]
        server.next_name = 0  # the same name and seed: the tokens it had are those it would get
        server.ask(range(5), 12, produced=had, prompt_logprobs=0)
        server.run()
        told = [event.num_cached_tokens for event in server.log if isinstance(event, Finished)]
        assert told == [0, 1], "four tokens computed for their log-probabilities, the fifth found with those it had"

    def test_a_crash_sends_nobody_away(self) -> None:
        server = Server(queue=QueueConfig(max_requests=2, class_reserve=0.0))
        for _ in range(5):
            server.ask([1, 2], 2, produced=[[]])
        server.run()
        assert len(server.events(Finished)) == 5

    def test_an_answer_that_was_complete_ends_at_once(self) -> None:
        server = Server()
        server.ask([1, 2], 6)
        server.run()
        whole = server.ledger.entries["r1"].tokens[0]
        fresh = Server()
        fresh.ask([1, 2], 6, produced=[whole], timeout_s=1.0)
        fresh.take(fresh.scheduler.take_events())
        assert reasons(fresh) == {"r1": FinishReason.LENGTH}
        assert not fresh.scheduler.live
        fresh.check()


class TestChecks:
    def test_the_order_of_running_sequences_is_checked(self) -> None:
        server = Server()
        server.ask([1], 5)
        server.ask([2], 5)
        server.step()
        server.scheduler.running.reverse()
        with raises_code(InvariantError, "urgency_order_broken"):
            invariants.check_scheduler(server.scheduler)
        with raises_code(InvariantError, "sequence_misplaced"):
            server.cancel("r1")

    def test_a_sequence_in_no_place_is_noticed(self) -> None:
        server = Server()
        server.ask([1], 5)
        server.step()
        sequence = server.scheduler.running[0]
        table, sequence.table = sequence.table, None
        with raises_code(InvariantError, "invariant_broken"):
            server.scheduler.placement.fork_if_due(sequence)
        sequence.table = table
        server.scheduler.live["r1"].sequences.append(sequence)
        with raises_code(InvariantError, "sequence_in_no_place"):
            invariants.check_scheduler(server.scheduler)

    def test_counted_tenants_are_checked(self) -> None:
        server = Server()
        server.ask([1], 5)
        server.scheduler.queue.tenants["default"].num_live = 9
        with raises_code(InvariantError, "tenants_miscounted"):
            invariants.check_scheduler(server.scheduler)


class TestWorkBesideTheStep:
    def test_a_sequence_that_is_held_is_left_out_and_gets_what_it_gets_alone(self) -> None:
        server = Server()
        server.ask([1, 2, 3], 5)
        server.ask([4, 5, 6], 5)
        server.step()
        slow = server.scheduler.running[0].sequence_id
        server.holds = lambda one: one.sequence_id == slow
        plan = server.plan()
        assert plan.waiting_ids == (slow,)
        assert [item.sequence_id for item in plan.items] == [one for one in (1, 2) if one != slow]
        server.finish(plan)
        server.holds = never_waits
        server.run()

    def test_all_that_run_may_be_held_and_go_on_later(self) -> None:
        server = Server()
        server.ask([1, 2, 3], 3)
        server.step()
        server.holds = lambda _one: True
        plan = server.plan()
        assert (plan.items, len(plan.waiting_ids)) == ((), 1)
        server.holds = never_waits
        server.run()

    def test_what_work_costs_is_charged_to_the_tenant_of_its_row(self) -> None:
        server = Server()
        server.ask([1, 2, 3], 1)
        plan = server.scheduler.plan(server.now_s)
        (item,) = plan.items
        tenant = server.scheduler.running[0].request.tenant
        row = RowResult(error=RowError(ROW_FAILED, "no"), work_tokens=70)
        server.scheduler.apply(StepResult(plan.step, {item.sequence_id: row}), 0.0)
        assert server.scheduler.queue.tenants[tenant].service == 70
