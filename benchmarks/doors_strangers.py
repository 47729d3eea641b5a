"""What the proof of the doors sends that no client should: generated from our own description, put together by hand."""

import asyncio
import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.doors_load import Server, started
from benchmarks.proof import Proof, say
from quire.api.keys import add_key, revoke_key
from quire.api.refusals import TELLING


def hostile(proof: Proof, folder: Path, dice: Random) -> None:
    """What a description-driven fuzzer and a hand corpus can think of."""
    count = proof.sized(quick=1_500, full=200_000)
    num_generated = proof.sized(quick=240, full=40_000)
    with started(folder, "--watch-loop", "1", "--max-inside", "4096") as server:
        seen = _Seen()
        seen.generated(server, num_generated, dice)
        asyncio.run(seen.corpus(server, count - seen.num_inputs, dice))
        still_there = subprocess.run(["curl", "-sf", f"{server.url}/health"]).returncode == 0
        code = server.stop()
        say("  " + next((line for line in server.lines if line.startswith("longest callback")), "")[:200])
        longest = next((float(line.split()[2]) for line in server.lines if line.startswith("longest callback")), 1e9)
    proof.report("hostile", seen.num_inputs, f"at least {count}", holds=seen.num_inputs >= count)
    proof.report("hostile_refused", seen.num_refused)
    proof.report("fives", seen.num_fives, "0 of 5xx but 503", holds=seen.num_fives == 0)
    proof.report("hostile_telling", seen.num_telling, "0 bodies with addresses or traces", holds=seen.num_telling == 0)
    restarts = int(not still_there or code != 0)
    proof.report("hostile_restarts", restarts, "0", holds=restarts == 0)
    proof.report("loop_block_ms", longest, "at most 100", holds=longest <= 100)


class _Seen:
    """What came back."""

    def __init__(self) -> None:
        self.num_inputs = self.num_refused = self.num_fives = self.num_telling = 0

    def note(self, status: int, body: bytes, asked: object) -> None:
        self.num_inputs += 1
        self.num_refused += 400 <= status < 500
        if status >= 500 and status != 503:
            self.num_fives += 1
            say(f"  {status}: {str(asked)[:200]} -> {body[:200]!r}")
        if status != 200 and TELLING.search(body.decode("utf-8", "replace")):
            self.num_telling += 1
            say(f"  telling: {body[:200]!r}")

    def generated(self, server: Server, count: int, dice: Random) -> None:
        """Cases made from our own description, those that keep it and those that break it."""
        import requests  # noqa: PLC0415 - comes with the fuzzer
        import schemathesis  # noqa: PLC0415
        from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: PLC0415
        from schemathesis import GenerationMode  # noqa: PLC0415

        schema = schemathesis.openapi.from_dict(requests.get(f"{server.url}/openapi.json", timeout=10).json())
        paths = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
        session = requests.Session()
        for path in paths:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                strategy = schema[path]["POST"].as_strategy(generation_mode=mode)

                @seed(dice.getrandbits(32))
                @settings(max_examples=count // (2 * len(paths)), deadline=None, database=None, phases=[Phase.generate],
                          suppress_health_check=list(HealthCheck))  # fmt: skip
                @given(case=strategy)
                def attempt(case: Any) -> None:
                    made = case.as_transport_kwargs(base_url=server.url)
                    body = made.get("json")
                    if isinstance(body, dict):
                        body["max_tokens"] = 2
                    reply = session.request(**{**made, "timeout": 60})
                    self.note(reply.status_code, reply.content, body)

                attempt()

    async def corpus(self, server: Server, count: int, dice: Random) -> None:
        """Bodies put together from everything that has brought servers down, and then damaged."""
        gate = asyncio.Semaphore(16)

        async def one(session: aiohttp.ClientSession) -> None:
            path, data = _hostile_body(dice)
            async with gate:
                try:
                    async with session.post(f"{server.url}{path}", data=data) as reply:
                        self.note(reply.status, await reply.read(), data[:200])
                except aiohttp.ClientError as error:
                    self.note(599, str(error).encode(), data[:200])

        async with aiohttp.ClientSession() as session:
            for begun in range(0, count, 500):
                await asyncio.gather(*(one(session) for _ in range(min(500, count - begun))))


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 9, 16, 17, 21, 2**31, 2**63, -(2**63), 2**64, 1.5, -0.1, 1e308, 5e-324, "", "x",
    "oracle",
    "\x00", "é" * 100, "\ud83d\ude00", "x" * 5000, [], {}, [[]], [None], ["a"] * 20, [1] * 600, [-1], [337], [1.5],
    [[1, 2]] * 3,
    {"1": 1}, {"-1": 1}, {"a": 1}, {"type": "json_object"}, {"include_usage": True}, [{"role": "user",
    "content": "x"}],
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
    "service_tier", "ignore_eos",
]  # fmt: skip
RAW = [
    b"", b"{", b"[]", b"null", b"{}", b'{"prompt":', b'{"a":1,"a":2}', b'{"prompt": NaN}', b'{"seed": -Infinity}',
    b"[" * 5000,
    b'{"x":' * 3000, b'{"n": 1e999}', b'{"prompt": "\\ud800"}', b"\xff\xfe\x00", b'{"seed":' + b"9" * 6000 + b"}",
    b'{"prompt": "\\u0000"}',
]  # fmt: skip


def _hostile_body(dice: Random) -> tuple[str, bytes]:
    path = dice.choice(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
    if dice.random() < 0.1:
        return path, dice.choice(RAW)
    if dice.random() < 0.003:
        return path, json.dumps({"model": "oracle", "prompt": [dice.choice([1, "a", [1]])] * 300_000}).encode()
    body: dict[str, Any] = {"model": "oracle", "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi", "tokens": [40]}
    for name in dice.sample(NAMES, dice.randint(0, 4)):
        body[name] = dice.choice(VALUES)
    data = bytearray(json.dumps(body, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass"))
    for _ in range(dice.choice([0, 0, 0, 1, 5])):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return path, bytes(data)


def auth(proof: Proof, folder: Path) -> None:
    """Every route that is not public, in every disguise, with every key that is none."""
    keys = folder / "keys.json"
    good, revoked = add_key(keys, "good"), add_key(keys, "revoked")
    revoke_key(keys, "revoked")
    with started(folder, "--keys-file", str(keys)) as server:
        tried, accepted = asyncio.run(_auth_matrix(server, good, revoked))
    proof.report("auth_tried", tried)
    proof.report("auth_accepted", accepted, "0", holds=accepted == 0 and tried > 0)


SHAPES = ("{}", "{}?/health", "/health/..{}", "//{}", "{}/", "{}%2f..%2fhealth", "{};/ready")


async def _auth_matrix(server: Server, good: str, revoked: str) -> tuple[int, int]:
    tried = accepted = 0
    presented: list[dict[str, str]] = [
        {}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {revoked}"}, {"x-api-key": revoked},
        {"authorization": f"Bearer {good[:-1]}"}, {"authorization": f"Basic {good}"}, {"authorization": good},
        {"authorization": f"Bearer {good.upper()}"}, {"cookie": f"key={good}"},
    ]  # fmt: skip
    hosts = ["127.0.0.1", "x/health?", "x/health#", "x/../health", "localhost:8000/ready?", "[::1]", "health", "a\\@b"]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/openapi.json", headers={"x-api-key": good}) as response:
            paths = [path for path in (await response.json())["paths"] if path not in ("/health", "/ready")]
        for path in [one.replace("{name}", "oracle") for one in paths]:
            shapes = [
                path,
                f"{path}?/health",
                f"/health/..{path}",
                f"//{path}",
                f"{path}/",
                f"{path}%2f..%2fhealth",
                f"{path};/ready",
            ]
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
                for shape, host in [(shape, hosts[0]) for shape in shapes] + [(path, host) for host in hosts[1:]]:
                    for headers in presented:
                        raw = f"{method} {shape} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: 0\r\n"
                        raw += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                        status = await _status_of(server.port, raw + "\r\n")
                        tried += 1
                        accepted += status < 400
    return tried, accepted


async def _status_of(port: int, raw: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw.encode())
    line = await reader.readline()
    writer.close()
    return int(line.split()[1]) if line else 499
