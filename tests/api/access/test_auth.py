"""Default deny: every route asks for a key once there are keys, whatever the path, the host or the method."""

import asyncio
import hmac
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.access import keys as keys_module
from quire.api.access.auth import Gate, GuardedRoute, public, require_admin, require_key, require_token
from quire.api.access.keys import Key, KeyRing, add_key, digest_of, find, read_keys, revoke_key, write_keys
from quire.api.app import add_route, make_app
from quire.api.asgi import RequestMiddleware
from quire.api.http.errors import ApiError
from quire.api.models.registry import Models
from quire.api.server_state import ServerState
from quire.api.web_page import PAGES
from quire.core.request import PriorityClass
from quire.errors import ConfigError, InvariantError
from quire.observe.metrics import Metrics
from tests.support.errors import raises_code
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

PROBES = {"/health", "/ready"}
PUBLIC = {*PROBES, *(path for page in PAGES for path in page.contents)}
"""The page's files are the same for everybody."""
BODY = {"model": "oracle", "prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, dict[str, str]]]:
    """A server with a good key and a revoked one."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    secrets = {"good": add_key(path, "alice"), "revoked": add_key(path, "mallory"), "urgent": ""}
    secrets["urgent"] = add_key(path, "urgent", max_class="high")
    revoke_key(path, "mallory")
    with house(models={"oracle": talker()}, keys_file=path) as here:
        yield here, secrets


def routes() -> list[GuardedRoute]:
    app = make_app(ServerState(Models([]), Metrics()), Gate(KeyRing(None)))
    found = [route for route in app.routes if isinstance(route, GuardedRoute)]
    assert len(found) == len(app.routes), "a route that is no GuardedRoute has no guard"
    return found


def test_every_route_has_a_guard_and_only_probes_and_the_page_are_public() -> None:
    guards = [(route.path, route.guard) for route in routes()]
    assert all(guard in (require_key, require_admin, require_token, public) for _, guard in guards)
    assert {path for path, guard in guards if guard is public} == PUBLIC
    assert {path for path, guard in guards if guard is not public}.isdisjoint(PUBLIC)
    assert len({path for path, _ in guards} - PUBLIC) == 20


@pytest.mark.parametrize("presented", ["none", "wrong", "revoked", "empty", "basic", "prefix", "longer"])
def test_no_door_opens_without_a_key(locked: tuple[LiveServer, dict[str, str]], presented: str) -> None:
    here, secrets = locked
    headers: dict[str, str] = {
        "none": {},
        "wrong": {"authorization": "Bearer quire-0000"},
        "revoked": {"authorization": f"Bearer {secrets['revoked']}"},
        "empty": {"authorization": "Bearer "},
        "basic": {"authorization": f"Basic {secrets['good']}"},
        "prefix": {"authorization": f"Bearer {secrets['good'][:-1]}"},
        "longer": {"x_api_key": secrets["good"] + "x"},
    }[presented]
    hosts = ("127.0.0.1", "x/health?", "x#", "/health", "health", "localhost/ready?a=")
    for route in routes():
        if route.path in PUBLIC:
            continue
        path = route.path.replace("{name:path}", "oracle")
        variants = (
            path,
            f"{path}?x=/health",
            f"{path}#/health",
            f"/health/..{path}",
            f"{path}/",
            f"/{path}",
            f"{path};/health",
        )
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            for variant in variants:
                for host in hosts if variant == path else hosts[:1]:
                    reply = here.request(method, variant, BODY if method == "POST" else None, host=host, **headers)
                    assert reply.status in (400, 401, 404, 405), (method, variant, host, reply.status)
                    assert reply.status != 200
        assert here.request(next(iter(route.methods or ())), path, b"{}", **headers).status == 401


def test_the_two_public_doors_say_nothing(locked: tuple[LiveServer, dict[str, str]]) -> None:
    for path in PROBES:
        reply = locked[0].get(path)
        assert (reply.status, reply.data) == (200, b"")


def test_a_key_opens_in_either_header(locked: tuple[LiveServer, dict[str, str]]) -> None:
    here, secrets = locked
    assert here.post("/v1/completions", BODY, authorization=f"Bearer {secrets['good']}").status == 200
    assert here.post("/v1/completions", BODY, x_api_key=secrets["good"]).status == 200
    refused = here.get("/v1/models")
    assert (refused.status, refused.code) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"


def test_no_request_is_more_urgent_than_its_key(locked: tuple[LiveServer, dict[str, str]]) -> None:
    here, secrets = locked
    chat = {"model": "oracle", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

    def tier(who: str, headers: dict[str, str] | None = None, **asked: Any) -> str:
        told = here.post("/v1/chat/completions", chat | asked, x_api_key=secrets[who], **(headers or {}))
        return str(told.json["service_tier"])

    assert [tier("good", priority=number) for number in (-5, 0, 5)] == ["default", "default", "flex"]
    assert [tier("urgent", priority=number) for number in (-5, 0, 5)] == ["priority", "default", "flex"]
    assert [tier("urgent", service_tier=word) for word in ("priority", "auto", "flex")] == [
        "priority",
        "default",
        "flex",
    ]
    assert tier("good", service_tier="priority") == "default"
    assert tier("urgent", {"x_vllm_priority": "3"}, priority=-5) == "flex"
    assert tier("urgent", {"x_vllm_priority": "soon"}, priority=-5) == "priority"


def test_tenants_do_not_see_each_others_cache(locked: tuple[LiveServer, dict[str, str]]) -> None:
    here, secrets = locked
    asked = {"model": "oracle", "prompt": list(range(100, 140)), "max_tokens": 2}

    def cached(who: str, **more: str) -> int:
        told = here.post("/v1/completions", asked | more, x_api_key=secrets[who]).json
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert (cached("good"), cached("good")) == (0, 36)
    assert (cached("urgent"), cached("urgent")) == (0, 36)
    assert (cached("good", cache_salt="mine"), cached("good", cache_salt="mine")) == (0, 36)


def test_keys_are_kept_hashed_in_a_file_of_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.json"
    secret = add_key(path, "alice", max_class="high", requests_per_minute=5)
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (key,) = read_keys(path) or ()
    assert (key.name, key.ceiling, key.requests_per_minute) == ("alice", PriorityClass.HIGH, 5)
    assert find([key], secret) == key
    assert list(path.parent.iterdir()) == [path]


def test_a_name_is_taken_once_and_only_a_key_that_is_there_can_be_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "alice")
    with raises_code(ConfigError, "key_name_taken"):
        add_key(path, "alice")
    with raises_code(ConfigError, "unknown_key"):
        revoke_key(path, "bob")
    for name in ("", "a b", "../x", "x" * 65, "-x"):
        with raises_code(ConfigError, "invalid_key_name"):
            add_key(path, name)
    with raises_code(ConfigError, "unknown_max_class"):
        add_key(path, "carol", max_class="highest")
    with raises_code(ConfigError, "invalid_key_limit"):
        add_key(path, "carol", concurrent=0)


def test_all_keys_are_compared_and_each_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Key(f"k{at}", digest_of(f"secret {at}")) for at in range(5)]
    compared: list[object] = []
    really = hmac.compare_digest

    def spy(one: str, other: str) -> bool:
        compared.append(one)
        return really(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert find(keys, "secret 0") == keys[0]
    assert find(keys, "another") is None
    assert len(compared) == 10


def test_a_file_that_others_can_read_or_that_is_damaged_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret = add_key(path, "alice")
    path.chmod(0o644)
    with raises_code(ConfigError, "keys_file_not_private"):
        read_keys(path)
    ring = KeyRing(path)
    assert ring.is_locked
    assert ring.find(secret) is None
    assert "chmod 600" in (ring.problem or "")
    path.chmod(0o600)
    for damaged in (b"", b"[]", b'{"keys": [{"name": "x"}]}', b"\xff", b'{"keys": [{"name": "x", "sha256": "00"}]}'):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError):
            read_keys(path)
    write_keys(path, [Key("a", digest_of("s")), Key("a", digest_of("t"))])
    with raises_code(ConfigError, "duplicate_keys"):
        read_keys(path)


def test_what_changes_in_the_file_is_in_force_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "RELOAD_S", 0.0)
    path = tmp_path / "keys.json"
    ring = KeyRing(path)
    assert not ring.is_locked
    secret = add_key(path, "alice")
    assert ring.is_locked
    assert ring.find(secret) is not None
    revoke_key(path, "alice")
    assert ring.is_locked
    assert ring.find(secret) is None
    path.unlink()
    assert ring.is_locked, "doors that were locked stay locked"
    assert "is gone" in (ring.problem or "")


def test_without_keys_everybody_is_one_tenant_and_may_be_urgent() -> None:
    caller = Gate(KeyRing(None)).caller(None, None)
    assert (caller.tenant, caller.ceiling) == ("default", PriorityClass.HIGH)
    assert asyncio.run(public(Request({"type": "http"}))) is None


def test_what_a_key_allows_is_divided_among_the_gateways_there_are(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", requests_per_minute=90, concurrent=2)
    num_gateways = [3]
    gate = Gate(KeyRing(tmp_path / "keys.json"), lambda: num_gateways[0])
    quota = gate.caller(f"Bearer {secret}", None).quota
    assert quota.requests is not None
    assert (quota.requests.per_minute, quota.tokens, quota.concurrent) == (30, None, 1)
    num_gateways[0] = 1
    again = gate.caller(f"Bearer {secret}", None).quota
    assert again.requests is not None
    assert (again.requests.per_minute, again.concurrent) == (90, 2)


def test_a_keys_file_that_cannot_be_seen_is_not_no_keys_file(tmp_path: Path) -> None:
    loop = tmp_path / "keys.json"
    loop.symlink_to(loop)
    ring = KeyRing(loop)
    assert ring.is_locked
    assert ring.problem is not None
    assert ring.find("anything") is None


def test_two_who_change_the_keys_at_once_do_not_undo_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: add_key(path, f"k{at}"), range(40)))
        list(pool.map(lambda at: revoke_key(path, f"k{at}"), range(0, 40, 2)))
    assert {key.name for key in read_keys(path) or ()} == {f"k{at}" for at in range(1, 40, 2)}


def test_a_route_without_a_guard_cannot_be_added() -> None:
    async def unguarded(request: Request) -> Response:
        return Response()

    async def unguarded_asgi(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    app = make_app(ServerState(Models([]), Metrics()), Gate(KeyRing(None)))
    before = list(app.routes)
    ways: list[Callable[[], object]] = [
        lambda: app.add_route("/open", unguarded),
        lambda: app.router.add_route("/open", unguarded),
        lambda: app.router.routes.append(Route("/open", unguarded)),
        lambda: app.mount("/open", unguarded_asgi),
    ]
    for way in ways:
        with raises_code(InvariantError, "invariant_broken"):
            way()
    assert app.routes == before


def test_the_guard_is_asked_before_the_endpoint() -> None:
    asked: list[str] = []

    async def refuse(request: Request) -> None:
        asked.append("guard")
        raise ApiError(401, "invalid_api_key", "not you")

    async def endpoint(request: Request) -> Response:
        asked.append("endpoint")
        return Response()

    app = make_app(ServerState(Models([]), Metrics()), Gate(KeyRing(None)))
    add_route(app, "GET", "/refused", endpoint, refuse)
    sent = asyncio.run(answered(RequestMiddleware(app), "/refused"))
    assert (sent[0]["status"], asked) == (401, ["guard"])


async def answered(app: RequestMiddleware, path: str) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
    return sent
