"""Whole lives of small servers, with everything going wrong. Thousands of seeds run in `make proof-scheduler`."""

from dataclasses import replace

import pytest

from quire.core.events import Admitted, Finished, PromptLogprobs, RequestEvent, SequenceFinished, Token
from quire.core.memory.block_table import BlockTable
from quire.core.memory.state_slots import StateSlots
from quire.core.memory.table_states import TableStates
from quire.core.request import Continuation, FinishReason, Request, ResolvedSampling
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.shares import RetryReservations
from quire.core.scheduling.waiting_queue import WaitingQueue
from quire.core.step import SlotCopy, WorkItem
from quire.errors import ConfigError, InvariantError
from quire.sim.server.config import CHAOTIC, SimConfig, make_config
from quire.sim.server.deliveries import Deliveries
from quire.sim.server.fault_plan import FaultRates
from quire.sim.server.simulation import Simulation
from quire.workload.scenarios import SCENARIOS
from tests.support.core.shadow import namespace
from tests.support.errors import raises_code


@pytest.mark.parametrize("seed", range(24))
def test_chaos_gives_every_client_what_it_would_have_got_alone(seed: int) -> None:
    report = Simulation(make_config("chaos", seed, 150)).run()
    assert report.violations == [], report.replay
    assert report.totals.num_idle_steps == 0


def test_chaos_with_guesses_gives_every_client_what_it_would_have_got_alone() -> None:
    reports = [Simulation(make_config("drafts", seed, 120)).run() for seed in range(16)]
    assert [report.replay for report in reports if report.violations] == []
    totals = [report.totals for report in reports]
    assert sum(one.num_idle_steps for one in totals) == 0
    num_accepted = sum(one.num_accepted_tokens for one in totals)
    assert num_accepted > 1000
    assert sum(one.num_draft_tokens for one in totals) - num_accepted > 1000


def test_guesses_change_neither_the_server_nor_its_faults() -> None:
    plain, guessing = make_config("chaos", 5), make_config("drafts", 5)
    same_size = replace(guessing.shape, max_step_tokens=plain.shape.max_step_tokens)
    assert (plain.shape, plain.faults, plain.guesser) == (same_size, guessing.faults, None)
    assert guessing.guesser is not None


@pytest.mark.parametrize("lie", ["committed", "accepted"])
def test_a_wrong_guess_that_is_taken_for_true_is_found_out(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lie == "committed":
        monkeypatch.setattr(WorkItem, "num_true_tokens", lambda item, _num_taken: len(item.token_ids))
    else:
        monkeypatch.setattr("quire.backends.oracle.accepted_tokens", lambda drafts, chosen: (*drafts, list(chosen)[-1]))
    assert any(Simulation(make_config("drafts", seed, 60)).run().violations for seed in range(6))


def test_chaos_on_a_model_with_states_gives_every_client_what_it_would_have_got_alone() -> None:
    reports = [Simulation(make_config("hybrid", seed, 120)).run() for seed in range(12)]
    assert [report.replay for report in reports if report.violations] == []
    totals = [report.totals for report in reports]
    assert sum(one.num_idle_steps for one in totals) == 0
    assert sum(one.hit_tokens for one in totals) > 1000
    assert sum(one.num_preemptions for one in totals) > 100
    assert sum(one.num_slot_evictions for one in totals) > 300
    assert sum(one.num_crashes for one in totals) > 5


def test_slots_change_neither_the_server_nor_its_faults() -> None:
    plain, hybrid = make_config("chaos", 5), make_config("hybrid", 5)
    assert (plain.shape, plain.faults) == (replace(hybrid.shape, num_slots=0), hybrid.faults)
    assert hybrid.shape.num_slots > hybrid.shape.max_running


@pytest.mark.parametrize("lie", ["not copied", "not kept", "kept of a failed row", "copied backwards"])
def test_a_state_that_is_not_what_it_should_be_is_found_out(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves, commit = StateSlots.pop_copies, TableStates.commit

    def wrong_moves(slots: StateSlots) -> tuple[tuple[SlotCopy, ...], tuple[SlotCopy, ...]]:
        copies, keeps = moves(slots)
        return {"not copied": (), "copied backwards": copies[::-1]}.get(lie, copies), () if lie == "not kept" else keeps

    def wrong_commit(states: TableStates, table: BlockTable, *, is_whole: bool) -> bool:
        return commit(states, table, is_whole=is_whole or bool(table.blocks and table.reserved_slot))

    if lie == "kept of a failed row":
        monkeypatch.setattr(TableStates, "commit", wrong_commit)
    else:
        monkeypatch.setattr(StateSlots, "pop_copies", wrong_moves)
    servers = [make_config("hybrid", seed, 120) for seed in (3, 8, 9, 17)]  # with slots to spare
    failing = [replace(config, faults=FaultRates(error_per_row=0.1)) for config in servers]
    assert any(Simulation(config).run().violations for config in failing)


def slow(seed: int) -> SimConfig:
    """A server that stands still for longer than anybody is told to wait."""
    config = make_config("chaos", seed, 120)
    shape = replace(config.shape, max_running=4, max_requests=10, step_s=seed % 4 * 0.4)
    return replace(config, shape=shape, faults=FaultRates(preempt_per_step=0.05, patient_tenants=0.6))


def test_who_comes_back_when_it_was_told_to_is_let_in_and_stays() -> None:
    reports = [Simulation(slow(seed)).run() for seed in range(12)]
    assert [report.violations for report in reports] == [[]] * len(reports)
    assert sum(report.totals.num_displaced for report in reports) > 20
    assert sum(report.totals.num_returned for report in reports) > 100


@pytest.mark.parametrize("lie", ["refused", "displaced"])
def test_a_queue_that_does_not_keep_its_word_is_found_out(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lie == "refused":
        monkeypatch.setattr(RetryReservations, "redeem", lambda *_: False)
    else:
        monkeypatch.setattr(WaitingQueue, "add_promised", WaitingQueue.add)
    complaints = (line for seed in range(12) for line in Simulation(slow(seed)).run().violations)
    assert any("came back after its retry time" in line for line in complaints)


@pytest.mark.parametrize("seed", [3, 11])
def test_the_same_seed_gives_the_same_log(seed: int) -> None:
    digests = {Simulation(make_config("chaos", seed, 120)).run().log_digest for _ in range(2)}
    assert len(digests) == 1
    assert Simulation(make_config("chaos", seed + 1, 120)).run().log_digest not in digests


@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - set(CHAOTIC)))
def test_every_scenario_runs_clean(scenario: str) -> None:
    report = Simulation(make_config(scenario, 1, 60)).run()
    assert report.violations == []
    assert sum(report.reasons().values()) == 60


def test_agents_that_start_together_share_what_they_have_in_common() -> None:
    totals = Simulation(make_config("agents", 5, 64)).run().totals
    assert totals.hit_tokens / totals.query_tokens > 0.7


def test_the_modest_tenants_do_not_wait_for_the_greedy_one() -> None:
    waits = {row.who: row.p95_s for row in Simulation(make_config("tenants", 3, 300)).run().waits()}
    assert max(waits[tenant] for tenant in "abcd") < waits["greedy"] / 4


def test_the_line_that_replays_a_run_replays_it() -> None:
    for seed in range(100, 104):
        config = make_config("chaos", seed)
        assert make_config("chaos", seed, config.num_requests) == config
        assert make_config("chaos", seed, 7).shape == config.shape


def test_a_bug_in_the_middle_of_a_run_is_told_with_the_line_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler) -> None:
        raise InvariantError("something is wrong")

    monkeypatch.setattr(Scheduler, "_end_overdue", broken)
    (violation,) = Simulation(make_config("chat", 1, 3)).run().violations
    assert "something is wrong" in violation


def test_a_run_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.sim.server.simulation.STEPS_PER_REQUEST", 1)
    assert "not finished after" in Simulation(make_config("chat", 1, 30)).run().violations[0]


def test_a_later_request_that_starts_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WaitingQueue.head

    def last_first(self: WaitingQueue) -> object:
        return max(self, key=lambda sequence: sequence.key) if len(self) else original(self)

    monkeypatch.setattr(WaitingQueue, "head", last_first)
    report = Simulation(make_config("flood", 1, 200)).run()
    assert "to start first" in report.violations[0]


def test_an_unknown_scenario_is_refused_by_name() -> None:
    with raises_code(ConfigError, "invalid_config"):
        make_config("quiet", 1)


def test_a_server_that_does_nothing_is_called_wedged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_admit", lambda self: None)
    report = Simulation(make_config("chat", 1, 3)).run()
    assert report.violations == ["wedged: requests wait and none runs"]
    assert report.totals.num_idle_steps > 0
    assert report.replay == "quire sim --scenario chat --seed 1 --requests 3"


class TestLedger:
    """The books themselves: each wrong must be noticed."""

    def setup_method(self) -> None:
        self.ledger = Deliveries(50)
        self.request = Request("r", (1, 2, 3), namespace(4), 0.0, ResolvedSampling(max_tokens=2))
        self.ledger.add(self.request)

    def complaint(self, *events: RequestEvent) -> str:
        for event in events:
            self.ledger.take(event)
        return " ".join(self.ledger.violations)

    def test_a_wrong_token(self) -> None:
        ended = SequenceFinished("r", 0, FinishReason.LENGTH, 2, None)
        tokens = [Token("r", 0, 0, 1, None), Token("r", 0, 0, 2, None)]
        assert "continuation 0: expected" in self.complaint(*tokens, ended, Finished("r", 3, 0, 2))

    def test_a_wrong_beginning_of_a_cancelled_answer(self) -> None:
        ended = SequenceFinished("r", 0, FinishReason.CANCELLED, 1, None)
        assert "continuation 0: expected" in self.complaint(Token("r", 0, 0, 1, None), ended, Finished("r", 3, 0, 1))

    def test_a_wrong_reason(self) -> None:
        ended = SequenceFinished("r", 0, FinishReason.STOP, 0, None)
        assert "bad finish reason stop" in self.complaint(ended, Finished("r", 3, 0, 0))

    def test_an_event_after_the_end(self) -> None:
        self.ledger.record_cancellation("r")
        ended = SequenceFinished("r", 0, FinishReason.CANCELLED, 0, None)
        last = Finished("r", 3, 0, 0)
        assert "Finished after the end" in self.complaint(ended, last, last)

    def test_an_end_without_all_continuations(self) -> None:
        assert "ended with continuations [] only" in self.complaint(Finished("r", 3, 0, 0))

    def test_a_continuation_that_ends_twice_and_speaks_after(self) -> None:
        ended = SequenceFinished("r", 0, FinishReason.CANCELLED, 0, None)
        complaint = self.complaint(ended, ended, Token("r", 0, 0, 1, None))
        assert "ended twice" in complaint
        assert "a token after" in complaint

    def test_a_lost_token_and_unasked_logprobs(self) -> None:
        complaint = self.complaint(Token("r", 0, 0, 2, ()))  # type: ignore[arg-type]
        assert "expected token 1, got token 2" in complaint
        assert "logprobs missing or not requested" in complaint

    def test_prompt_logprobs_out_of_order(self) -> None:
        assert "out of order" in self.complaint(PromptLogprobs("r", 2, ()))

    def ended_by(self, reason: FinishReason) -> str:
        return self.complaint(SequenceFinished("r", 0, reason, 0, None), Finished("r", 3, 0, 0))

    def test_an_ending_that_nobody_caused(self) -> None:
        assert "without a cancellation" in self.ended_by(FinishReason.CANCELLED)

    def test_a_deadline_that_was_not_there(self) -> None:
        assert "ended by its deadline None" in self.ended_by(FinishReason.DEADLINE)

    def test_an_error_without_a_failed_row(self) -> None:
        assert "none of its rows failed" in self.ended_by(FinishReason.ERROR)

    def test_a_cancelled_request_that_goes_on(self) -> None:
        self.ledger.record_cancellation("r")
        self.ledger.record_cancellation("gone")
        complaint = self.complaint(Token("r", 0, 0, 1, None))
        assert "a token after it was cancelled" in complaint
        assert "a token before it was admitted" in complaint
        assert "cancelled, and ended by ['length']" in self.ended_by(FinishReason.LENGTH)

    def test_a_continuation_that_was_cancelled_alone_and_goes_on(self) -> None:
        self.ledger.record_continuation_cancellation("r", 0)
        self.ledger.record_continuation_cancellation("r", 7)
        self.ledger.record_continuation_cancellation("gone", 0)
        assert self.ledger.open_cancellations() == [("r", 0)]
        assert "a token after it was cancelled" in self.complaint(Token("r", 0, 0, 1, None))
        assert "cancelled continuations [0] went on" in self.ended_by(FinishReason.LENGTH)

    def test_a_wrong_bill(self) -> None:
        self.ledger.record_cancellation("r")
        ended = SequenceFinished("r", 0, FinishReason.CANCELLED, 0, None)
        assert "output tokens, got Finished" in self.complaint(ended, Finished("r", 3, 64, 0))

    def test_the_first_start_counts(self) -> None:
        assert self.complaint(Admitted("r", 0.0, 1.0, 0), Admitted("r", 0.0, 9.0, 0)) == ""
        assert self.ledger.entries["r"].first_wait_s == 1.0


def test_what_is_left_of_a_request_that_was_answered_in_part_is_not_sent_away_after_a_crash() -> None:
    books = Deliveries(vocabulary_size=8)
    request = Request("r", (1, 2), namespace(4), 0.0, continuations=(Continuation(0), Continuation(1)))
    books.add(request)
    assert not books.unfinished()[0].has_reservation, "it waits, and may have to make room"
    books.take(Admitted("r", 0.0, 0.0, 0))
    books.take(SequenceFinished("r", 0, FinishReason.LENGTH, 0, None))
    (again,) = books.unfinished()
    assert ([one.index for one in again.continuations], again.has_reservation) == ([1], True)


@pytest.mark.parametrize("scenario", ["chaos", "hybrid"])
def test_times_that_were_told_are_kept_though_the_clock_goes_back(scenario: str) -> None:
    assert not Simulation(make_config(scenario, 672180277657)).run().violations
