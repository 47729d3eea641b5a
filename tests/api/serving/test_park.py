"""A server whose models come and go, over real sockets: who asks for one waits for it, in every dialect."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.api.dialects import answering
from quire.api.models import park_moves
from quire.cli.models import commands
from quire.cli.shared.found_servers import admin_request, server_on_socket
from quire.config import OnDemandModel
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.park_server import ParkServer, on_demand, park_server

BODY = {"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
LIFE = {
    "/v1/chat/completions": '"delta":{},',
    "/v1/messages": "event: ping\n",
    "/v1/responses": '"type":"response.in_progress"',
}
"""What a client counts as a sign of life."""
FAILED = {
    "/v1/chat/completions": 'data: {"error":{"message":"b could not be loaded: it is damaged',
    "/v1/messages": 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"b could not',
    "/v1/responses": "event: response.failed\n",
}


def body(route: str, model: str, **more: Any) -> dict[str, Any]:
    if route == "/v1/responses":
        return {"model": model, "input": "hello", "max_output_tokens": 2, **more}
    return {"model": model, **BODY, **more}


@pytest.fixture(autouse=True)
def many_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys all clients are one tenant, and here they have models loaded all the time."""
    monkeypatch.setattr(park_moves, "MAX_LOADS", 1000)


def test_models_are_listed_with_their_state_and_loaded_when_they_are_asked_for(tmp_path: Path) -> None:
    with park_server(tmp_path, OnDemandModel("k", "k", aliases=("gpt-*",), is_kept=True), *on_demand("a", "b")) as here:
        assert {name: meta["state"] for name, meta in here.cards().items()} == {
            "k": "ready",
            "a": "unloaded",
            "b": "unloaded",
        }
        for route in ROUTES:
            for model in ("a", "b", "gpt-5"):
                ((status, text),) = here.ask((route, body(route, model)))
                assert status == 200, text
        assert here.told.count("+k") == 1
        assert here.told[:4] == ["+k", "+a", "-a", "+b"]
    assert sorted(here.told.count(f"+{name}") - here.told.count(f"-{name}") for name in "kab") == [0, 0, 0]


def test_text_routes_load_a_model_too(tmp_path: Path) -> None:
    with park_server(tmp_path, *on_demand("a", "b"), room=1) as here:
        for route, sent in (
            ("/tokenize", {"model": "a", "prompt": "hello"}),
            ("/detokenize", {"model": "b", "tokens": [40]}),
            ("/v1/messages/count_tokens", body("/v1/messages", "a")),
            ("/v1/cache/explain", {"model": "b", "prompt": "hello"}),
        ):
            ((status, text),) = here.ask((route, sent))
            assert status == 200, text
        assert here.told == ["+a", "-a", "+b", "-b", "+a", "-a", "+b"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_has_its_first_events_while_its_model_loads_and_then_its_answer_or_an_error(
    tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "STREAM_SILENT_S", 0.02)
    with park_server(tmp_path, *on_demand("a", "b"), first_byte_s="0.02") as here:
        here.may_load.clear()

        async def streamed(model: str) -> str:
            sent = body(route, model, stream=True)
            timeout = aiohttp.ClientTimeout(PATIENCE_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(here.url + route, json=sent) as response,
            ):
                assert response.status == 200
                assert response.headers["content-type"].startswith("text/event-stream")
                events = ""
                while events.count(LIFE[route]) < 3:
                    events += (await response.content.readline()).decode()
                here.may_load.set()
                return events + (await response.read()).decode()

        told = asyncio.run(streamed("a"))
        assert "error" not in told.replace('"error":null', "")
        here.failing.add("b")
        here.may_load.clear()
        last = asyncio.run(streamed("b"))
        assert FAILED[route] in last
        assert "b could not be loaded: it is damaged" in last


def test_beyond_the_queue_who_waits_for_a_model_is_told_to_come_back_and_others_are_answered(tmp_path: Path) -> None:
    route = "/v1/chat/completions"
    with park_server(tmp_path, OnDemandModel("k", "k", is_kept=True), *on_demand("a")) as here:
        here.may_load.clear()
        waiting = [threading.Thread(target=here.ask, args=((route, body(route, "a")),)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        while (found := server_on_socket(here.socket_path)) is None or _num_open(here) < 2:
            time.sleep(0.005)
        assert next((one.name, one.state) for one in found.models) == ("k", "ready")
        ((status, text),) = here.ask((route, body(route, "a")))
        assert (status, json.loads(text)["error"]["code"]) == (503, "model_loading")
        assert here.cards()["a"] == {"n_vocab": None, "is_ready": False, "state": "loading", "loaded_share": 0.25}
        assert here.ask((route, body(route, "k")))[0][0] == 200
        here.may_load.set()
        for thread in waiting:
            thread.join(PATIENCE_S)


def _num_open(here: ParkServer) -> int:
    return int(admin_request(here.socket_path, "GET", "/stats")["num_open_requests"])


def test_a_model_that_cannot_be_loaded_is_told_in_one_sentence(tmp_path: Path) -> None:
    route = "/v1/chat/completions"
    with park_server(tmp_path, *on_demand("a")) as here:
        here.failing.add("a")
        ((status, text),) = here.ask((route, body(route, "a")))
        told = json.loads(text)["error"]
        assert (status, told["code"]) == (503, "model_not_loaded")
        assert told["message"] == "a could not be loaded: it is damaged"


def test_the_operator_loads_and_unloads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with park_server(tmp_path, OnDemandModel("k", "k", is_kept=True), *on_demand("a")) as here:
        monkeypatch.setattr(
            "quire.cli.shared.found_servers.running_servers",
            lambda: [one for one in [server_on_socket(here.socket_path)] if one],
        )
        commands.request_load("a")
        assert here.cards()["a"]["state"] == "ready"
        commands.request_unload("a")
        while here.cards()["a"]["state"] != "unloaded":
            time.sleep(0.005)
        with pytest.raises(ConfigError, match="always stays loaded"):
            commands.request_unload("k")
        with raises_code(ConfigError, "invalid_config"):
            commands.request_load("other")
        found = server_on_socket(here.socket_path)
        monkeypatch.setattr("quire.cli.shared.found_servers.running_servers", lambda: [found, found])
        with raises_code(ConfigError, "several_servers"):
            commands.request_load("a")


def test_who_waits_for_a_model_when_the_server_ends_is_told_so_at_once(tmp_path: Path) -> None:
    route, heard = "/v1/chat/completions", []
    with park_server(tmp_path, *on_demand("a")) as here:
        here.may_load.clear()
        thread = threading.Thread(target=lambda: heard.extend(here.ask((route, body(route, "a")))))
        thread.start()
        while here.cards()["a"]["state"] != "loading":
            time.sleep(0.005)
        admin_request(here.socket_path, "POST", "/drain")
        thread.join(PATIENCE_S)
    ((status, text),) = heard
    assert (status, json.loads(text)["error"]["code"]) == (503, "server_draining")
