"""Reproductions against servers that run: one with keys, one without, both `quire serve` of SmolLM2.

How long others wait is compared with how long they wait beside nothing, or beside plain requests, in the same minute.
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
from proofs.findings.open.in_readers import MIB, over
from proofs.framework.browser import browsing
from quire.api.access.keys import add_key
from quire.api.web_page import PAGES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NAMES = ("attacker", "second", "other", "stream")
A3 = 'start: e\ne: e e | e e e | "a"'
LEAVES_AFTER_S = 2.0
LOOKED_AT_S = 50.0
ADDITIONAL_S = 1.5
"""What a one-token chat may take beside an attack, over what it takes alone; the attacks made it 20 s."""


class Servers:
    """Started once they are needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._keys_file = folder / "reproduced-keys.json"
        self.keys = {name: add_key(self._keys_file, name) for name in NAMES}

    def _started(self, *words: str) -> Server:
        own = (str(smollm2_directory()), "--served-model-name", "m", "--memory", "2GiB", "--tool-format", "hermes")
        return self._stack.enter_context(started(self._folder, *own, *words, module="quire serve"))

    @cached_property
    def locked(self) -> Server:
        """With the keys of `NAMES`."""
        return self._started("--keys-file", str(self._keys_file))

    @cached_property
    def store(self) -> Path:
        return self._folder / "reproduced-store.db"

    @cached_property
    def open(self) -> Server:
        """Without keys, with a store and a page that may ask it."""
        return self._started("--store", str(self.store), "--allow-origin", "https://app.example")


def sent(
    server: Server,
    body: Any,
    key: str = "",
    path: str = CHAT,
    *,
    timeout_s: float = 300.0,
    method: str = "POST",
    more: Mapping[str, str] | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    """One request; status 0: its client left after so many seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    headers = {
        "content-type": "application/json",
        **({"authorization": f"Bearer {key}"} if key else {}),
        **(more or {}),
    }
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}
    except TimeoutError:
        return 0, b"", {}
    finally:
        connection.close()


def seconds_of_chat(server: Server, key: str = "") -> float:
    began_s = time.perf_counter()
    status, data, _ = sent(server, HELLO, key)
    if status != 200:
        raise RuntimeError(f"expected 200, got {status}: {data[:200]!r}")
    return time.perf_counter() - began_s


def chat_of_tools(first: int) -> dict[str, Any]:
    """82 tools; no other request has one of them."""
    odd = (999_983 - 2 * at for at in range(first, first + 82))
    shapes = [{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": one}}} for one in odd]
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": one}} for at, one in enumerate(shapes)]
    return {**HELLO, "tools": tools}


def beside(server: Server, keys: Sequence[str], other: str) -> str:
    """What another client's chat takes while these send tools and leave."""
    alone_s = max(seconds_of_chat(server, other) for _ in range(3))
    with ThreadPoolExecutor() as threads:
        for at, key in enumerate(keys):
            threads.submit(sent, server, chat_of_tools(1_000 * (at + 1) + 7 * len(keys)), key, timeout_s=LEAVES_AFTER_S)
        time.sleep(0.3)
        taken_s = max(seconds_of_chat(server, other) for _ in range(3))
    return over(f"a chat, {alone_s:.2f} s alone", taken_s, alone_s + ADDITIONAL_S)


def tools_of_two_keys(servers: Servers) -> str:
    """A2 82 tools of two keys made a third one's chat take 21.9 s."""
    server = servers.locked
    return beside(server, [servers.keys[name] for name in ("attacker", "second")], servers.keys["other"])


def tools_without_keys(servers: Servers) -> str:
    """A2 82 tools of one client without a key made another's chat take 22.2 s."""
    return beside(servers.open, [""], "")


@contextmanager
def gaps_of(server: Server, key: str) -> Iterator[list[float]]:
    """Between the events of a stream of this key, for as long as it is looked at."""
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


def median_gap_s(servers: Servers, bodies: Sequence[Callable[[], Any]], seconds: float, at_once_s: float) -> float:
    """The stream's, in the last ten seconds of as many connections as there are bodies, each sending its own again."""
    until_s = time.monotonic() + seconds

    def again(make: Callable[[], Any]) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            sent(servers.locked, make(), servers.keys["attacker"], timeout_s=max(0.1, left_s))
            time.sleep(at_once_s)

    with gaps_of(servers.locked, servers.keys["stream"]) as gaps, ThreadPoolExecutor(len(bodies)) as threads:
        for make in bodies:
            threads.submit(again, make)
        time.sleep(max(0.0, until_s - time.monotonic() - 10.0))
        num_before = len(gaps)
        time.sleep(10.0)
        return statistics.median(gaps[num_before:] or [10.0])


def masks_that_grow(servers: Servers) -> str:
    """A3 four chats with a grammar of 30 characters made another key's gap 3.2 s, 0.093 s beside plain ones."""
    chat = {**STORY, "n": 8, "max_tokens": 1500}
    plain_s = median_gap_s(servers, [lambda: chat] * 4, LOOKED_AT_S, 1.0)
    grown_s = median_gap_s(servers, [lambda: {**chat, "grammar": A3, "ignore_eos": False}] * 4, LOOKED_AT_S, 1.0)
    return over(f"p50 of gaps, {plain_s:.3f} s beside plain ones", grown_s, 2.0 * plain_s)


def new_schemas(servers: Servers) -> str:
    """B new schemas of 250 properties made another key's gap 14 times as long: they were compiled between steps."""
    number = iter(range(1_000_000))

    def body(is_new: bool) -> dict[str, Any]:
        named = next(number) if is_new else 0
        shape = {"type": "object", "properties": {f"p{named}_{at}": {"type": "integer"} for at in range(250)}}
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": shape}}
        return {**HELLO, "response_format": wanted}

    known_s = median_gap_s(servers, [lambda: body(is_new=False)] * 6, 20.0, 0.0)
    new_s = median_gap_s(servers, [lambda: body(is_new=True)] * 6, 20.0, 0.0)
    return over(f"p50 of gaps, {known_s:.3f} s beside known ones", new_s, 2.0 * known_s)


def worker_mib(server: Server) -> float:
    """The largest process below the server."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in children_of(server.pid)]
    return max(pages) * os.sysconf("SC_PAGE_SIZE") / MIB


def kept_grammars(servers: Servers) -> str:
    """B 120 grammars of 40 kB took the worker 261 MB."""

    def body(at: int) -> dict[str, Any]:
        values = [f"{at}-{one}-{'v' * 30}" for one in range(1_000)]
        return {
            **HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": values}}},
        }

    for at in range(4):
        sent(servers.open, body(at))
    before = worker_mib(servers.open)
    failed = sum(sent(servers.open, body(at))[0] != 200 for at in range(4, 124))
    return over("the worker grew by", worker_mib(servers.open) - before, 64, "MiB") or over("refused", failed, 0, "")


def known_grammar_waits(servers: Servers) -> str:
    """B a request with a grammar known for long waited for another's check of up to 10 s."""
    server, known = servers.locked, {**HELLO, "regex": "[a-z]{3}"}
    key = servers.keys["other"]
    sent(server, known, key)

    def seconds() -> float:
        began_s = time.perf_counter()
        sent(server, known, key)
        return time.perf_counter() - began_s

    alone_s = max(seconds() for _ in range(3))
    with ThreadPoolExecutor() as threads:
        threads.submit(sent, server, chat_of_tools(9_000), servers.keys["attacker"])
        time.sleep(0.1)
        taken_s = max(seconds() for _ in range(10))
    return over(f"alone {alone_s:.2f} s, beside a check", taken_s, alone_s + ADDITIONAL_S)


def long_choices(servers: Servers) -> str:
    """A9 `choice` of more than 2,000 texts was a 400 in the middle of an answer."""
    bodies = {
        count: {**HELLO, "max_tokens": 8, "choice": [f"c{at}" for at in range(count)]}
        for count in (1900, 2100, 5000, 10_000)
    }
    found = {count: sent(servers.open, body) for count, body in bodies.items()}
    return ", ".join(f"{count}: {status} {data[:200]!r}" for count, (status, data, _) in found.items() if status != 200)


def nested_arguments(servers: Servers) -> str:
    """A11 arguments nested 500 to 900 deep blamed the template, with an internal name."""
    shown = []
    for depth in (500, 700, 900):
        call = {"name": "f", "arguments": f'{{"a":{"[" * depth}1{"]" * depth}}}'}
        calls = [{"id": "1", "type": "function", "function": call}]
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        status, data, _ = sent(servers.open, {**HELLO, "messages": turns})
        if b"Broken(" in data or b"does not compile" in data or status >= 500:
            shown.append(f"{depth}: {status} {data[:200]!r}")
    return ", ".join(shown)


def response_quoted_twice(servers: Servers) -> str:
    """A11 the id of a response that is not found was quoted twice."""
    body = {"model": "m", "input": "x", "previous_response_id": "resp_nothing"}
    _, data, _ = sent(servers.open, body, path=RESPONSES)
    return "" if "with id 'resp_nothing' not found" in json.loads(data)["error"]["message"] else repr(data[:200])


def preflight(servers: Servers) -> str:
    """A11 the preflight of an allowed page left out DELETE and an Anthropic client's headers."""
    own = {"origin": "https://app.example", "access-control-request-method": "DELETE"}
    _, _, headers = sent(servers.open, None, path=f"{RESPONSES}/resp_1", method="OPTIONS", more=own)
    methods, names = (headers.get(f"access-control-allow-{one}", "").lower() for one in ("methods", "headers"))
    return (
        ""
        if "delete" in methods and "anthropic-version" in names and "anthropic-beta" in names
        else f"{methods}; {names}"
    )


def renderer_of(server: Server) -> list[int]:
    """The processes that render its templates."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(server.pid)}
    return [pid for pid, line in lines.items() if b"rendering.process" in line]


def renderer_is_held_up(servers: Servers) -> str:
    """A11 a renderer that the machine holds up was the client's fault."""
    seconds_of_chat(servers.open)
    found = renderer_of(servers.open)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    status, data, _ = sent(servers.open, HELLO)
    seconds_of_chat(servers.open)
    return f"{len(found)} stopped: {status} {data[:200]!r}" if status == 400 or not found else ""


def renderer_is_killed(servers: Servers) -> str:
    """A11 a renderer that is killed again and again: chats that hang, or that are the client's fault."""
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(0.15):
            for pid in renderer_of(servers.open):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        found = [sent(servers.open, HELLO, timeout_s=60)[0] for _ in range(16)]
    finally:
        is_over.set()
        thread.join()
    seconds_of_chat(servers.open)
    return "" if {*found} <= {200, 503} else str(found)


def junk_of_tools(servers: Servers) -> str:
    """B 2 MB of junk in tools were written again with every message of a thread."""
    tools = [{"type": "web_search_20250305", "name": "web_search", "junk": os.urandom(950_000).hex()}]
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    status, data, _ = sent(servers.open, {**body, "tools": tools, "thread": {"type": "create"}}, path=MESSAGES)
    if status != 200:
        return repr(data[:200])
    for _ in range(4):
        thread = {"type": "continue", "previous_message_id": json.loads(data)["id"]}
        status, data, _ = sent(servers.open, {**body, "thread": thread}, path=MESSAGES)
        if status != 200:
            return repr(data[:200])
    files = [servers.store, *(servers.store.parent.glob(f"{servers.store.name}-wal"))]
    return over("the store has", sum(path.stat().st_size for path in files) / MIB, 1.0, "MiB")


def misspelt(servers: Servers) -> str:
    """H7 misspelt parameters were swallowed."""
    body = {"messages": HELLO["messages"], "max_token": 3, "temprature": 0}
    status, data, _ = sent(servers.open, body)
    return "" if status == 400 and b"max_token" in data else f"{status} {data[:200]!r}"


def polls_in_the_log(servers: Servers) -> str:
    """H17 every poll and each of the dashboard's files was a line of the log."""
    server = servers.open
    paths = ("/ready", "/health", "/metrics", *(files.path_of(name) for files in PAGES for name in files.names))
    for path in paths:
        sent(server, None, path=path, method="GET")
    server.admin("/stats")
    seconds_of_chat(server)
    time.sleep(1.0)
    shown = sorted({str(line["path"]) for line in server.access_lines()} & {*paths, "/stats"})
    return ", ".join(shown)


def wrong_key_on_the_page(servers: Servers) -> str:
    """H15 the page said nothing of a wrong key."""
    return asyncio.run(_wrong_key(servers.locked.url))


async def _wrong_key(url: str) -> str:
    titles = []
    async with browsing() as opened, opened() as page:
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
    """H18 the dashboard said that nothing is cached, before it had looked."""
    seconds_of_chat(servers.open)
    return asyncio.run(_first_words_of_the_tree(servers.open.url))


async def _first_words_of_the_tree(url: str) -> str:
    async with browsing() as opened, opened() as page:
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
