"""Which web pages may use a server: CORS for those an operator allows, nothing for the rest."""

import json
from pathlib import Path

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.api.access.origins import Origins
from quire.api.http.errors import ApiError
from tests.support.servers.local_api import Reply, house

COMPLETE = "/v1/completions"
BODY = {"model": "oracle", "prompt": "x", "max_tokens": 1}
EVERYWHERE = "0.0.0.0"  # noqa: S104 - asked about, not listened on
PAGE = "https://chat.example.com"
PREFLIGHT = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type,x-stainless-os, x-stainless-retry-count",
}


def cors(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


def test_with_keys_proxies_may_call_it_anything_and_no_page_gets_leave_to_read(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice")
    with house(keys_file=tmp_path / "keys.json") as here:
        called = {"host": "llm.example.com", "origin": "https://evil.example", "content_type": "text/plain"}
        reply = here.post(COMPLETE, json.dumps(BODY).encode(), x_api_key=secret, **called)
        asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
        before = here.request("OPTIONS", COMPLETE, origin="https://evil.example", **asked)
    assert reply.status == 200
    assert before.status == 405
    for told in (reply, before):
        assert not any(name.startswith("access-control-") for name in told.headers)


@pytest.mark.parametrize("with_keys", [True, False])
def test_pages_of_an_allowed_origin_get_leave_on_every_route_and_nobody_else_does(
    tmp_path: Path, with_keys: bool
) -> None:
    secret = add_key(tmp_path / "keys.json", "alice") if with_keys else "none"
    settings = AdmissionSettings(origins=Origins(allowed=frozenset({PAGE})))
    with house(keys_file=tmp_path / "keys.json" if with_keys else None, settings=settings) as here:
        for path in (COMPLETE, "/v1/chat/completions", "/v1/models", "/tokenize", "/nowhere"):
            asked = here.request("OPTIONS", path, origin=PAGE, **PREFLIGHT)
            assert asked.status == 204
            assert asked.headers["vary"] == "origin"
            told = cors(asked)
            assert told["access-control-allow-origin"] == PAGE
            assert "access-control-allow-credentials" not in told
            assert "POST" in told["access-control-allow-methods"]
            assert told["access-control-allow-headers"] == PREFLIGHT["access_control_request_headers"]
            foreign = here.request("OPTIONS", path, origin="https://evil.example", **PREFLIGHT)
            assert foreign.status in (403, 404, 405)
            assert not cors(foreign)
        for stream in (True, False):
            answer = here.post(COMPLETE, {**BODY, "stream": stream}, origin=PAGE, x_api_key=secret)
            assert (answer.status, cors(answer)["access-control-allow-origin"]) == (200, PAGE)
        refused = here.post(COMPLETE, {}, origin=PAGE, x_api_key=secret)
        assert (refused.status, cors(refused)["access-control-allow-origin"]) == (400, PAGE)
        foreign = here.post(COMPLETE, BODY, origin="https://evil.example", x_api_key=secret)
        assert foreign.status == (200 if with_keys else 403)
        assert not cors(foreign)


def test_any_origin_is_a_star_and_never_with_credentials(tmp_path: Path) -> None:
    with house(settings=AdmissionSettings(origins=Origins(allowed=frozenset({"*"})))) as here:
        told = cors(here.post(COMPLETE, BODY, origin="null"))
    assert told["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in told


@pytest.mark.parametrize(
    ("rules", "host", "is_own"),
    [
        (Origins(), "localhost:8000", True),
        (Origins(), "LOCALHOST", True),
        (Origins(), "[::1]:8000", True),
        (Origins(), "192.168.1.5:8000", False),
        (Origins(), "localhost:8000@evil.example", False),
        (Origins(), "localhost.", False),
        (Origins(), "", False),
        (Origins("192.168.1.5"), "192.168.1.5:8000", True),
        (Origins("box"), "Box:8000", True),
        (Origins("192.168.1.5"), "192.168.1.6", False),
        (Origins(EVERYWHERE), "192.168.1.5:30000", True),
        (Origins("::"), "[fd00::5]:8000", True),
        (Origins(EVERYWHERE), "evil.example", False),
        (Origins(hosts=frozenset({"box.local"})), "box.local:8000", True),
        (Origins(hosts=frozenset({"box.local"})), "evil.box.local", False),
        (Origins(hosts=frozenset({"*"})), "anything.example", True),
    ],
)
def test_a_host_is_ours_or_it_is_not(rules: Origins, host: str, is_own: bool) -> None:
    told = [] if is_own else [(403, "host_not_allowed")]
    refused = []
    try:
        rules.check({"host": host})
    except ApiError as refusal:
        refused.append((refusal.status, refusal.code))
    assert refused == told


def test_what_sends_no_host_is_no_browser() -> None:
    Origins().check({})
