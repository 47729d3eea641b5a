"""What keeps prompts out of the cache, and how people hear of it: headers, the log, routes, a metric; and lines that
are taken out."""

import json
import logging
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.auth import Gate
from quire.api.access.keys import add_key
from quire.api.admin import PublicAddress, make_admin
from quire.api.app import make_asgi
from quire.api.models.model_park import ModelManager, OpenClient
from quire.api.server import Shutdown
from quire.api.server_state import ServerState
from quire.client.request.conversation import StablePrefix
from quire.config.sources import load_settings
from tests.support.fleet.prefix_corpus import RULES
from tests.support.servers.guarded_prompts import TEMPLATES
from tests.support.servers.local_api import LiveServer, Reply, house
from tests.support.servers.talkers import talker

WARNING, REMOVED = "x-quire-prefix-warning", "x-quire-stable-prefix"
LONG = {"max_sequence_tokens": 4096, "num_blocks": 2048, "block_size": 16, "max_step_tokens": 512}


def server(keys_file: Path | None = None, *listed: str) -> Any:
    settings = AdmissionSettings(stable_prefix=StablePrefix(listed))
    return house(models={"oracle": talker(template=TEMPLATES[""], **LONG)}, keys_file=keys_file, settings=settings)


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    with server() as here:
        yield here


@pytest.fixture(scope="module")
def cleaned() -> Iterator[LiveServer]:
    with server(None, "dates", "times", "Run *") as here:
        yield here


def ask(here: LiveServer, system: str, question: str, dialect: str = "chat", **headers: str) -> Reply:
    user, body = {"role": "user", "content": question}, dict[str, Any]()
    match dialect:
        case "chat":
            body = {"messages": [{"role": "system", "content": system}, user]}
            return here.post("/v1/chat/completions", body | {"model": "oracle", "max_tokens": 2}, **headers)
        case "messages":
            body = {"system": [{"type": "text", "text": system}], "messages": [user]}
            return here.post("/v1/messages", body | {"model": "oracle", "max_tokens": 2}, **headers)
    body = {"instructions": system, "input": question, "model": "oracle", "max_output_tokens": 2}
    return here.post("/v1/responses", body, **headers)


def clock(number: int) -> str:
    return f"The time is 08:{number:02}:00.\n{RULES}"


def cached(reply: Reply) -> int:
    usage = reply.json["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_the_answer_to_a_request_that_lost_something_names_the_line_and_its_cost(
    plain: LiveServer, dialect: str
) -> None:
    system = f"{dialect} {{}}"
    replies = [ask(plain, system.format(clock(number)), f"{number}?", dialect) for number in range(6)]
    assert [reply.status for reply in replies] == [200] * 6
    assert WARNING not in replies[2].headers
    told = replies[-1].headers[WARNING]
    assert told.startswith("kind=times; tokens=")
    assert told.endswith(f'; line="{dialect} The time is 08:05:00."')
    assert len(told) < 400
    found = plain.get("/v1/cache/warnings").json["data"]
    (one,) = [one for one in found if one["kind"] == "times" and one["line"].startswith(dialect)]
    assert f"tokens={one['num_lost_tokens']}; requests={one['num_requests']}" in told
    assert one["num_requests"] == 5
    assert "tokens in the last hour, in 5 requests" in one["explanation"]


def test_a_stream_is_warned_in_its_head(plain: LiveServer) -> None:
    for number in range(6):
        messages = [{"role": "system", "content": "stream " + clock(number)}, {"role": "user", "content": f"{number}?"}]
        body = {"model": "oracle", "messages": messages, "max_tokens": 2, "stream": True}
        reply = plain.post("/v1/chat/completions", body)
    assert reply.headers[WARNING].endswith('; line="stream The time is 08:05:00."')


def test_what_a_line_cost_is_what_the_engine_computed_again(plain: LiveServer) -> None:
    before = lost_in_metrics(plain)
    replies = [ask(plain, "measured " + clock(number), f"{number}?") for number in range(6)]
    num_prompt = replies[-1].json["usage"]["prompt_tokens"]
    found = plain.get("/v1/cache/warnings").json["data"]
    (one,) = [one for one in found if one["kind"] == "times" and one["line"].startswith("measured")]
    num_computed = sum(num_prompt - cached(reply) for reply in replies[1:])
    assert 0.8 * num_computed < one["num_lost_tokens"] <= num_computed
    assert lost_in_metrics(plain) - before >= one["num_lost_tokens"]


def lost_in_metrics(here: LiveServer) -> float:
    lines = here.get("/metrics").data.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("quire:prefix_guard_tokens_lost_total"))


def test_a_line_in_many_alphabets_is_told_in_plain_characters(plain: LiveServer) -> None:
    for number in range(6):
        reply = ask(plain, f'Ün"ï\\code 日本\t08:{number:02}:11\r\n{RULES}', f"{number}?")
    told = reply.headers[WARNING]
    assert told.isascii()
    assert told.isprintable()
    assert '\\xdcn\\"' in told


def test_other_people_behind_one_system_prompt_are_no_warning() -> None:
    with server() as here:
        for number in range(8):
            reply = ask(here, "friendly " + RULES, f"Tell me of {number} and of the weather at {number}:30, please.")
            assert WARNING not in reply.headers
        assert here.get("/v1/cache/warnings").json["data"] == []


def test_each_tenant_reads_its_own_lines_and_the_operator_costs_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    one, two = add_key(keys, "one"), add_key(keys, "two")
    boss = add_key(keys, "boss", admin=True)
    with server(keys) as here:
        for number in range(6):
            assert WARNING not in ask(here, "secret " + clock(number), "?", x_api_key=two).headers or number > 2
            assert WARNING not in ask(here, RULES, f"{number}?", x_api_key=one).headers
        assert here.get("/v1/cache/warnings").status == 401
        assert here.get("/v1/cache/warnings", x_api_key=one).json["data"] == []
        (theirs,) = here.get("/v1/cache/warnings", x_api_key=two).json["data"]
        assert theirs["line"] == "secret The time is 08:05:00."
        seen = here.get("/v1/cache/warnings", x_api_key=boss)
        (told,) = seen.json["data"]
        assert (told["tenant"], told["line"], told["kind"]) == ("two", None, "times")
        assert told["num_lost_tokens"] == theirs["num_lost_tokens"]
        assert b"secret" not in seen.data


def test_the_operators_socket_shows_the_lines_of_all(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secrets = [add_key(keys, name) for name in ("one", "two")]

    def both(admission: ServerState, gate: Gate) -> Any:
        public = make_asgi(admission, gate)
        address, opening = PublicAddress("http://x", is_locked=True), cast(OpenClient, pytest.fail)
        operator = make_admin(admission, Shutdown(admission, 1.0), address, ModelManager([], opening))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (operator if scope["path"] == "/cache/warnings" else public)(scope, receive, send)

        return app

    with house(models={"oracle": talker(template=TEMPLATES[""], **LONG)}, keys_file=keys, make=both) as here:
        for number in range(6):
            for name, key in zip(("one", "two"), secrets, strict=True):
                ask(here, f"{name} {clock(number)}", "?", x_api_key=key)
        told = here.get("/cache/warnings").json["data"]
    assert {(one["tenant"], one["line"]) for one in told} == {
        ("one", "one The time is 08:05:00."),
        ("two", "two The time is 08:05:00."),
    }


def test_what_a_settings_file_lists_is_what_the_server_takes_out(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('stable_prefix = ["dates", "Run *, *"]')
    listed = load_settings({}, environ={}, file=file).server.unstable_lines
    assert listed == ("dates", "Run *, *")
    said = [{"role": "system", "content": "Run ab, cd\nToday is 2026-11-18.\nYou help."}]
    assert StablePrefix(listed).remove_lines(said)[0] == [{"role": "system", "content": "You help."}]


def test_the_log_says_it_once_and_without_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire.prefix"), server() as here:
        for number in range(9):
            ask(here, "secret " + clock(number), "?")
    (line,) = [one.getMessage() for one in caplog.records if one.name == "quire.prefix"]
    assert line.startswith("tenant default, model oracle: a line with another time cost ")
    assert "secret" not in line


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_what_the_operator_lists_is_taken_out_and_told(cleaned: LiveServer, dialect: str) -> None:
    for number in range(5):
        system = f"Today is 2026-11-{10 + number}.\n{dialect}\nThe time is 08:{number:02}.\nRun ab\n{RULES}"
        reply = ask(cleaned, system, "And what is the time, 08:12?", dialect)
        assert reply.headers[REMOVED] == (
            f'removed=3; lines="Today is 2026-11-{10 + number}.", "The time is 08:{number:02}.", "Run ab"'
        )
        assert WARNING not in reply.headers
    bare = ask(cleaned, f"{dialect}\n{RULES}", "And what is the time, 08:12?", dialect)
    assert REMOVED not in bare.headers
    assert (cached(reply), cached(bare)) == (cached(bare), cached(bare))
    assert cached(bare) > 700


def test_users_assistants_and_tools_keep_their_lines(cleaned: LiveServer) -> None:
    line = "The time is 08:30."
    tool = {"type": "function", "function": {"name": "t", "description": line, "parameters": {"type": "object"}}}
    messages = [
        {"role": "user", "content": line},
        {"role": "system", "content": line},
        {"role": "assistant", "content": line},
        {"role": "user", "content": [{"type": "text", "text": line}]},
    ]
    body = {"model": "oracle", "messages": messages, "tools": [tool], "max_tokens": 2}
    assert REMOVED not in cleaned.post("/v1/chat/completions", body).headers
    told = cleaned.post("/tokenize", {"model": "oracle", "messages": messages, "tools": [tool]}).json
    assert "tokens" in told, told
    ids = told["tokens"]
    text = cleaned.post("/detokenize", {"model": "oracle", "tokens": ids}).json["prompt"]
    assert text.count(line) == 5


def test_what_is_only_counted_or_explained_is_the_prompt_that_would_run(cleaned: LiveServer) -> None:
    with_line, without = "The time is 08:30.\nYou help.", "You help."
    user = {"role": "user", "content": "Hello"}
    for path, name in (("/tokenize", "count"), ("/v1/messages/count_tokens", "input_tokens")):
        counts = []
        for system in (with_line, without):
            body: dict[str, Any] = {"model": "oracle", "messages": [user]}
            if path == "/tokenize":
                body["messages"] = [{"role": "system", "content": system}, user]
            else:
                body |= {"system": system}
            counts.append(cleaned.post(path, body).json[name])
        assert counts[0] == counts[1]
    messages = [{"role": "system", "content": without}, user]
    cleaned.post("/v1/chat/completions", {"model": "oracle", "messages": messages, "max_tokens": 2})
    messages[0]["content"] = with_line
    explained = cleaned.post("/v1/cache/explain", {"model": "oracle", "messages": messages}).json
    assert explained["reason"] == "too_short"


def test_an_answer_with_many_long_lines_taken_out_has_a_short_header(cleaned: LiveServer) -> None:
    lines = "\n".join(f"Date: 2026-11-{10 + number}" + " " * 60 + "." for number in range(20))
    told = ask(cleaned, lines + "\nYou help.", "?").headers[REMOVED]
    assert told.startswith('removed=20; lines="Date: 2026-11-10')
    assert len(told) < 500


def test_the_header_of_a_fresh_connection_is_ascii_whatever_was_taken_out(cleaned: LiveServer) -> None:
    connection: HTTPConnection = cleaned.connection()
    system = "Ünïcode 日本 08:30\nYou help."
    body = {"model": "oracle", "max_tokens": 2, "messages": [{"role": "system", "content": system}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.getheader(REMOVED) == 'removed=1; lines="\\xdcn\\xefcode \\u65e5\\u672c 08:30"'
