"""What outsiders' words may cost: three bounds, one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import work_budget
from quire.core.work_budget import (
    WorkAccount,
    WorkBudget,
    WorkCut,
    WorkKind,
    WorkLimit,
    WorkSpent,
)

MASK: WorkKind = "grammar_mask"
CHECK: WorkKind = "grammar_check"
LIMITS = {MASK: WorkLimit(1.0, 2.0, per_unit_s=0.5), CHECK: WorkLimit(1.0, 2.0)}


def budget(rate: float = 1.0, burst_s: float = 100.0) -> WorkBudget:
    return WorkBudget(LIMITS, rate, burst_s)


def test_a_piece_that_takes_longer_than_one_may_is_cut_at_once() -> None:
    one = budget()
    assert one.spend(WorkAccount("a"), CHECK, 1.5, 0.0) == WorkCut(CHECK, "at_once", 1.5, 1.0)
    assert one.num_cut == {CHECK: 1}


def test_pieces_of_one_request_add_up_to_its_bound() -> None:
    one, account = budget(), WorkAccount("a")
    assert [one.spend(account, CHECK, 0.9, 0.0) for _ in range(2)] == [None, None]
    cut = one.spend(account, CHECK, 0.9, 0.0)
    assert cut is not None
    assert (cut.scope, cut.retry_after_s) == ("request", 0)


def test_units_of_work_extend_the_bound_of_a_request() -> None:
    one, account = budget(), WorkAccount("a")
    assert all(one.spend(account, MASK, 0.5, 0.0) is None for _ in range(50))


def test_kinds_are_bounded_apart_and_added_for_the_charge() -> None:
    one, account = budget(), WorkAccount("a")
    one.spend(account, CHECK, 0.75, 0.0)
    one.spend(account, MASK, 0.25, 0.0)
    assert account.total_s == 1.0
    assert account.service_tokens == work_budget.SERVICE_TOKENS_PER_S


def test_a_tenants_requests_fill_one_bucket_that_empties_with_time() -> None:
    one = budget(rate=0.5, burst_s=2.0)
    assert one.spend(WorkAccount("a"), CHECK, 1.0, 0.0) is None
    assert one.spend(WorkAccount("a"), CHECK, 1.0, 0.0) is None
    cut = one.spend(WorkAccount("a"), CHECK, 1.0, 0.0)
    assert cut == WorkCut(CHECK, "tenant", 3.0, 2.0, retry_after_s=2)
    assert one.spend(WorkAccount("b"), CHECK, 1.0, 0.0) is None
    assert one.spend(WorkAccount("a"), CHECK, 1.0, 4.0) is None
    assert one.spent().seconds == {"a": 4.0, "b": 1.0}


def test_what_is_left_is_the_least_of_the_three_bounds() -> None:
    one, account = budget(rate=0.5, burst_s=1.5), WorkAccount("a")
    assert one.left_s(account, CHECK, 0.0) == 1.0
    one.spend(account, CHECK, 0.75, 0.0)
    assert one.left_s(account, CHECK, 0.0) == 0.75
    one.spend(account, CHECK, 0.75, 0.0)
    assert one.left_s(account, CHECK, 0.0) == 0.0
    assert one.left_s(account, CHECK, 1.0) == 0.5


def test_the_tenant_that_is_forgotten_has_the_emptiest_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_budget, "MAX_TENANTS", 2)
    one = budget()
    for tenant, seconds in (("busy", 0.9), ("idle", 0.1), ("new", 0.5)):
        one.spend(WorkAccount(tenant), CHECK, seconds, 0.0)
    assert set(one.spent().seconds) == {"busy", "new"}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 3.0), st.floats(0.0, 3.0)), max_size=30))
def test_a_bucket_never_holds_more_than_was_put_in_nor_less_than_nothing(
    pieces: list[tuple[str, float, float]],
) -> None:
    one, now_s, spent = budget(rate=0.5, burst_s=2.0), 0.0, {"a": 0.0, "b": 0.0}
    for tenant, seconds, pause_s in pieces:
        now_s += pause_s
        cut = one.spend(WorkAccount(tenant), MASK, seconds, now_s)
        spent[tenant] += seconds
        assert 0.0 <= one.left_s(WorkAccount(tenant), MASK, now_s) <= 1.0
        if cut is not None and cut.scope == "tenant":
            assert 2.0 < cut.spent_s <= spent[tenant] + 1e-9


def test_where_tenants_take_turns_none_is_cut_and_all_is_counted() -> None:
    one = WorkBudget({MASK: WorkLimit(1.0, 2.0, has_turns=True), CHECK: WorkLimit(1.0, 2.0)}, 1.0, 1.0)
    for _ in range(100):
        assert one.spend(WorkAccount("t"), MASK, 0.1, 0.0) is None
    assert one.left_s(WorkAccount("t"), CHECK, 0.0) == 1.0
    assert round(one.spent().seconds["t"]) == 10


def test_a_verdict_is_the_error_that_a_client_receives() -> None:
    error = WorkCut(CHECK, "tenant", 3.0, 2.0, retry_after_s=2).error
    assert (error.code, error.kind, error.scope, error.retry_after_s) == ("work_budget_exceeded", CHECK, "tenant", 2)


def test_what_two_places_spent_adds_up_by_tenant_and_by_kind() -> None:
    both = WorkSpent({"a": 1.0}, {CHECK: 1}) + WorkSpent({"a": 0.5, "b": 2.0}, {MASK: 3})
    assert both == WorkSpent({"a": 1.5, "b": 2.0}, {CHECK: 1, MASK: 3})
