"""Sessions of pages that `quire dashboard` opens on the server's machine; they replace an admin key.

    admin socket ── token ──► quire dashboard ── in the URL, after # ──► page ── token ──► key ──► admin routes

A token starts one session, within TOKEN_S; the page exchanges the token for a key that stays in its tab. Other users
of the machine can read a token from the browser's command line. So a second use of a token ends its session, because
one of the two uses may be by another user.
"""

import hmac
import secrets
from collections import deque
from dataclasses import dataclass

from quire.api.http.errors import ApiError

TOKEN_S = 60.0
IDLE_S = 86_400.0
"""A session ends after this time without use of its key."""
MAX_SESSIONS = 16
"""Maximum concurrent sessions; one more ends the oldest."""
RANDOM_BYTES = 32


@dataclass(slots=True)
class _Session:
    token: str
    expires_s: float
    key: str = ""
    """Empty: the token has not been used yet."""


class PageSessions:
    """The page sessions of a server. Secrets are compared in constant time."""

    def __init__(self) -> None:
        self._sessions: deque[_Session] = deque(maxlen=MAX_SESSIONS)

    def make_token(self, now_s: float) -> str:
        """Create a token that can start one session."""
        session = _Session(secrets.token_urlsafe(RANDOM_BYTES), now_s + TOKEN_S)
        self._sessions.append(session)
        return session.token

    def begin(self, token: str | None, now_s: float) -> str:
        """Start the session of a token and return its key. Raises ApiError for an unknown, expired or used token."""
        session = self._find(token, now_s, is_key=False)
        if session is None:
            message = f"expected a quire dashboard token of the last {TOKEN_S:g} s; run quire dashboard again"
            raise ApiError(401, "invalid_api_key", message)
        if session.key:
            self._sessions.remove(session)
            message = (
                "this address opens the dashboard once, and was used before, possibly by another user of the machine: "
                "the page that it opened is closed now; run quire dashboard again"
            )
            raise ApiError(410, "used_up", message)
        session.key, session.expires_s = secrets.token_urlsafe(RANDOM_BYTES), now_s + IDLE_S
        return session.key

    def admits(self, key: str | None, now_s: float) -> bool:
        """Return whether this is the key of a session, and extend the session."""
        session = self._find(key, now_s, is_key=True)
        if session is not None:
            session.expires_s = now_s + IDLE_S
        return session is not None

    def _find(self, secret: str | None, now_s: float, *, is_key: bool) -> _Session | None:
        encoded, match = (secret or "").encode("utf-8", "replace"), None
        for session in self._sessions:
            expected = session.key if is_key else session.token
            if hmac.compare_digest(expected.encode(), encoded) and expected and now_s < session.expires_s:
                match = session
        return match
