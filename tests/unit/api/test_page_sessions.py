"""Tokens that begin a page's session once, and the keys of sessions."""

import pytest

from quire.api.access.page_sessions import IDLE_S, MAX_SESSIONS, TOKEN_S, PageSessions
from quire.api.http.errors import ApiError
from tests.support.errors import raises_code


def test_a_token_begins_one_session() -> None:
    sessions = PageSessions()
    token = sessions.make_token(0.0)
    key = sessions.begin(token, TOKEN_S - 1)
    assert key != token
    assert sessions.admits(key, 100.0)
    assert not sessions.admits(token, 100.0)


@pytest.mark.parametrize("presented", [None, "", "x", "\udcff", "caf\xe9"])
def test_nothing_else_begins_one_or_is_a_key(presented: str | None) -> None:
    sessions = PageSessions()
    sessions.make_token(0.0)
    with raises_code(ApiError, "invalid_api_key"):
        sessions.begin(presented, 0.0)
    assert not sessions.admits(presented, 0.0)


def test_a_token_that_comes_again_ends_the_session_that_it_began() -> None:
    sessions = PageSessions()
    token, other = sessions.make_token(0.0), sessions.make_token(0.0)
    key, others = sessions.begin(token, 1.0), sessions.begin(other, 1.0)
    with raises_code(ApiError, "used_up") as refused:
        sessions.begin(token, 500.0)
    assert refused.value.status == 410
    assert not sessions.admits(key, 500.0)
    assert sessions.admits(others, 500.0)


def test_a_token_that_nothing_used_in_time_is_none() -> None:
    sessions = PageSessions()
    token = sessions.make_token(0.0)
    with pytest.raises(ApiError) as refused:
        sessions.begin(token, TOKEN_S)
    assert refused.value.status == 401


def test_a_session_lasts_as_long_as_it_is_used() -> None:
    sessions = PageSessions()
    key = sessions.begin(sessions.make_token(0.0), 0.0)
    assert sessions.admits(key, IDLE_S - 1)
    assert sessions.admits(key, 2 * IDLE_S - 2)
    assert not sessions.admits(key, 3 * IDLE_S)


def test_sessions_are_bounded() -> None:
    sessions = PageSessions()
    keys = [sessions.begin(sessions.make_token(0.0), 0.0) for _ in range(MAX_SESSIONS + 1)]
    assert [sessions.admits(key, 1.0) for key in keys] == [False] + [True] * MAX_SESSIONS
