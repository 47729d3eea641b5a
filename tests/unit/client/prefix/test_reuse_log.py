"""The log of what prompts found in the cache: what it keeps, forgets and counts."""

from hypothesis import given
from hypothesis import strategies as st

from quire.client.prefix.explanation import Difference, Explanation
from quire.client.prefix.reuse_log import MAX_AGE_S, MINUTE_S, PromptPart, ReuseLog, ReuseRecord, record_size


def record(request_id: str = "a", at_s: float = 0.0, *, reason: str = "first_seen", **more: object) -> ReuseRecord:
    told = Explanation(num_prompt_tokens=40, num_cached_tokens=8, reason=reason)
    fields: dict[str, object] = {
        "request_id": request_id,
        "tenant": "one",
        "cache_group": "tenant:one",
        "model": "tiny",
        "at_s": at_s,
        "explanation": told,
        "part": None,
        "num_lost_tokens": 32,
    }
    return ReuseRecord(**(fields | more))  # type: ignore[arg-type]


def long_difference(num_chars: int) -> Explanation:
    text = "x" * num_chars
    found = Difference(9, 1, "x", 2, "y", text, "x", "y")
    return Explanation(40, 8, "diverged", found)


def test_a_request_is_found_by_its_id_with_all_its_prompts_in_order() -> None:
    log = ReuseLog()
    log.add(record("a", 1.0, prompt_index=1))
    log.add(record("b", 1.0))
    log.add(record("a", 2.0, prompt_index=0))
    assert [one.prompt_index for one in log.find("a")] == [0, 1]
    assert log.find("nobody") == ()


def test_no_more_are_kept_than_there_is_room_for_and_the_oldest_goes_first() -> None:
    log = ReuseLog(max_records=3)
    for at in range(5):
        log.add(record(str(at), float(at)))
    assert len(log) == 3
    assert [bool(log.find(str(at))) for at in range(5)] == [False, False, True, True, True]


def test_what_is_an_hour_old_is_forgotten_when_another_comes_and_when_somebody_asks() -> None:
    log = ReuseLog()
    log.add(record("old", 0.0))
    log.add(record("new", MAX_AGE_S + 1))
    assert not log.find("old")
    log.forget_old(2 * MAX_AGE_S + 2)
    assert not log.find("new")
    assert (len(log), log.num_bytes) == (0, 0)


def test_long_texts_make_room_by_their_bytes() -> None:
    long_one = record("long", 1.0, explanation=long_difference(10_000))
    log = ReuseLog(max_bytes=record_size(long_one) + 2 * record_size(record()))
    log.add(long_one)
    log.add(record("b", 2.0))
    log.add(record("c", 3.0))
    assert log.find("long")
    log.add(record("d", 4.0, part=PromptPart("tool", 3, "search")))
    assert not log.find("long")
    assert log.num_bytes == sum(record_size(one) for name in "bcd" for one in log.find(name))


def test_a_record_larger_than_the_whole_log_is_not_kept_but_counted() -> None:
    log = ReuseLog(max_bytes=100)
    log.add(record())
    assert (len(log), log.num_bytes) == (0, 0)
    assert log.misses(0.0)[0].num_tokens == 32


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2000), st.integers(0, 400)), max_size=60))
def test_whatever_comes_no_bound_is_passed_and_bytes_add_up(coming: list[tuple[int, float, int]]) -> None:
    log, now_s, added = ReuseLog(max_records=8, max_age_s=1000.0, max_bytes=16_000), 0.0, list[ReuseRecord]()
    for request, later_s, num_chars in coming:
        now_s += later_s
        added.append(record(str(request), now_s, explanation=long_difference(num_chars)))
        log.add(added[-1])
        assert len(log) <= 8
        assert log.num_bytes <= 16_000
        kept = [one for name in range(4) for one in log.find(str(name))]
        assert len(kept) == len(log)
        assert sum(map(record_size, kept)) == log.num_bytes
        assert {id(one) for one in kept} == {id(one) for one in added[len(added) - len(kept) :]}
        assert all(one.at_s >= now_s - 1000.0 for one in kept)


def test_what_an_hour_cost_is_told_by_reason_the_most_expensive_first() -> None:
    log = ReuseLog(max_records=1)
    log.add(record("a", 1.0, reason="evicted", num_lost_tokens=5))
    log.add(record("b", 2.0, reason="diverged", num_lost_tokens=7, model="other"))
    log.add(record("c", 90.0, reason="evicted", num_lost_tokens=6))
    assert [(one.reason, one.num_tokens, one.num_requests) for one in log.misses(90.0)] == [
        ("evicted", 11, 2),
        ("diverged", 7, 1),
    ]
    assert [one.reason for one in log.misses(90.0, "other")] == ["diverged"]
    assert log.misses(90.0, "no such") == []


def test_costs_leave_the_hour_minute_by_minute() -> None:
    log = ReuseLog()
    log.add(record("a", 10.0))
    log.add(record("b", MINUTE_S + 10.0))
    assert log.misses(MAX_AGE_S + MINUTE_S - 0.001)[0].num_requests == 2
    assert log.misses(MAX_AGE_S + MINUTE_S)[0].num_requests == 1
    assert log.misses(MAX_AGE_S + 2 * MINUTE_S) == []
