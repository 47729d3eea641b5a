"""Authentication. Every route has a guard, a function that admits or rejects its requests; a route without a guard
cannot be added.

`require_key` admits callers with an API key. `require_admin` admits callers with an admin key, and pages that the
operator opened with `quire dashboard`. Both admit every caller of a server without keys. `require_token` admits such a
page once, and exchanges its token for a key. `public` admits every caller.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from quire.api.access.keys import Key, KeyRing
from quire.api.access.page_sessions import PageSessions
from quire.api.access.quotas import Quota, Quotas, Terms
from quire.api.http.errors import ApiError
from quire.core.request import PriorityClass
from quire.errors import InvariantError

DEFAULT_TENANT = "default"
"""The tenant of all requests on a server without keys."""


SHARED = "group:"
"""Prefix of cache groups that several keys share; a tenant's own group has the prefix `tenant:`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the tenant that is charged, its most urgent priority class, and its quota."""

    tenant: str
    ceiling: PriorityClass
    quota: Quota
    is_anonymous: bool = False
    """Whether the server has no keys, so that all clients are this caller."""
    is_admin: bool = False
    """Whether the request's key is an admin key; never derived from the tenant's name."""
    cache_group: str = ""
    """The group of keys with which the tenant shares cached blocks; empty: it shares none."""


class Gate:
    """Identifies the caller of a request by its API key."""

    def __init__(self, ring: KeyRing, num_gateways: Callable[[], int] = lambda: 1, cache_group: str = "") -> None:
        """`num_gateways` returns the current number of gateways, among which a key's quotas are divided. `cache_group`
        is the default cache group, for keys without one and for servers without keys."""
        self.ring = ring
        self._cache_group = cache_group
        self._num_gateways = num_gateways
        self._quotas = Quotas()
        quota = self._quotas.of(DEFAULT_TENANT, Terms())
        self.operator = self._anonymous = Caller(
            DEFAULT_TENANT, PriorityClass.HIGH, quota, is_anonymous=True, is_admin=True, cache_group=cache_group
        )
        """The caller of all requests without keys, and of pages that the operator opened."""

    def caller(self, authorization: str | None, x_api_key: str | None) -> Caller:
        """Return the caller with the key in these headers. Raises ApiError 401 if the key is missing or unknown."""
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
    """Admit callers with an admin key or the key of a page's session. Raises ApiError 403 for other keys."""
    if is_page_admitted(request):
        gate: Gate = request.app.state.gate
        request.scope["quire.caller"] = gate.operator
        return gate.operator
    caller = await require_key(request)
    if not caller.is_admin:
        raise ApiError(403, "admin_key_needed", "expected an admin key; create one with: quire keys add NAME --admin")
    return caller


def is_page_admitted(request: Request) -> bool:
    """Return whether the request has the key of a page session that has not ended; this extends the session."""
    sessions: PageSessions = request.app.state.admission.page_sessions
    return sessions.admits(_bearer(request.headers.get("authorization")), monotonic())


async def require_token(request: Request) -> None:
    """Begin a page's session with its token, which is valid once. Raises ApiError."""
    sessions: PageSessions = request.app.state.admission.page_sessions
    request.scope["quire.page_key"] = sessions.begin(_bearer(request.headers.get("authorization")), monotonic())


async def public(request: Request) -> None:
    """Admit every caller."""


def _bearer(authorization: str | None) -> str | None:
    scheme, _, secret = (authorization or "").partition(" ")
    return secret.strip() or None if scheme.lower() == "bearer" else None


def _terms(key: Key, num_gateways: int) -> Terms:
    """Return this gateway's part of the key's limits, at least 1 each so that the key can be used at every gateway."""
    limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrent)
    return Terms(*(None if limit is None else max(1, limit // num_gateways) for limit in limits))


def _unauthorized(*, is_missing: bool) -> ApiError:
    message = (
        "expected an API key, got none; send the header Authorization: Bearer KEY"
        if is_missing
        else "unknown API key; check it, or request one from the operator of this server"
    )
    return ApiError(401, "invalid_api_key", message, headers=(("www-authenticate", "Bearer"),))


Endpoint = Callable[..., Awaitable[ASGIApp]]
Guard = Callable[[Request], Awaitable[object]]
"""Admits a request or raises ApiError."""


class GuardedRoute(Route):
    """A route whose guard runs first."""

    def __init__(self, method: str, path: str, endpoint: Endpoint, guard: Guard) -> None:
        async def handle(request: Request) -> ASGIApp:
            await guard(request)
            return await endpoint(request, **request.path_params)

        super().__init__(path, handle, methods=[method], include_in_schema=method != "HEAD")
        self.methods = {method}  # the framework accepts HEAD wherever GET is
        self.endpoint = endpoint
        self.guard = guard


class GuardedRoutes(list[BaseRoute]):
    """The routes of an application. Every method of the framework that adds a route calls `append`."""

    def append(self, route: BaseRoute) -> None:
        """Add a route. Raises InvariantError for a route without a guard."""
        if not isinstance(route, GuardedRoute):
            path = getattr(route, "path", route)
            raise InvariantError(f"expected a route with a guard, got {path} without one; add the route with add_route")
        super().append(route)
