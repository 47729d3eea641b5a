"""Finding 15: any web page in a browser on this machine could use a server without keys."""

from typing import Any

import pytest

from tests.support.servers.local_api import LiveServer, house

COMPLETE = "/v1/completions"
BODY = {"model": "oracle", "prompt": "x", "max_tokens": 1}
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", COMPLETE, BODY),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("POST", "/tokenize", {"model": "oracle", "prompt": "x"}),
    ("POST", "/detokenize", {"model": "oracle", "tokens": [40]}),
    ("GET", "/v1/models", None),
    ("GET", "/metrics", None),
    ("GET", "/health", None),
]
FOREIGN = [
    {"host": "evil.example"},
    {"host": "evil.example:8000"},
    {"host": "localhost.evil.example"},
    {"host": "192.0.2.1"},
    {"host": "127.0.0.1.evil.example"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"content_type": "text/plain"},
    {"content_type": "text/plain; application/json"},
    {"content_type": "application/x-www-form-urlencoded"},
    {"content_type": "multipart/form-data; boundary=x"},
]


@pytest.fixture(scope="module")
def open_house() -> Any:
    with house() as here:
        yield here


@pytest.mark.parametrize("headers", FOREIGN, ids=[" ".join([*one, *one.values()]) for one in FOREIGN])
def test_without_keys_what_a_foreign_page_sends_is_refused_everywhere(
    open_house: LiveServer, headers: dict[str, str]
) -> None:
    for method, path, body in ROUTES:
        reply = open_house.request(method, path, body, **headers)
        assert reply.status in (403, 415), (method, path)
        assert not any(name.startswith("access-control-") for name in reply.headers)
        assert "start it with" in reply.json["error"]["message"] or reply.status == 415


@pytest.mark.parametrize("name", ["localhost", "localhost:1", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:8000"])
def test_without_keys_this_machine_is_let_in_by_any_of_its_own_names(open_house: LiveServer, name: str) -> None:
    assert open_house.get("/health", host=name).status == 200
    assert open_house.post(COMPLETE, BODY, host=name).status == 200
    own = open_house.post(COMPLETE, BODY, host=name, origin=f"http://{name}")
    assert own.status == 200, "a page of its own"
    assert open_house.post(COMPLETE, BODY, host=name, origin="https://evil.example").status == 403
