"""The operator's routes: open to an admin key and to nobody else, whatever a tenant is called or sends."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from quire.api.access import keys as keys_module
from quire.api.access.auth import Gate, require_admin
from quire.api.access.keys import Key, KeyRing, add_key, digest_of, read_keys, revoke_key, write_keys
from quire.api.app import add_route, make_app
from quire.api.asgi import PageRules, RequestMiddleware
from quire.api.http.errors import ApiError
from quire.api.models.registry import Models
from quire.api.server_state import ServerState
from quire.cli import app
from quire.errors import ConfigError, InvariantError
from quire.observe.metrics import Metrics
from tests.support.errors import raises_code
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

PATH = "/v1/admin/probe"
BODY = {"model": "oracle", "prompt": "hello", "max_tokens": 3}


def with_probe(admission: ServerState, gate: Gate) -> RequestMiddleware:
    """The server, and one route more that only the operator may see."""
    public_app = make_app(admission, gate)
    add_route(public_app, "GET", PATH, probe, require_admin)
    return RequestMiddleware(public_app, admission.note_refusal, PageRules(admission.settings.origins, gate.ring))


async def probe(request: Request) -> Response:
    """Who was let in."""
    return Response(request.scope["quire.caller"].tenant)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, dict[str, str]]]:
    """A server with an admin key, and with tenants whose names pretend to be one."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    names = ("alice", "admin", "operator", "default", "root")
    secrets = {name: add_key(path, name) for name in names} | {"boss": add_key(path, "boss", admin=True)}
    with house(models={"oracle": talker()}, keys_file=path, make=with_probe) as running:
        yield running, secrets


def test_an_admin_key_opens_it_in_either_header(here: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = here
    assert server.get(PATH, authorization=f"Bearer {secrets['boss']}").data == b"boss"
    assert server.get(PATH, x_api_key=secrets["boss"]).data == b"boss"


def test_no_other_key_does_whatever_it_is_called(here: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = here
    for name in set(secrets) - {"boss"}:
        refused = server.get(PATH, authorization=f"Bearer {secrets[name]}")
        assert (refused.status, refused.code) == (403, "admin_key_needed")
        assert "quire keys add NAME --admin" in refused.json["error"]["message"]


def test_without_a_key_it_is_401_and_nothing_is_said_of_admins(here: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = here
    for headers in ({}, {"authorization": "Bearer boss"}, {"x_api_key": secrets["boss"][:-1]}):
        refused = server.get(PATH, **headers)
        assert (refused.status, refused.code) == (401, "invalid_api_key")
        assert "admin" not in refused.data.decode()


@pytest.mark.parametrize(
    "claim",
    [
        {"x_admin": "true"},
        {"x_forwarded_user": "boss"},
        {"x_quire_admin": "1"},
        {"cookie": "admin=true"},
        {"x_real_ip": "127.0.0.1"},
        {"host": "localhost"},
        {"x_http_method_override": "GET"},
        {"x_original_url": "/health"},
        {"x_rewrite_url": "/health"},
    ],
)
def test_a_header_makes_nobody_an_admin(here: tuple[LiveServer, dict[str, str]], claim: dict[str, str]) -> None:
    server, secrets = here
    assert server.get(PATH, **claim).status == 401
    assert server.get(PATH, authorization=f"Bearer {secrets['alice']}", **claim).status == 403


def test_of_two_keys_the_first_counts_and_bearer_before_the_other(here: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = here
    alice, boss = secrets["alice"], secrets["boss"]
    assert status_of(server, [f"authorization: Bearer {alice}", f"x-api-key: {boss}"]) == 403
    assert status_of(server, [f"x-api-key: {boss}", f"authorization: Bearer {alice}"]) == 403
    assert status_of(server, [f"authorization: Bearer {alice}", f"authorization: Bearer {boss}"]) == 403
    assert status_of(server, [f"x-api-key: {alice}", f"x-api-key: {boss}"]) == 403
    assert status_of(server, [f"authorization: Bearer {alice} {boss}"]) == 401
    assert status_of(server, [f"authorization: Bearer {boss}", f"x-api-key: {alice}"]) == 200


def status_of(server: LiveServer, headers: list[str]) -> int:
    """What a request with exactly these lines is answered."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as wire:
        lines = [f"GET {PATH} HTTP/1.1", "host: localhost", *headers, "connection: close", "", ""]
        wire.sendall("\r\n".join(lines).encode())
        return int(wire.makefile("rb").readline().split()[1])


def test_no_other_way_to_write_the_path_avoids_the_guard(here: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = here
    for path in (
        f"/{PATH}",
        f"{PATH}/",
        f"/health/..{PATH}",
        "/v1/%61dmin/probe",
        "/V1/ADMIN/PROBE",
        f"{PATH}?admin=1",
    ):
        assert server.get(path, authorization=f"Bearer {secrets['alice']}").status in (403, 404)
        assert server.get(path).status in (401, 404)


def test_an_admin_key_may_generate_as_its_own_tenant(here: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = here
    asked = BODY | {"prompt": list(range(100, 140))}

    def cached(name: str) -> int:
        told = server.post("/v1/completions", asked, x_api_key=secrets[name])
        assert told.status == 200
        return int(told.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert (cached("alice"), cached("boss"), cached("boss")) == (0, 0, 36)


def test_without_keys_everybody_is_the_operator_but_no_foreign_page() -> None:
    with house(models={"oracle": talker()}, make=with_probe) as server:
        assert server.get(PATH).data == b"default"
        assert server.get(PATH, origin="https://elsewhere.example").status == 403
        assert server.get(PATH, host="elsewhere.example").status == 403


def test_once_there_are_keys_nobody_is_the_operator_for_want_of_an_admin_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "RELOAD_S", 0.0)
    path = tmp_path / "keys.json"
    gate = Gate(KeyRing(path))
    assert gate.caller(None, None).is_admin
    boss = f"Bearer {add_key(path, 'boss', admin=True)}"
    alice = f"Bearer {add_key(path, 'alice')}"
    assert [gate.caller(one, None).is_admin for one in (boss, alice)] == [True, False]
    revoke_key(path, "boss")
    for refused in (None, boss):
        with raises_code(ApiError, "invalid_api_key"):
            gate.caller(refused, None)
    assert not gate.caller(alice, None).is_admin
    path.write_text('{"keys": []}')
    with raises_code(ApiError, "invalid_api_key"):
        gate.caller(None, None)


def test_files_of_before_are_read_and_say_of_nobody_that_it_is_an_admin(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    old = {"name": "alice", "sha256": digest_of("s"), "max_class": "high", "requests_per_minute": None}
    path.write_text(json.dumps({"keys": [old | {"tokens_per_minute": 5, "concurrent": None, "created": ""}]}))
    path.chmod(0o600)
    add_key(path, "boss", admin=True)
    assert [(key.name, key.admin) for key in read_keys(path) or ()] == [("alice", False), ("boss", True)]
    assert "admin" not in json.loads(path.read_text())["keys"][0], "servers of before refuse a word they do not know"


@pytest.mark.parametrize("given", [1, 0, "true", "yes", None, [], {}])
def test_only_true_and_false_say_whether_a_key_is_an_admins(tmp_path: Path, given: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "a", "sha256": digest_of("s"), "admin": given}]}))
    path.chmod(0o600)
    with raises_code(ConfigError, "invalid_config"):
        read_keys(path)
    assert KeyRing(path).find("s") is None


def test_a_key_keeps_what_it_is_in_the_file(tmp_path: Path) -> None:
    kept = (Key("a", digest_of("s"), admin=True), Key("b", digest_of("t"), "high", 1, 2, 3, "then"))
    write_keys(tmp_path / "keys.json", kept)
    assert read_keys(tmp_path / "keys.json") == kept
    assert msgspec.structs.asdict(kept[1])["admin"] is False


def test_the_description_says_which_routes_an_admin_key_opens(here: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = here
    described = server.get("/openapi.json", x_api_key=secrets["alice"]).json["paths"]
    assert "403" in described[PATH]["get"]["responses"]
    assert "403" not in described["/v1/models"]["get"]["responses"]


def test_a_guard_belongs_to_a_route_and_not_to_a_prefix() -> None:
    public_app = make_app(ServerState(Models([]), Metrics()), Gate(KeyRing(None)))
    with raises_code(InvariantError, "invariant_broken"):
        public_app.router.routes.append(Route("/v1/admin/open", probe))


def test_an_admin_key_is_made_and_listed_by_hand(tmp_path: Path) -> None:
    file = ["--keys-file", str(tmp_path / "keys.json")]
    made = CliRunner().invoke(app, ["keys", "add", "me", "--admin", *file])
    assert made.exit_code == 0, made.output
    CliRunner().invoke(app, ["keys", "add", "alice", *file])
    listed = json.loads(CliRunner().invoke(app, ["keys", "list", "--json", *file]).stdout)
    assert [(one["name"], one["admin"]) for one in listed] == [("me", True), ("alice", False)]
    head, me, alice = CliRunner().invoke(app, ["keys", "list", *file]).stdout.splitlines()
    assert (head.split()[-1], me.split()[-1], alice.split()[-1]) == ("admin", "yes", "-")
    assert Gate(KeyRing(tmp_path / "keys.json")).caller(f"Bearer {made.stdout.strip()}", None).is_admin
