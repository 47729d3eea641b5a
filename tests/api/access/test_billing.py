"""What a request takes from its key's quota, and what it gets back."""

from pathlib import Path

import pytest

from quire.api.access.auth import Caller
from quire.api.access.billing import Bill, check_quota, open_bill, text_tokens
from quire.api.access.keys import add_key
from quire.api.access.quotas import Bucket, Quota
from quire.api.http.errors import ApiError
from quire.api.models.registry import ModelEntry, Models
from quire.core.request import PriorityClass
from tests.support.errors import raises_code
from tests.support.servers.local_api import house


def caller(requests: int | None = None, tokens: int | None = None) -> Caller:
    quota = Quota(Bucket(requests) if requests else None, Bucket(tokens) if tokens else None)
    return Caller("alice", PriorityClass.NORMAL, quota)


def test_a_bill_is_settled_to_what_it_came_to_and_given_back_whole() -> None:
    asking = caller(1000, 1_000_000)
    bill = open_bill(asking, 4000, None)
    assert (bill.num_requests, bill.num_tokens) == (1, 500)
    bill.settle(4, 80)
    bill.count_output(10)
    bill.count_output(25)
    assert (bill.num_requests, bill.num_tokens) == (4, 105)
    assert asking.quota.requests is not None
    assert asking.quota.tokens is not None
    taken = asking.quota.requests.full_at_s, asking.quota.tokens.full_at_s
    bill.refund()
    back = asking.quota.requests.full_at_s, asking.quota.tokens.full_at_s
    assert [(one - other) for one, other in zip(taken, back, strict=True)] == pytest.approx(
        [4 * 60 / 1000, 105 * 60 / 1_000_000]
    )
    assert (bill.num_requests, bill.num_tokens) == (0, 0)


def test_what_was_let_in_may_overdraw_and_the_next_has_to_wait_for_it() -> None:
    asking = caller(tokens=60)
    open_bill(asking, 8, None).settle(1, 120)
    with raises_code(ApiError, "rate_limit_exceeded") as told:
        check_quota(asking, 8, None)
    assert told.value.retry_after_s == pytest.approx(61, abs=1)


def test_a_bill_without_limits_takes_nothing() -> None:
    bill = Bill(caller())
    bill.settle(3, 100)
    bill.refund()
    assert (bill.num_requests, bill.num_tokens) == (0, 0)


def test_text_is_a_token_for_every_eight_bytes_and_never_more_than_the_longest_sequence() -> None:
    with house() as here:
        models = here.admission.models
        assert [text_tokens(count, models.max_sequence_tokens) for count in (0, 1, 8, 9, 800)] == [0, 1, 1, 2, 100]
        assert text_tokens(2_000_000, models.max_sequence_tokens) == 512
    assert text_tokens(8_000_000, Models([ModelEntry("loading")]).max_sequence_tokens) == 1_000_000


def test_what_is_answered_costs_what_it_came_to(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", requests_per_minute=100, tokens_per_minute=100_000)
    prompts = [list(range(60, 100)), list(range(40, 60))]
    asked: dict[str, object] = {
        "model": "oracle",
        "prompt": prompts,
        "max_tokens": 5,
        "ignore_eos": True,
        "n": 2,
        "user": "x" * 8000,
    }
    with house(keys_file=tmp_path / "keys.json") as here:
        assert here.post("/v1/completions", asked, x_api_key=secret).status == 200
        left = here.post("/tokenize", {"model": "oracle", "prompt": "x"}, x_api_key=secret).headers
    assert left["x-ratelimit-remaining-requests"] == str(100 - 2 * 2 - 1)
    # 60 in the prompts, 20 in the answers; refilling gives back a token or so on a slow machine, never 1,000 of them.
    assert int(left["x-ratelimit-remaining-tokens"]) >= 100_000 - 80 - 10
