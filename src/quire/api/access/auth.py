"""Authentication. A guard of every route, never a matter of paths: a route without one cannot be added.

`require_key` admits callers with a key, or all callers where there are no keys. `require_admin` admits callers with an
admin key, pages that the operator opened, or where there are no keys every caller. `require_token` admits a page that
the operator opens. `public` admits every caller, and marks a public
route as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from starlette.requests import Request

from quire.api.access.keys import Key, KeyRing
from quire.api.access.page_sessions import PageSessions
from quire.api.access.quotas import Quota, Quotas, Terms
from quire.api.http.errors import ApiError
from quire.core.request import PriorityClass

DEFAULT_TENANT = "default"
"""The tenant where there are no keys."""


SHARED = "group:"
"""Prefix of the cache group of several keys. A tenant's own has another, and no name has a colon in it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that is charged, its most urgent class, and its quota."""

    tenant: str
    ceiling: PriorityClass
    quota: Quota
    is_anonymous: bool = False
    """There are no keys: every client is this caller."""
    is_admin: bool = False
    """Whether this is the operator: by the key that was presented, never by a tenant's name."""
    cache_group: str = ""
    """The group that it shares cached blocks with; empty: it shares with itself alone."""


class Gate:
    """Turns a presented key into a caller."""

    def __init__(self, ring: KeyRing, num_gateways: Callable[[], int] = lambda: 1, cache_group: str = "") -> None:
        """`num_gateways` returns among how many servers like this one a key's quotas are divided at this moment;
        `cache_group` is the group of keys that name none, and of all callers where there are no keys."""
        self.ring = ring
        self._cache_group = cache_group
        self._num_gateways = num_gateways
        self._quotas = Quotas()
        quota = self._quotas.of(DEFAULT_TENANT, Terms())
        self.operator = self._anonymous = Caller(
            DEFAULT_TENANT, PriorityClass.HIGH, quota, is_anonymous=True, is_admin=True, cache_group=cache_group
        )
        """Any caller where there are no keys; a page that the operator opened."""

    def caller(self, authorization: str | None, x_api_key: str | None) -> Caller:
        """The caller of this key. Raises ApiError, without a reason."""
        if not self.ring.is_locked:
            return self._anonymous
        secret = _bearer(authorization) or x_api_key
        key = self.ring.find(secret) if secret else None
        if key is None:
            raise _unauthorized(is_missing=not secret)
        quota = self._quotas.of(key.name, _terms(key, self._num_gateways()))
        group = key.cache_group or self._cache_group
        return Caller(key.name, key.ceiling, quota, is_admin=key.admin, cache_group=group)


async def require_key(request: Request) -> Caller:
    """Admit callers with a key."""
    gate: Gate = request.app.state.gate
    caller = gate.caller(request.headers.get("authorization"), request.headers.get("x-api-key"))
    request.scope["quire.caller"] = caller
    if (record := request.scope.get("quire.record")) is not None:
        record.tenant = caller.tenant
    return caller


async def require_admin(request: Request) -> Caller:
    """Admit callers with an admin key, and the key of a page's session."""
    if is_page_admitted(request):
        gate: Gate = request.app.state.gate
        request.scope["quire.caller"] = gate.operator
        return gate.operator
    caller = await require_key(request)
    if not caller.is_admin:
        raise ApiError(403, "admin_key_needed", "expected an admin key; create one with: quire keys add NAME --admin")
    return caller


def is_page_admitted(request: Request) -> bool:
    """Whether this is a request of a page that the operator opened, whose session goes on."""
    sessions: PageSessions = request.app.state.admission.page_sessions
    return sessions.admits(_bearer(request.headers.get("authorization")), monotonic())


async def require_token(request: Request) -> None:
    """Begin a page's session; its token is used up with that."""
    sessions: PageSessions = request.app.state.admission.page_sessions
    request.scope["quire.page_key"] = sessions.begin(_bearer(request.headers.get("authorization")), monotonic())


async def public(request: Request) -> None:
    """Admit every caller."""


def _bearer(authorization: str | None) -> str | None:
    scheme, _, secret = (authorization or "").partition(" ")
    return secret.strip() or None if scheme.lower() == "bearer" else None


def _terms(key: Key, num_gateways: int) -> Terms:
    """A gateway's part of what the key allows; at least one of each, or the key would be of no use there."""
    allowed = (key.requests_per_minute, key.tokens_per_minute, key.concurrent)
    return Terms(*(None if one is None else max(1, one // num_gateways) for one in allowed))


def _unauthorized(*, is_missing: bool) -> ApiError:
    message = (
        "expected an API key, got none; send the header Authorization: Bearer KEY"
        if is_missing
        else "unknown API key; check it, or request one from the operator of this server"
    )
    return ApiError(401, "invalid_api_key", message, headers=(("www-authenticate", "Bearer"),))
