"""Findings 1 and 15 at a real server: how one key slows another key's requests, and what foreign web pages can send."""

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, say
from benchmarks.test_model import smollm2_directory
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from quire.api.access.auth import Gate
from quire.api.access.keys import KeyRing, add_key
from quire.api.app import make_app
from quire.api.models.registry import Models
from quire.api.server_state import ServerState
from quire.observe.metrics import Metrics

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0.0}
HEALTH_EVERY_S = 0.01
EVIL, ALLOWED = "https://evil.example", "https://chat.example.com"
FOREIGN: tuple[dict[str, str], ...] = (
    *({"host": host} for host in ("evil.example", "evil.example:80", "localhost.evil.example", "192.0.2.1", "[::2]")),
    *({"origin": origin} for origin in (EVIL, "null", "http://localhost:1", "file://", "http://127.0.0.1")),
    *({"content-type": kind} for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")),
    {"content-type": "text/plain; x=application/json"},
)
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@contextmanager
def serving(*words: str, keys: Path | None = None) -> Iterator[Server]:
    """`quire serve` with the test model."""
    arguments = (str(smollm2_directory()), "--served-model-name", "m", "--memory", "2GiB")
    with_keys = () if keys is None else ("--keys-file", str(keys))
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), *arguments, *with_keys, *words, module="quire serve") as server,
    ):
        yield server


# -- one key and another -----------------------------------------------------------------------------------------------


@dataclass
class Window:
    """The latencies of the other key's requests for some seconds."""

    health_s: list[float] = field(default_factory=list)
    chat_s: list[float] = field(default_factory=list)
    tokenize_s: list[float] = field(default_factory=list)


@section("stall")
def stall(proof: Proof) -> None:
    """Windows with and without an attack in turns, for each kind of attack."""
    rounds, window_s = proof.sized(quick=2, full=5), float(proof.sized(quick=4, full=8))
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        secret = add_key(keys, "other")
        limited = add_key(keys, "limited", requests_per_minute=1, tokens_per_minute=100)
        unlimited = add_key(keys, "unlimited")
        with serving(keys=keys) as server:
            watch(server.port, secret, 2.0)  # warm-up
            started_s = time.monotonic()
            for kind, key, path in (("", limited, CHAT), ("_unlimited", unlimited, TOKENIZE)):
                calm, attacked, statuses = attacked_windows(server.port, secret, (key, path), rounds, window_s)
                report(proof, kind, calm, attacked)
                say(f"  statuses of the attacker: {dict(statuses)}")
                if key == limited:
                    minutes = 1 + (time.monotonic() - started_s) / 60
                    uncharged = max(0, statuses.total() - statuses["429"] - int(minutes))
                    proof.equals("attack_uncharged", uncharged, 0, "tries beyond the key's limit that got no 429")
                    proof.at_least("attack_tries", statuses.total(), 100)


def attacked_windows(
    port: int, secret: str, attacker: tuple[str, str], rounds: int, window_s: float
) -> tuple[Window, Window, Counter[str]]:
    """The latencies in calm and in attacked windows, and the statuses that the attacker got."""
    calm, attacked, statuses = Window(), Window(), Counter[str]()
    for _ in range(rounds):
        watch(port, secret, window_s, calm)
        # A real attacker is another machine, so sending must not take processor time from the server.
        command = ["nice", "-n", "19", sys.executable, "-m", "proofs.findings.attack", str(port), *attacker]
        command.append(str(window_s + 1.0))
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            time.sleep(1.0)  # until the attack has begun
            watch(port, secret, window_s, attacked)
            output, _ = process.communicate(timeout=300)
        statuses.update(json.loads(output.splitlines()[-1]))
    return calm, attacked, statuses


def report(proof: Proof, kind: str, calm: Window, attacked: Window) -> None:
    ratio = percentile(attacked.chat_s, 95) / percentile(calm.chat_s, 95)
    proof.report(f"stall_health_calm_ms{kind}", 1000 * percentile(calm.health_s, 99))
    proof.at_most(f"stall_health_p99_ms{kind}", 1000 * percentile(attacked.health_s, 99), 100)
    proof.report(f"stall_chat_calm_ms{kind}", 1000 * percentile(calm.chat_s, 95))
    proof.at_most(f"stall_ratio{kind}", ratio, 2)
    proof.report(f"stall_tokenize_ms{kind}", 1000 * percentile(attacked.tokenize_s, 95))


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def watch(port: int, secret: str, seconds: float, window: Window | None = None) -> Window:
    """Send another key's requests for some seconds: `/health` in a thread, chats and tokenizations in turns."""
    window, end_s = window or Window(), time.monotonic() + seconds

    def health() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while time.monotonic() < end_s:
            window.health_s.append(seconds_of(connection, secret, "GET", "/health", None))
            time.sleep(HEALTH_EVERY_S)
        connection.close()

    health_thread = threading.Thread(target=health)
    health_thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while time.monotonic() < end_s:
        window.chat_s.append(seconds_of(connection, secret, "POST", CHAT, HELLO))
        window.tokenize_s.append(seconds_of(connection, secret, "POST", TOKENIZE, {"prompt": "Hello"}))
    connection.close()
    health_thread.join()
    return window


def seconds_of(connection: http.client.HTTPConnection, secret: str, method: str, path: str, body: Any) -> float:
    """Send a request; returns the seconds until its answer. Raises RuntimeError if its status is not 200."""
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    start_s = time.perf_counter()
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    response.read()
    if response.status != 200:
        raise RuntimeError(f"expected status 200 of {method} {path} with the other key, got {response.status}")
    return time.perf_counter() - start_s


# -- web pages ---------------------------------------------------------------------------------------------------------


def routes() -> list[tuple[str, str]]:
    """Every method and path of the application, and one path that it does not have."""
    app = make_app(ServerState(Models([]), Metrics()), Gate(KeyRing(None)))
    pairs = [(method, route.path.replace("{name:path}", "m")) for route in app.routes for method in route.methods]  # type: ignore[attr-defined]
    return [*sorted(pairs), ("POST", "/nowhere")]


@section("foreign pages")
def foreign_pages(proof: Proof) -> None:
    """Requests to every route with all headers that a foreign page could send."""
    all_routes = routes()
    proof.report("foreign_routes", len(all_routes))
    with serving() as server:
        answers = [(headers, *send(server.port, *route, headers)) for route in all_routes for headers in FOREIGN]
        accepted = [(headers, status) for headers, status, _ in answers if status not in (403, 415)]
        own_statuses = [send(server.port, *route, {})[0] for route in all_routes]
    for headers, status in accepted[:5]:
        say(f"  accepted: {headers}: {status}")
    proof.report("foreign_pages_tried", len(answers))
    proof.equals("foreign_pages", len(accepted), 0, "accepted")
    num_refused = sum(status in (403, 415) for status in own_statuses)
    proof.equals("foreign_pages_own_refused", num_refused, 0, "requests that do not come from a foreign page")
    cors(proof, all_routes)


def cors(proof: Proof, all_routes: list[tuple[str, str]]) -> None:
    """On a server with keys, only pages of the allowed origin get CORS headers, which let them read answers."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        with_key = {"authorization": f"Bearer {add_key(keys, 'page')}"}
        with serving("--allow-origin", ALLOWED, keys=keys) as server:
            num_with_cors = Counter[str]()
            for origin in (EVIL, "null", f"{ALLOWED}.evil.example", ALLOWED):
                for method, path in all_routes:
                    for more in (with_key, {}, {"method": "OPTIONS", **PREFLIGHT}):
                        headers = {"origin": origin, "host": "llm.example.com", **more}
                        names = send(server.port, headers.pop("method", method), path, headers)[1]
                        num_with_cors[origin] += any(name.startswith("access-control-") for name in names)
    num_foreign = num_with_cors.total() - num_with_cors[ALLOWED]
    proof.equals("foreign_cors", num_foreign, 0, "answers with CORS headers for origins that are not allowed")
    proof.equals("allowed_cors", num_with_cors[ALLOWED], 3 * len(all_routes), "all answers for the allowed origin")


def send(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, list[str]]:
    """Send a request; returns the status and the header names of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1, "tokens": [40], **_messages(path)})
    try:
        all_headers = {"content-type": "application/json", **headers}
        connection.request(method, path, body if method == "POST" else None, all_headers)
        response = connection.getresponse()
        response.read()
        return response.status, [name.lower() for name, _ in response.getheaders()]
    finally:
        connection.close()


def _messages(path: str) -> dict[str, Any]:
    return {"messages": HELLO["messages"]} if path == CHAT else {}
