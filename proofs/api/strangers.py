"""Hostile requests: generated from the server's own OpenAPI description, and written by hand; wrong keys."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import aiohttp

from benchmarks.record import say
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key, revoke_key
from quire.api.http.errors import INTERNAL_DETAILS
from quire.api.http.limits import MAX_BODY_BYTES, MAX_DETOKENIZE_TOKENS, MAX_HEAD_BYTES, MAX_HEADERS, MAX_ID_CHARS

JSON = {"content-type": "application/json"}
LEAKS = re.compile(rb"0x[0-9a-f]{6,}|Traceback|File \"|site-packages")
"""Internal details that no reply may have, whatever its status; written here, apart from the server's own pattern."""


@section("hostile")
def hostile(proof: Proof) -> None:
    """Send the requests of a fuzzer that reads the description, and those of a corpus written by hand."""
    folder, random = proof.folder, proof.random
    count = proof.sized(quick=1_500, full=200_000)
    num_generated = proof.sized(quick=240, full=12_000)
    # Short sequences, because most of the fuzzer's valid requests set no limit on the answer.
    with started(folder, "--watch-loop", "1", "--max-open-requests", "4096", "--sequence-tokens", "128") as server:
        replies = _Replies()
        replies.send_generated(server, num_generated, random)
        asyncio.run(replies.send_crafted(server, random, proof.sized(quick=1, full=10)))
        asyncio.run(replies.send_corpus(server, count - replies.num_inputs, random))
        restarts = server.num_restarts()
        is_alive = asyncio.run(raw_reply(server.port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b""))[0] == 200
        code = server.stop()
        loop_line = next((line for line in server.lines if line.startswith("longest callback")), "longest callback 1e9")
        say(f"  {loop_line[:200]} {loop_line[-40:]}")
        for line in [line for line in server.lines if '"trace"' in line][:3]:
            say(f"  {line[-800:]}")
        longest_ms = float(loop_line.split()[2])
    proof.at_least("hostile", replies.num_inputs, count)
    proof.report("hostile_refused", replies.num_refused)
    proof.at_least("hostile_crafted", replies.num_crafted, 1)
    proof.equals("hostile_unanswered", replies.num_unanswered, 0, "without a status")
    proof.equals("hostile_unexpected", replies.num_unexpected, 0, "of another status")
    proof.equals("hostile_echoed", replies.num_echoed, 0, "harmful ids sent back")
    proof.equals("fives", replies.num_fives, 0, "of 5xx but 503")
    proof.equals("hostile_telling", replies.num_leaks, 0, "bodies with addresses or traces")
    proof.equals("hostile_restarts", restarts, 0, "workers replaced")
    proof.holds("hostile_survived", is_alive and code == 0, "it answers, and ends with code 0")
    proof.at_most("loop_block_ms", longest_ms, 100)


class _Replies:
    """Sends requests, and counts their replies."""

    def __init__(self) -> None:
        self.num_inputs = self.num_refused = self.num_fives = self.num_leaks = 0
        self.num_crafted = self.num_unanswered = self.num_unexpected = self.num_echoed = 0

    def count(self, status: int, body: bytes, request: object) -> None:
        self.num_inputs += 1
        self.num_refused += 400 <= status < 500
        # A stream that fails has status 200: its error is an event.
        if (status >= 500 and status != 503) or b'"code":"internal_error"' in body:
            self.num_fives += 1
            say(f"  {status}: {str(request)[:200]} -> {body[:200]!r}")
        if LEAKS.search(body) or (status != 200 and INTERNAL_DETAILS.search(body.decode("utf-8", "replace"))):
            self.num_leaks += 1
            say(f"  internal details: {body[:200]!r}")

    async def send_crafted(self, server: Server, random: Random, rounds: int) -> None:
        """Send the hand-written cases about sizes and headers, byte by byte."""
        for _ in range(rounds):
            for case in crafted_cases(random):
                status, headers, body = await raw_reply(server.port, case.head, case.body)
                self.num_crafted += 1
                if not status:
                    self.num_unanswered += 1
                    say(f"  no answer: {case.name}")
                elif case.statuses and status not in case.statuses:
                    self.num_unexpected += 1
                    say(f"  {case.name}: {status} instead of {case.statuses}: {body[:200]!r}")
                if case.own_id and case.own_id in headers:
                    self.num_echoed += 1
                    say(f"  {case.name}: {headers[:300]!r}")
                self.count(status, body, case.name)

    def send_generated(self, server: Server, count: int, random: Random) -> None:
        """Send cases that follow the server's OpenAPI description, and cases that violate it."""
        import requests  # noqa: PLC0415 - installed with the fuzzer
        import schemathesis  # noqa: PLC0415
        from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: PLC0415
        from schemathesis import GenerationMode  # noqa: PLC0415

        schema = schemathesis.openapi.from_dict(requests.get(f"{server.url}/openapi.json", timeout=10).json())
        paths = POST_PATHS
        session = requests.Session()
        for path in paths:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                strategy = schema[path]["POST"].as_strategy(generation_mode=mode)

                @seed(random.getrandbits(32))
                @settings(max_examples=count // (2 * len(paths)), deadline=None, database=None, phases=[Phase.generate],
                          suppress_health_check=list(HealthCheck))  # fmt: skip
                @given(case=strategy)
                def attempt(case: Any) -> None:
                    arguments = case.as_transport_kwargs(base_url=server.url)
                    body = arguments.get("json")
                    if isinstance(body, dict):
                        body["max_tokens"] = 2
                    reply = session.request(**{**arguments, "timeout": 60})
                    self.count(reply.status_code, reply.content, body)

                attempt()

    async def send_corpus(self, server: Server, count: int, random: Random) -> None:
        """Send bodies of values that have crashed servers, some with damaged bytes."""
        gate = asyncio.Semaphore(16)

        async def send(session: aiohttp.ClientSession) -> None:
            path, data = _hostile_body(random)
            async with gate:
                try:
                    # Without this content type, the server would refuse each body unread.
                    async with session.post(f"{server.url}{path}", data=data, headers=JSON) as reply:
                        self.count(reply.status, await reply.read(), data[:200])
                except aiohttp.ClientError as error:
                    self.count(599, str(error).encode(), data[:200])

        async with aiohttp.ClientSession() as session:
            for start in range(0, count, 500):
                await asyncio.gather(*(send(session) for _ in range(min(500, count - start))))


@dataclass(frozen=True)
class Case:
    """A request, byte by byte."""

    name: str
    head: bytes
    body: bytes
    statuses: tuple[int, ...] = ()
    """The allowed statuses; empty: any but 5xx."""
    own_id: bytes = b""
    """An id that must not be sent back in a header."""


def _post(path: str, *headers: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1".encode(), b"host: localhost", b"content-type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n"


def _sized(path: str, num_bytes: int) -> bytes:
    """A valid body of exactly this many bytes."""
    name = "messages" if "chat" in path else "prompt"
    frame = json.dumps({"model": "oracle", "max_tokens": 1, name: ""}).encode()
    return frame[:-2] + b"x" * (num_bytes - len(frame)) + frame[-2:]


POST_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
ALPHABETS = ("a", " ", "é", "\U0001f600", "e\u0301", "1", "\n", "<|im_start|>", "\u200d", "ab ", "\x00")


def crafted_cases(random: Random) -> Iterator[Case]:
    """Body sizes, headers, long texts, long parameters and request ids."""
    yield from _body_sizes()
    yield from _heads()
    yield from _long_texts(random)
    yield from _long_parameters()
    yield from _request_ids()


def _body_sizes() -> Iterator[Case]:
    for path in POST_PATHS:
        yield Case(f"{path}: as large as may be", _post(path), _sized(path, MAX_BODY_BYTES), (400, 413, 422))
        for num_extra in (1, 1_000_000, 6_000_000):
            yield Case(f"{path}: {num_extra} too large", _post(path), _sized(path, MAX_BODY_BYTES + num_extra), (413,))
        body = _sized(path, MAX_BODY_BYTES + 500_000)
        parts = [body[start : start + 60_000] for start in range(0, len(body), 60_000)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        head = _post(path, b"transfer-encoding: chunked")
        yield Case(f"{path}: in parts, too large", head, chunks, (413,))
        yield Case(f"{path}: says it will be huge", _post(path, b"content-length: 99999999999"), b"{", (413,))
        yield Case(f"{path}: a length that is none", _post(path, b"content-length: -5"), b"{}", (400,))
        yield Case(f"{path}: two lengths", _post(path, b"content-length: 2", b"content-length: 3"), b"{}", (400,))


def _heads() -> Iterator[Case]:
    body = json.dumps({"model": "oracle", "prompt": "hi", "max_tokens": 1}).encode()
    path = "/v1/completions"
    for count, status in ((MAX_HEADERS - 5, 200), (MAX_HEADERS + 1, 431), (900, 431)):
        headers = [b"x-h%d: v" % index for index in range(count)]
        yield Case(f"{count} headers", _post(path, *headers), body, (status,))
    for length, status in ((MAX_HEAD_BYTES // 2, 200), (MAX_HEAD_BYTES + 1, 431), (4 << 20, 431)):
        yield Case(f"a header of {length} bytes", _post(path, b"x-long: " + b"v" * length), body, (status,))
        name = b"x" * length + b": v"
        yield Case(f"a header's name of {length} bytes", _post(path, name), body, (status,))
    yield Case("a target of 70,000 bytes", _post(path + "?" + "q" * 70_000), body, (431, 414))
    for line in (b"x-odd: \xff\xfe", b"x-nul: a\x00b", b"no colon", b": no name", b"x y: space", b"x:" + b"\t" * 1000):
        yield Case(f"header {line[:12]!r}", _post(path, line), body)


def _long_texts(random: Random) -> Iterator[Case]:
    for letter in ALPHABETS:
        for num_chars in (5_000, 100_000, 320_000):
            text = letter * (num_chars // len(letter))
            chat = [{"role": "user", "content": text}]
            bodies: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": {"messages": chat},
                "/v1/completions": {"prompt": text},
                "/tokenize": {"prompt": text},
            }
            path = random.choice(sorted(bodies))
            data = json.dumps({"model": "oracle", "max_tokens": 1, **bodies[path]}, ensure_ascii=False).encode()
            yield Case(f"{path}: {num_chars} of {letter!r}", _post(path), data)
    many_prompts = json.dumps({"model": "oracle", "max_tokens": 1, "prompt": ["a b " * 30_000] * 16}).encode()
    yield Case("16 prompts of 120,000 characters", _post("/v1/completions"), many_prompts)
    many_messages = json.dumps({"model": "oracle", "messages": [{"role": "user", "content": "x"}] * 50_000}).encode()
    yield Case("50,000 messages", _post("/v1/chat/completions"), many_messages)


def _long_parameters() -> Iterator[Case]:
    path, fields = "/v1/completions", {"model": "oracle", "prompt": "hi", "max_tokens": 1}
    parameters: dict[str, Any] = {
        "stop": "x" * 1_900_000, "prompt": [40] * 600_000, "stop_token_ids": [40] * 600_000,
        "allowed_token_ids": [40] * 600_000, "logit_bias": {str(index): 1 for index in range(130_000)},
        "user": "u" * 1_900_000, "cache_salt": "s" * 1_900_000, "model": "m" * 1_900_000, "suffix": "s" * 1_900_000,
        "bad_words": ["x"] * 300_000, "seed": [1] * 600_000, "unknown": {"deep": [[1]] * 300_000},
    }  # fmt: skip
    for name, value in parameters.items():
        yield Case(f"a huge {name}", _post(path), json.dumps({**fields, name: value}).encode())
    for stops in (
        [f"{index}" + "x" * 450_000 for index in range(4)],
        [f"s{index}" for index in range(150_000)],
        ["a", "b", "c", "d", "e"],
        [""] * 4,
        [["x"]] * 200_000,
    ):
        yield Case(f"{len(stops)} stops", _post(path), json.dumps({**fields, "stop": stops}).encode(), (400,))
    for count in (MAX_DETOKENIZE_TOKENS, MAX_DETOKENIZE_TOKENS + 1, 600_000):
        tokens = json.dumps({"model": "oracle", "tokens": [40] * count}).encode()
        yield Case(f"{count} tokens to text", _post("/detokenize"), tokens)


def _request_ids() -> Iterator[Case]:
    body = json.dumps({"model": "oracle", "prompt": "hi", "max_tokens": 2, "stream": True}).encode()
    ids = (
        b"i" * (MAX_ID_CHARS + 1),
        b"i" * 60_000,
        b"../../etc/passwd",
        b"<script>",
        b"a b",
        b"\xff\xfe",
        b"a;b=c",
        b"%0d%0a",
    )
    for id_ in ids:
        yield Case(f"own id {id_[:12]!r}", _post("/v1/completions", b"x-request-id: " + id_), body, (200, 431), id_)
    big_id = json.dumps({"model": "oracle", "prompt": "hi", "max_tokens": 2, "request_id": "r" * 1_000_000}).encode()
    yield Case("a request id of 1 MB in the body", _post("/v1/completions"), big_id)


async def raw_reply(port: int, head: bytes, body: bytes) -> tuple[int, bytes, bytes]:
    """Send exactly these bytes and read until the end: the status (0 if there is none), headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 23)
    has_length = b"content-length:" in head or b"transfer-encoding:" in head
    length = b"" if has_length else b"content-length: %d\r\n" % len(body)
    reader_task = asyncio.ensure_future(_read_all(reader))
    writer.write(head + length + b"connection: close\r\n\r\n" + body)
    with suppress(ConnectionError):
        await writer.drain()
    async with asyncio.timeout(60):
        data = await reader_task
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    headers, _, answer = data.partition(b"\r\n\r\n")
    status = int(headers.split()[1]) if headers.startswith(b"HTTP/1.1 ") else 0
    return status, headers, answer


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the connection ends, in any way."""
    data = b""
    with suppress(ConnectionError):
        while part := await reader.read(65_536):
            data += part
    return data


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 9, 16, 17, 21, 2**31, 2**63, -(2**63), 2**64, 1.5, -0.1, 1e308, 5e-324, "", "x",
    "oracle",
    "\x00", "é" * 100, "\ud83d\ude00", "x" * 5000, [], {}, [[]], [None], ["a"] * 20, [1] * 600, [-1], [337], [1.5],
    [[1, 2]] * 3,
    {"1": 1}, {"-1": 1}, {"a": 1}, {"type": "json_object"}, {"include_usage": True}, [{"role": "user",
    "content": "x"}],
    "( [x]* )*", "{{ ''.__class__.__mro__ }}", {"tokenize": True, "chat_template": "{{ 1 }}"}, ["x" * 200] * 4,
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://192.0.2.1\\@x/0.png"}}]}],
    [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": 1,
    "content": {}}] * 3,
]  # fmt: skip
NAMES = [
    "model", "prompt", "messages", "n", "stop", "logit_bias", "temperature", "top_p", "top_k", "min_p", "seed",
    "stream", "logprobs",
    "top_logprobs", "echo", "best_of", "stop_token_ids", "allowed_token_ids", "prompt_logprobs", "min_tokens",
    "priority", "cache_salt",
    "stream_options", "chat_template_kwargs", "documents", "tools", "response_format", "tokens", "presence_penalty",
    "user", "suffix",
    "continue_final_message", "add_generation_prompt", "max_completion_tokens", "repetition_penalty",
    "service_tier", "ignore_eos", "chat_template", "guided_regex", "bad_words", "n_discard", "request_id",
]  # fmt: skip
RAW = [
    b"", b"{", b"[]", b"null", b"{}", b'{"prompt":', b'{"a":1,"a":2}', b'{"prompt": NaN}', b'{"seed": -Infinity}',
    b"[" * 5000,
    b'{"x":' * 3000, b'{"n": 1e999}', b'{"prompt": "\\ud800"}', b"\xff\xfe\x00", b'{"seed":' + b"9" * 6000 + b"}",
    b'{"prompt": "\\u0000"}',
]  # fmt: skip


def _hostile_body(random: Random) -> tuple[str, bytes]:
    path = random.choice(POST_PATHS)
    if random.random() < 0.1:
        return path, random.choice(RAW)
    if random.random() < 0.003:
        return path, json.dumps({"model": "oracle", "prompt": [random.choice([1, "a", [1]])] * 300_000}).encode()
    body: dict[str, Any] = {"model": "oracle", "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi", "tokens": [40]}
    for name in random.sample(NAMES, random.randint(0, 4)):
        body[name] = random.choice(VALUES)
    data = bytearray(json.dumps(body, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass"))
    for _ in range(random.choice([0, 0, 0, 1, 5])):
        data[random.randrange(len(data))] = random.randrange(256)
    return path, bytes(data)


@section("auth")
def auth(proof: Proof) -> None:
    """Request every route that is not public, in many disguises, with each wrong key, and with a good one."""
    keys = proof.folder / "keys.json"
    good_key, revoked_key, late_key = (add_key(keys, name) for name in ("good", "revoked", "late"))
    revoke_key(keys, "revoked")
    with started(proof.folder, "--keys-file", str(keys)) as server:
        matrix = _AccessMatrix(server.port, good_key, (revoked_key, late_key))
        status_before = asyncio.run(matrix.status("GET", "/version", "x", f"authorization: Bearer {late_key}"))
        revoke_key(keys, "late")
        time.sleep(1.5)  # the server reads the file every second
        asyncio.run(matrix.try_all())
    proof.at_least("auth_tried", matrix.num_tried, 1)
    proof.equals("auth_controls", matrix.num_controls, len(matrix.routes), "accepted with a good key")
    proof.equals("auth_late_before", status_before, 200, "the late key, before it was revoked")
    proof.none("auth_accepted", matrix.accepted)


class _AccessMatrix:
    """Tries routes, methods, disguises and keys. A wrong key must get 401, or the same refusal as a
    good key where a good key is refused too.
    """

    SHAPES = ("{}", "{}?/health", "/health/..{}", "/{}", "{}/", "{}%2f..%2fhealth", "{};/ready")
    HOSTS = ("127.0.0.1", "x/health?", "x/health#", "x/../health", "localhost:8000/ready?", "[::1]", "health", "a\\@b")
    METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
    VALID_BODIES: ClassVar[dict[str, dict[str, Any]]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        "/v1/completions": {"prompt": "hi", "max_tokens": 1},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [40]},
        "/v1/cache/explain": {"prompt": "hi"},
    }

    def __init__(self, port: int, good: str, bad: tuple[str, ...]) -> None:
        self._port = port
        self._good = f"authorization: Bearer {good}"
        self._bad = [
            "", "authorization: Bearer wrong", "authorization: Bearer ", f"authorization: Bearer {good[:-1]}",
            f"authorization: Basic {good}", f"authorization: {good}", f"authorization: Bearer {good.upper()}",
            f"cookie: key={good}", "x-api-key: wrong",
            *(f"authorization: Bearer {one}" for one in bad), *(f"x-api-key: {one}" for one in bad),
        ]  # fmt: skip
        self.routes: list[tuple[str, str]] = []
        self.num_tried = self.num_controls = 0
        self.accepted: list[str] = []

    async def try_all(self) -> None:
        head = f"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n{self._good}\r\n".encode()
        paths = json.loads((await raw_reply(self._port, head, b""))[2])["paths"]
        self.routes = [
            (path.replace("{name}", "oracle").replace("{response_id}", "resp_none"), method.upper())
            for path, methods in paths.items()
            for method in methods
            if path not in ("/health", "/ready")
        ]
        for path, own_method in self.routes:
            expected = 404 if path.endswith("resp_none") else 200  # no response with this id is stored
            self.num_controls += await self.status(own_method, path, "x", self._good) == expected
            for method in self.METHODS:
                disguises = [(shape.format(path), self.HOSTS[0]) for shape in self.SHAPES]
                disguises += [(path, host) for host in self.HOSTS[1:]]
                await asyncio.gather(*(self._try(method, target, host, path) for target, host in disguises))

    async def _try(self, method: str, target: str, host: str, path: str) -> None:
        expected = await self.status(method, target, host, self._good, path)
        for key in self._bad:
            status = await self.status(method, target, host, key, path)
            self.num_tried += 1
            if status != 401 and (expected < 400 or status != expected):
                self.accepted.append(f"{method} {target} at {host} with {key[:30]!r}: {status}, a good key: {expected}")

    async def status(self, method: str, target: str, host: str, key: str, path: str = "") -> int:
        """The status of a request with a body that is valid for the route."""
        fields = self.VALID_BODIES.get(path or target)
        body = json.dumps({"model": "oracle", **fields}).encode() if fields else b""
        kind = "content-type: application/json\r\n" if body else ""
        head = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\n{kind}" + (f"{key}\r\n" if key else "")
        return (await raw_reply(self._port, head.encode(), body))[0]
