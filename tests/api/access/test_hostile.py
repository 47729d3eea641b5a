"""Whatever is sent, the answer is a sentence: no 5xx, no trace, no address, and the next request is served."""

import json
import random
import re
import socket
import string
from typing import Any

import pytest

from quire.api.http import limits
from quire.api.http.errors import INTERNAL_DETAILS
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "oracle", "messages": HELLO, "max_tokens": 4, **more}


def complete(**more: Any) -> dict[str, Any]:
    return {"model": "oracle", "prompt": "hello", "max_tokens": 4, **more}


BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"nothing", "invalid_json"),
    (b"[]", "invalid_json"),
    (b"3", "invalid_json"),
    (b'{"prompt": "x", "prompt": "y"}', "invalid_json"),
    (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "x", "temperature": Infinity}', "invalid_json"),
    (b'{"prompt": "x", "temperature": 1e999}', "invalid_json"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b'{"prompt": "x", "seed": ' + b"9" * 22 + b"}", "invalid_json"),
    (b'{"a": ' * 100_000, "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"prompt": "x", "extra": ' + b"[" * 200 + b"]" * 200 + b"}", "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', "invalid_json"),
    (b'\xef\xbb\xbf{"prompt": "x"}', "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_text"),
    (b'{"prompt": "x", "stop": "\\udfff\\ud800"}', "invalid_text"),
    (b'{"prompt": "x", "\\ud800": 1}', "invalid_text"),
    (b'{"prompt": "x", "stream": true, "user": "\\ud800"}', "invalid_text"),
]


@pytest.mark.parametrize(("data", "code"), BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_not_plain_json_is_refused(here: LiveServer, data: bytes, code: str) -> None:
    for path in (COMPLETE, CHAT, "/tokenize", "/detokenize"):
        reply = here.post(path, data)
        assert (reply.status, reply.code) == (400, code), reply.data


@pytest.mark.parametrize("extra", [
    {"n": 9}, {"n": 0}, {"n": -1}, {"n": 1.5}, {"n": True}, {"n": "2"}, {"n": 10**18}, {"temperature": -0.1},
    {"temperature": 1e300}, {"temperature": "hot"}, {"temperature": [1]}, {"top_p": 1.1}, {"top_p": -1},
    {"top_k": -2}, {"top_k": 1.5}, {"min_p": 2}, {"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": 10**15},
    {"stop": ["a", "b", "c", "d", "e"]}, {"stop": [""]}, {"stop": ""}, {"stop": [1]}, {"stop": "x" * 1025},
    {"stop": {}},
    {"logit_bias": {"x": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"99999": 1}}, {"logit_bias": {"1": "a"}},
    {"logit_bias": {str(at): 0 for at in range(1100)}}, {"logit_bias": [1]}, {"logit_bias": {"1": 1e9}},
    {"logit_bias": {"٣": 1}}, {"stop_token_ids": [99999]}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]},
    {"allowed_token_ids": []}, {"allowed_token_ids": [337]}, {"seed": 2**64}, {"seed": 1.5}, {"seed": "x"},
    {"presence_penalty": 1e9}, {"frequency_penalty": "x"}, {"repetition_penalty": 0}, {"min_tokens": -1},
    {"min_tokens": 100}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"stream": "yes"}, {"stream": 1},
    {"stream_options": []}, {"stream_options": {"include_usage": "yes"}}, {"cache_salt": ""}, {"cache_salt": 5},
    {"cache_salt": "x" * 1025}, {"priority": "high"}, {"priority": 1.5}, {"model": 5}, {"model": ["oracle"]},
    {"ignore_eos": "no"}, {"skip_special_tokens": 0}, {"service_tier": 5},
])  # fmt: skip
def test_a_parameter_out_of_its_range_is_refused(here: LiveServer, extra: dict[str, Any]) -> None:
    for path, asked in ((CHAT, chat(**extra)), (COMPLETE, complete(**extra))):
        for streams in ({}, {"stream": True}):
            reply = here.post(path, {**streams, **asked})
            assert reply.status == 400, reply.data
            assert reply.headers["content-type"] == "application/json"
            assert set(reply.json["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("asked", [
    chat(messages=[]), chat(messages="hello"), chat(messages=[{}]), chat(messages=[{"content": "x"}]),
    chat(messages=[{"role": 5, "content": "x"}]), chat(messages=[{"role": "user", "content": 5}]),
    chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost"}}]}]),
    chat(messages=[{"role": "user", "content": [{"text": "x"}]}]), chat(messages=HELLO * 5000), chat(messages=None),
    chat(messages=[{"role": "user", "content": ["x"]}]), chat(logprobs=5), chat(top_logprobs=3),
    chat(logprobs=True, top_logprobs=21), chat(logprobs=True, top_logprobs=-1),
    chat(chat_template_kwargs={"messages": []}),
    chat(chat_template_kwargs=[]), chat(add_generation_prompt=True, continue_final_message=True), chat(documents=[5]),
    chat(max_completion_tokens=0), chat(messages=[5] * 100), {"messages": HELLO},
])  # fmt: skip
def test_a_conversation_that_is_none_is_refused(here: LiveServer, asked: dict[str, Any]) -> None:
    assert here.post(CHAT, asked).status == 400


@pytest.mark.parametrize("asked", [
    complete(prompt=""), complete(prompt=[]), complete(prompt=[[]]), complete(prompt=["", "a"]), complete(prompt=None),
    complete(prompt=5), complete(prompt=[1, "a"]), complete(prompt=[1.5]), complete(prompt=[-1]),
    complete(prompt=[337]),
    complete(prompt=[2**70]), complete(prompt=[True]), complete(prompt=[["a"]]), complete(prompt=["a"] * 17),
    complete(prompt=[[1]] * 17), complete(prompt=[1, [2]]), complete(logprobs=21), complete(logprobs=-1),
    complete(logprobs=True), complete(best_of=3), complete(max_tokens=0), complete(prompt={"a": 1}),
    complete(prompt="\x00" * 5000), {"model": "oracle"},
])  # fmt: skip
def test_a_prompt_that_is_none_is_refused(here: LiveServer, asked: dict[str, Any]) -> None:
    assert here.post(COMPLETE, asked).status == 400


@pytest.mark.parametrize("asked", [{}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [10**6]}, {"tokens": [1.5]},
                                   {"tokens": None}, {"tokens": [[1]]}])  # fmt: skip
def test_tokens_that_are_none_are_not_made_text(here: LiveServer, asked: dict[str, Any]) -> None:
    assert here.post("/detokenize", {"model": "oracle", **asked}).status == 400


def test_megabytes_of_mistakes_are_one_complaint(here: LiveServer) -> None:
    for asked in (complete(prompt=["x"] * 300_000), complete(prompt=[1.5] * 300_000), chat(messages=[5] * 300_000),
                  complete(stop_token_ids=["x"] * 300_000), complete(prompt="a",
                  x=[[]] * 300_000) | {"n": 99}):  # fmt: skip
        reply = here.post(COMPLETE if "prompt" in asked else CHAT, asked)
        assert reply.status == 400
        assert len(reply.data) < 2000


def test_a_clients_own_words_come_back_short(here: LiveServer) -> None:
    reply = here.post(COMPLETE, complete() | {"model": "m" * 100_000})
    assert reply.status == 404
    assert len(reply.data) < 1000


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"])
def test_a_door_opens_for_its_own_method_only(here: LiveServer, method: str) -> None:
    assert here.request(method, CHAT).status == 405


@pytest.mark.parametrize("path", ["/v1", "/v1/", "//v1/models", "/v1/models/../../health", "/V1/models",
                                  "/v1/chat/completions/",
                                  "/%2e%2e/health", "/docs", "/redoc", "/stats", "/drain", "/requests"])  # fmt: skip
def test_what_is_no_door_is_not_found(here: LiveServer, path: str) -> None:
    reply = here.get(path)
    assert reply.status in (404, 405)
    assert reply.json["error"]["type"]


def test_a_body_beyond_its_bound_is_refused_before_it_is_read(here: LiveServer) -> None:
    reply = here.post(COMPLETE, b"x", content_length=str(limits.MAX_BODY_BYTES + 1))
    assert (reply.status, reply.code) == (413, "request_too_large")
    assert here.post(COMPLETE, complete(user="x" * (limits.MAX_BODY_BYTES - 200))).status == 200


def spoken(here: LiveServer, data: bytes) -> bytes:
    """What comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", here.port), timeout=PATIENCE_S) as wire:
        wire.sendall(data)
        wire.shutdown(socket.SHUT_WR)
        parts = []
        try:
            while part := wire.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def test_a_body_in_chunks_beyond_its_bound_is_refused_while_it_comes(here: LiveServer) -> None:
    chunk = b"%x\r\n%s\r\n" % (100_000, b"x" * 100_000)
    with socket.create_connection(("127.0.0.1", here.port), timeout=PATIENCE_S) as wire:
        wire.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" + chunk * 19
        )
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        wire.sendall(chunk)
        wire.sendall(chunk[:50_000])
        assert b" 413 " in wire.recv(65536)
    here.wait_until(lambda: not here.admission.open_requests)


def test_a_head_beyond_its_bound_is_refused(here: LiveServer) -> None:
    many = "".join(f"x-{at}: 1\r\n" for at in range(limits.MAX_HEADERS + 1))
    assert b" 431 " in spoken(here, f"GET /health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n".encode())
    long = "x" * (limits.MAX_HEAD_BYTES + 1)
    assert b" 431 " in spoken(here, f"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: {long}\r\n\r\n".encode())
    assert b" 431 " in spoken(here, f"GET /{long} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())


def test_headers_behind_a_body_are_bounded_like_those_before_it(here: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    assert b" 431 " in spoken(here, head + b"x-a: 1\r\n" * 300_000)
    assert here.get("/health", x_a="x" * 30_000).status == 200


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"\x00\x01\x02", b"GET / HTTP/9.9\r\n\r\n",
                                  b"POST /tokenize HTTP/1.1\r\ncontent-length: -5\r\n\r\n"])  # fmt: skip
def test_what_is_no_http_is_told_so_or_hung_up_on(here: LiveServer, data: bytes) -> None:
    answer = spoken(here, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert here.get("/health").status == 200


def test_a_thousand_mangled_bodies_never_hurt_the_server(here: LiveServer) -> None:
    dice = random.Random(11)
    names = [
        "model",
        "prompt",
        "n",
        "stop",
        "logit_bias",
        "temperature",
        "stream",
        "logprobs",
        "echo",
        "seed",
        "messages",
    ]
    values = [
        None,
        True,
        False,
        0,
        1,
        -1,
        1.5,
        10**18,
        "x",
        "",
        [],
        {},
        [1],
        ["a"],
        {"1": 1},
        [[1, 2]],
        "oracle",
        2**63,
    ]
    seen: set[int] = set()
    for _ in range(1000):
        asked = {"model": "oracle", "prompt": "hi", "messages": HELLO, "max_tokens": 2}
        for name in dice.sample(names, dice.randint(1, 3)):
            asked[name] = dice.choice(values)
        data = bytearray(json.dumps(asked).encode())
        if dice.random() < 0.3:
            data[dice.randrange(len(data))] = ord(dice.choice(string.printable))
        reply = here.post(dice.choice([CHAT, COMPLETE, "/tokenize", "/detokenize"]), bytes(data))
        seen.add(reply.status)
        assert reply.status < 500, (bytes(data), reply.data)
        assert not INTERNAL_DETAILS.search(reply.data.decode())
    assert {200, 400, 404} <= seen


def test_an_error_never_tells_of_the_machine() -> None:
    from quire.api.dialects.openai.error_body import error_body  # noqa: PLC0415
    from quire.api.http.errors import ApiError  # noqa: PLC0415

    error = ApiError(400, "x", 'at 0x7f00deadbeef in File "/a/b/c/d.py" of site-packages/x, Traceback')
    told = error_body(error).decode()
    assert not re.search(r"0x[0-9a-f]{6}|Traceback|site-packages|/a/b", told)
