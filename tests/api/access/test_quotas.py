"""Whenever it is asked and however often it was used: what a bucket says is there can be taken at once."""

from hypothesis import example, given
from hypothesis import strategies as st

from quire.api.access.quotas import Bucket

CLOCKS = st.floats(0, 1e9)
A_MINUTE = st.integers(1, 10_000_000)


@given(A_MINUTE, CLOCKS)
@example(100, 453.7)  # in sixty seconds more, the clock's numbers have one bit less after the point
def test_a_full_bucket_lets_all_of_it_be_taken(per_minute: int, now_s: float) -> None:
    bucket = Bucket(per_minute)
    assert bucket.available(now_s) == per_minute
    assert bucket.wait_s(per_minute, now_s) == 0


@example(209949, 0.0, [(0.0, 1.5), (1.00001, 0.0), (83.75, 0.0)])  # one more fits but for less than a microsecond
@given(A_MINUTE, CLOCKS, st.lists(st.tuples(st.floats(0, 90), st.floats(0, 1.5)), max_size=8))
def test_what_is_left_can_be_taken_and_what_is_more_has_to_wait(
    per_minute: int, now_s: float, used: list[tuple[float, float]]
) -> None:
    bucket = Bucket(per_minute)
    for later_s, part in used:
        now_s += later_s
        bucket.take(int(part * per_minute), now_s)
    there = bucket.available(now_s)
    assert bucket.wait_s(there, now_s) == 0 or there == 0
    if there < per_minute <= 1_000_000:  # of more, several fit into what is no time
        assert bucket.wait_s(there + 1, now_s) > 0
