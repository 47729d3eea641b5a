"""Reproductions against two running servers, `quire serve` of SmolLM2: one with API keys, one without.

The latency of other clients is compared with that without an attack, or beside plain requests, in the same minute.
"""

import asyncio
import http.client
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.test_model import smollm2_directory
from proofs.api.load import Server, children_of, started
from proofs.findings.neighbours.neighbours import HELLO, STORY
from proofs.findings.open.in_readers import MIB, excess
from proofs.framework.browser import browsing
from quire.api.access.keys import add_key
from quire.api.web_page import PAGES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NAMES = ("attacker", "second", "other", "stream")
A3 = 'start: e\ne: e e | e e e | "a"'
LEAVES_AFTER_S = 2.0
WINDOW_S = 50.0
MAX_DELAY_S = 1.5
"""How much longer a one-token chat may take beside an attack than alone; the attacks delayed it by 20 s."""


class Servers:
    """Two servers, started when they are first used."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._keys_file = folder / "reproduced-keys.json"
        self.keys = {name: add_key(self._keys_file, name) for name in NAMES}

    def _start(self, *words: str) -> Server:
        options = (str(smollm2_directory()), "--served-model-name", "m", "--memory", "2GiB", "--tool-format", "hermes")
        return self._stack.enter_context(started(self._folder, *options, *words, module="quire serve"))

    @cached_property
    def with_keys(self) -> Server:
        """The server with the keys of `NAMES`."""
        return self._start("--keys-file", str(self._keys_file))

    @cached_property
    def store(self) -> Path:
        return self._folder / "reproduced-store.db"

    @cached_property
    def without_keys(self) -> Server:
        """The server without keys, with a store, and with an allowed origin of web pages."""
        return self._start("--store", str(self.store), "--allow-origin", "https://app.example")


def send(
    server: Server,
    body: Any,
    key: str = "",
    path: str = CHAT,
    *,
    timeout_s: float = 300.0,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    """Send one request; returns status, body and headers of the answer. After a timeout the status is 0."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    all_headers = {
        "content-type": "application/json",
        **({"authorization": f"Bearer {key}"} if key else {}),
        **(headers or {}),
    }
    try:
        connection.request(method, path, None if body is None else json.dumps(body), all_headers)
        response = connection.getresponse()
        return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}
    except TimeoutError:
        return 0, b"", {}
    finally:
        connection.close()


def seconds_of_chat(server: Server, key: str = "") -> float:
    start_s = time.perf_counter()
    status, data, _ = send(server, HELLO, key)
    if status != 200:
        raise RuntimeError(f"expected status 200, got {status}: {data[:200]!r}")
    return time.perf_counter() - start_s


def chat_with_tools(first: int) -> dict[str, Any]:
    """A chat with 82 tools; chats with another `first` have other tools."""
    divisors = (999_983 - 2 * number for number in range(first, first + 82))
    schemas = [{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": n}}} for n in divisors]
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": s}} for i, s in enumerate(schemas)]
    return {**HELLO, "tools": tools}


def delay_beside_tools(server: Server, keys: Sequence[str], other: str) -> str:
    """A message if another client's chats are slow while these keys send tools and disconnect; else empty."""
    alone_s = max(seconds_of_chat(server, other) for _ in range(3))
    with ThreadPoolExecutor() as threads:
        for index, key in enumerate(keys):
            body = chat_with_tools(1_000 * (index + 1) + 7 * len(keys))
            threads.submit(send, server, body, key, timeout_s=LEAVES_AFTER_S)
        time.sleep(0.3)
        beside_s = max(seconds_of_chat(server, other) for _ in range(3))
    return excess(f"a chat, {alone_s:.2f} s alone", beside_s, alone_s + MAX_DELAY_S)


def tools_of_two_keys(servers: Servers) -> str:
    """A2 82 tools of two keys made a third one's chat take 21.9 s."""
    keys = [servers.keys[name] for name in ("attacker", "second")]
    return delay_beside_tools(servers.with_keys, keys, servers.keys["other"])


def tools_without_keys(servers: Servers) -> str:
    """A2 82 tools of one client without a key made another's chat take 22.2 s."""
    return delay_beside_tools(servers.without_keys, [""], other="")


@contextmanager
def gaps_of(server: Server, key: str) -> Iterator[list[float]]:
    """Read a stream with this key while the block runs; yields the list of gaps between its events."""
    gaps, is_over = list[float](), threading.Event()

    def read() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        with suppress(http.client.HTTPException):
            connection.request("POST", CHAT, json.dumps(STORY), headers)
            response, last_s = connection.getresponse(), time.perf_counter()
            while not is_over.is_set() and (line := response.readline()):
                if line.startswith(b"data: {"):
                    gaps.append(time.perf_counter() - last_s)
                    last_s = time.perf_counter()
        connection.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield gaps
    finally:
        is_over.set()
        thread.join()


def median_gap_s(servers: Servers, bodies: Sequence[Callable[[], Any]], seconds: float, pause_s: float) -> float:
    """The stream's median gap in the last ten of some seconds. Meanwhile each body is sent over and over."""
    end_s = time.monotonic() + seconds

    def send_repeatedly(make: Callable[[], Any]) -> None:
        while (remaining_s := end_s - time.monotonic()) > 0:
            send(servers.with_keys, make(), servers.keys["attacker"], timeout_s=max(0.1, remaining_s))
            time.sleep(pause_s)

    with gaps_of(servers.with_keys, servers.keys["stream"]) as gaps, ThreadPoolExecutor(len(bodies)) as threads:
        for make in bodies:
            threads.submit(send_repeatedly, make)
        time.sleep(max(0.0, end_s - time.monotonic() - 10.0))
        num_before = len(gaps)
        time.sleep(10.0)
        return statistics.median(gaps[num_before:] or [10.0])


def masks_that_grow(servers: Servers) -> str:
    """A3 four chats with a grammar of 30 characters made another key's gap 3.2 s, 0.093 s beside plain ones."""
    chat = {**STORY, "n": 8, "max_tokens": 1500}
    plain_s = median_gap_s(servers, [lambda: chat] * 4, WINDOW_S, pause_s=1.0)
    attack = {**chat, "grammar": A3, "ignore_eos": False}
    attacked_s = median_gap_s(servers, [lambda: attack] * 4, WINDOW_S, pause_s=1.0)
    return excess(f"p50 of gaps, {plain_s:.3f} s beside plain chats", attacked_s, 2.0 * plain_s)


def new_schemas(servers: Servers) -> str:
    """B new schemas of 250 properties made another key's gap 14 times as long: they were compiled between steps."""
    number = iter(range(1_000_000))

    def body(is_new: bool) -> dict[str, Any]:
        prefix = f"p{next(number) if is_new else 0}"
        schema = {"type": "object", "properties": {f"{prefix}_{i}": {"type": "integer"} for i in range(250)}}
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return {**HELLO, "response_format": shape}

    old_s = median_gap_s(servers, [lambda: body(is_new=False)] * 6, seconds=20.0, pause_s=0.0)
    new_s = median_gap_s(servers, [lambda: body(is_new=True)] * 6, seconds=20.0, pause_s=0.0)
    return excess(f"p50 of gaps, {old_s:.3f} s beside an old schema", new_s, 2.0 * old_s)


def worker_mib(server: Server) -> float:
    """The memory of the server's largest child process, which is the worker."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in children_of(server.pid)]
    return max(pages) * os.sysconf("SC_PAGE_SIZE") / MIB


def kept_grammars(servers: Servers) -> str:
    """B 120 grammars of 40 kB took the worker 261 MB."""

    def body(number: int) -> dict[str, Any]:
        values = [f"{number}-{index}-{'v' * 30}" for index in range(1_000)]
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": values}}}
        return {**HELLO, "response_format": shape}

    server = servers.without_keys
    for number in range(4):
        send(server, body(number))
    before_mib = worker_mib(server)
    num_failed = sum(send(server, body(number))[0] != 200 for number in range(4, 124))
    return excess("growth", worker_mib(server) - before_mib, 64, "MiB") or excess("failed requests", num_failed, 0, "")


def known_grammar_waits(servers: Servers) -> str:
    """B a request with a cached grammar waited for the check of another request's grammar, for up to 10 s."""
    server, body = servers.with_keys, {**HELLO, "regex": "[a-z]{3}"}
    key = servers.keys["other"]
    send(server, body, key)

    def seconds() -> float:
        start_s = time.perf_counter()
        send(server, body, key)
        return time.perf_counter() - start_s

    alone_s = max(seconds() for _ in range(3))
    with ThreadPoolExecutor() as threads:
        threads.submit(send, server, chat_with_tools(9_000), servers.keys["attacker"])
        time.sleep(0.1)
        beside_s = max(seconds() for _ in range(10))
    return excess(f"alone {alone_s:.2f} s, beside a check", beside_s, alone_s + MAX_DELAY_S)


def long_choices(servers: Servers) -> str:
    """A9 `choice` of more than 2,000 texts was a 400 in the middle of an answer."""
    body = {**HELLO, "max_tokens": 8}
    bodies = {n: {**body, "choice": [f"c{i}" for i in range(n)]} for n in (1900, 2100, 5000, 10_000)}
    answers = {count: send(servers.without_keys, body)[:2] for count, body in bodies.items()}
    return ", ".join(f"{count}: {status} {data[:200]!r}" for count, (status, data) in answers.items() if status != 200)


def nested_arguments(servers: Servers) -> str:
    """A11 for arguments nested 500 to 900 deep, the error message blamed the template, with an internal name."""
    messages = []
    for depth in (500, 700, 900):
        call = {"name": "f", "arguments": f'{{"a":{"[" * depth}1{"]" * depth}}}'}
        calls = [{"id": "1", "type": "function", "function": call}]
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        status, data, _ = send(servers.without_keys, {**HELLO, "messages": turns})
        if b"Broken(" in data or b"does not compile" in data or status >= 500:
            messages.append(f"{depth}: {status} {data[:200]!r}")
    return ", ".join(messages)


def response_quoted_twice(servers: Servers) -> str:
    """A11 the error message for an unknown response quoted its id twice."""
    body = {"model": "m", "input": "x", "previous_response_id": "resp_nothing"}
    _, data, _ = send(servers.without_keys, body, path=RESPONSES)
    return "" if "with id 'resp_nothing' not found" in json.loads(data)["error"]["message"] else repr(data[:200])


def preflight(servers: Servers) -> str:
    """A11 the preflight answer for an allowed origin left out DELETE and an Anthropic client's headers."""
    sent_headers = {"origin": "https://app.example", "access-control-request-method": "DELETE"}
    _, _, headers = send(servers.without_keys, None, path=f"{RESPONSES}/resp_1", method="OPTIONS", headers=sent_headers)
    methods, names = (headers.get(f"access-control-allow-{kind}", "").lower() for kind in ("methods", "headers"))
    return (
        ""
        if "delete" in methods and "anthropic-version" in names and "anthropic-beta" in names
        else f"{methods}; {names}"
    )


def renderers_of(server: Server) -> list[int]:
    """The server's child processes that render chat templates."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(server.pid)}
    return [pid for pid, line in lines.items() if b"rendering.process" in line]


def renderer_is_held_up(servers: Servers) -> str:
    """A11 if the machine delayed the process that renders templates, the client got a 400."""
    seconds_of_chat(servers.without_keys)
    pids = renderers_of(servers.without_keys)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    status, data, _ = send(servers.without_keys, HELLO)
    seconds_of_chat(servers.without_keys)
    return f"{len(pids)} stopped: {status} {data[:200]!r}" if status == 400 or not pids else ""


def renderer_is_killed(servers: Servers) -> str:
    """A11 if the process that renders templates was killed repeatedly, chats hung or the client got a 400."""
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(0.15):
            for pid in renderers_of(servers.without_keys):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        statuses = [send(servers.without_keys, HELLO, timeout_s=60)[0] for _ in range(16)]
    finally:
        is_over.set()
        thread.join()
    seconds_of_chat(servers.without_keys)
    return "" if {*statuses} <= {200, 503} else str(statuses)


def junk_of_tools(servers: Servers) -> str:
    """B 2 MB of junk in tools were stored again with every message of a thread."""
    tools = [{"type": "web_search_20250305", "name": "web_search", "junk": os.urandom(950_000).hex()}]
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    server = servers.without_keys
    status, data, _ = send(server, {**body, "tools": tools, "thread": {"type": "create"}}, path=MESSAGES)
    if status != 200:
        return repr(data[:200])
    for _ in range(4):
        thread = {"type": "continue", "previous_message_id": json.loads(data)["id"]}
        status, data, _ = send(server, {**body, "thread": thread}, path=MESSAGES)
        if status != 200:
            return repr(data[:200])
    files = [servers.store, *(servers.store.parent.glob(f"{servers.store.name}-wal"))]
    return excess("size of the store", sum(path.stat().st_size for path in files) / MIB, 1.0, "MiB")


def misspelt(servers: Servers) -> str:
    """H7 misspelt parameters were ignored without a message."""
    body = {"messages": HELLO["messages"], "max_token": 3, "temprature": 0}
    status, data, _ = send(servers.without_keys, body)
    return "" if status == 400 and b"max_token" in data else f"{status} {data[:200]!r}"


def polls_in_the_log(servers: Servers) -> str:
    """H17 the access log had a line for every poll and for each of the dashboard's files."""
    server = servers.without_keys
    paths = ("/ready", "/health", "/metrics", *(files.path_of(name) for files in PAGES for name in files.names))
    for path in paths:
        send(server, None, path=path, method="GET")
    server.admin("/stats")
    seconds_of_chat(server)
    time.sleep(1.0)
    logged_paths = {str(line["path"]) for line in server.access_lines()} & {*paths, "/stats"}
    return ", ".join(sorted(logged_paths))


def wrong_key_on_the_page(servers: Servers) -> str:
    """H15 the page did not say that a key was wrong."""
    return asyncio.run(_use_wrong_key(servers.with_keys.url))


async def _use_wrong_key(url: str) -> str:
    titles = []
    async with browsing() as open_tab, open_tab() as page:
        await page.open(f"{url}/", 1280, 800)
        for key in ("", "sk-wrong"):
            if key:
                await page.run(
                    f"document.getElementById('key').value = '{key}';"
                    " document.querySelector('#key-dialog form').requestSubmit()"
                )
                await page.until("!document.getElementById('key').value && document.getElementById('key-dialog').open")
            await page.until("document.getElementById('key-dialog').open")
            titles.append(await page.run("document.getElementById('key-title').textContent"))
    return "" if titles == ["A key is required", "Unknown key"] else repr(titles)


def tree_not_looked_at(servers: Servers) -> str:
    """H18 the dashboard said that nothing is cached before it had data."""
    seconds_of_chat(servers.without_keys)
    return asyncio.run(_first_words_of_the_tree(servers.without_keys.url))


async def _first_words_of_the_tree(url: str) -> str:
    async with browsing() as open_tab, open_tab() as page:
        await page.open(f"{url}/dashboard", 1280, 800)
        for _ in range(40):
            if "Nothing is cached yet" in await page.run("document.body.innerText"):
                return "Nothing is cached yet."
            await asyncio.sleep(0.05)
    return ""


ITEMS = (
    tools_of_two_keys,
    tools_without_keys,
    masks_that_grow,
    new_schemas,
    kept_grammars,
    known_grammar_waits,
    long_choices,
    nested_arguments,
    response_quoted_twice,
    preflight,
    renderer_is_held_up,
    renderer_is_killed,
    junk_of_tools,
    misspelt,
    polls_in_the_log,
    wrong_key_on_the_page,
    tree_not_looked_at,
)
