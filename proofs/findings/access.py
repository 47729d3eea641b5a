"""What one key can do to another, and what a web page can do at all: findings 1 and 15 at a real server."""

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
    own = (str(smollm2_directory()), "--served-model-name", "m", "--memory", "2GiB")
    locked = () if keys is None else ("--keys-file", str(keys))
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), *own, *locked, *words, module="quire serve") as server,
    ):
        yield server


# -- one key and another -----------------------------------------------------------------------------------------------


@dataclass
class Window:
    """What the other key saw for some seconds."""

    health_s: list[float] = field(default_factory=list)
    chat_s: list[float] = field(default_factory=list)
    tokenize_s: list[float] = field(default_factory=list)


@section("stall")
def stall(proof: Proof) -> None:
    """Windows with and without an attack in turns; for each kind of attack."""
    rounds, window_s = proof.sized(quick=2, full=5), float(proof.sized(quick=4, full=8))
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        secret = add_key(keys, "other")
        limited = add_key(keys, "limited", requests_per_minute=1, tokens_per_minute=100)
        unlimited = add_key(keys, "unlimited")
        with serving(keys=keys) as server:
            watch(server.port, secret, 2.0)  # warm
            started_s = time.monotonic()
            for kind, key, path in (("", limited, CHAT), ("_unlimited", unlimited, TOKENIZE)):
                calm, attacked, told = attacked_windows(server.port, secret, (key, path), rounds, window_s)
                report(proof, kind, calm, attacked)
                say(f"  the attacker was told {dict(told)}")
                if key == limited:
                    minutes = 1 + (time.monotonic() - started_s) / 60
                    uncharged = max(0, told.total() - told["429"] - int(minutes))
                    proof.equals("attack_uncharged", uncharged, 0, "tries for nothing")
                    proof.at_least("attack_tries", told.total(), 100)


def attacked_windows(
    port: int, secret: str, attacker: tuple[str, str], rounds: int, window_s: float
) -> tuple[Window, Window, Counter[str]]:
    """What was seen in calm and in attacked windows, and what the attacker was told."""
    calm, attacked, told = Window(), Window(), Counter[str]()
    for _ in range(rounds):
        watch(port, secret, window_s, calm)
        # An attacker is another machine: what it costs to send must not be taken from the processors that serve.
        words = ["nice", "-n", "19", sys.executable, "-m", "proofs.findings.attack", str(port), *attacker]
        words.append(str(window_s + 1.0))
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            time.sleep(1.0)  # until it has begun
            watch(port, secret, window_s, attacked)
            output, _ = process.communicate(timeout=300)
        told.update(json.loads(output.splitlines()[-1]))
    return calm, attacked, told


def report(proof: Proof, kind: str, calm: Window, attacked: Window) -> None:
    ratio = percentile(attacked.chat_s, 95) / percentile(calm.chat_s, 95)
    proof.report(f"stall_health_calm_ms{kind}", 1000 * percentile(calm.health_s, 99))
    proof.at_most(f"stall_health_p99_ms{kind}", 1000 * percentile(attacked.health_s, 99), 100)
    proof.report(f"stall_chat_calm_ms{kind}", 1000 * percentile(calm.chat_s, 95))
    proof.at_most(f"stall_ratio{kind}", ratio, 2)
    proof.report(f"stall_tokenize_ms{kind}", 1000 * percentile(attacked.tokenize_s, 95))


def percentile(values: list[float], of: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[of - 1]


def watch(port: int, secret: str, seconds: float, seen: Window | None = None) -> Window:
    """Another key's requests, one after the other on connections of their own, for so long."""
    seen, end_s = seen or Window(), time.monotonic() + seconds

    def health() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while time.monotonic() < end_s:
            seen.health_s.append(timed(connection, secret, "GET", "/health", None))
            time.sleep(HEALTH_EVERY_S)
        connection.close()

    watching = threading.Thread(target=health)
    watching.start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while time.monotonic() < end_s:
        seen.chat_s.append(timed(connection, secret, "POST", CHAT, HELLO))
        seen.tokenize_s.append(timed(connection, secret, "POST", TOKENIZE, {"prompt": "Hello"}))
    connection.close()
    watching.join()
    return seen


def timed(connection: http.client.HTTPConnection, secret: str, method: str, path: str, body: Any) -> float:
    """Seconds until it was answered, which it must be."""
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    begun_s = time.perf_counter()
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    response.read()
    if response.status != 200:
        raise RuntimeError(f"{method} {path} of the other key was answered with {response.status}")
    return time.perf_counter() - begun_s


# -- web pages ---------------------------------------------------------------------------------------------------------


def routes() -> list[tuple[str, str]]:
    """Every method and path of the application, and one that it does not have."""
    app = make_app(ServerState(Models([]), Metrics()), Gate(KeyRing(None)))
    found = [(method, route.path.replace("{name:path}", "m")) for route in app.routes for method in route.methods]  # type: ignore[attr-defined]
    return [*sorted(found), ("POST", "/nowhere")]


@section("foreign pages")
def foreign_pages(proof: Proof) -> None:
    """Every route, asked in every way a foreign page could ask."""
    every = routes()
    proof.report("foreign_routes", len(every))
    with serving() as server:
        asked = [(how, *sent(server.port, method, path, how)) for method, path in every for how in FOREIGN]
        accepted = [(how, status) for how, status, _ in asked if status not in (403, 415)]
        own = [sent(server.port, method, path, {})[0] for method, path in every]
    for one in accepted[:5]:
        say(f"  accepted: {one}")
    proof.report("foreign_pages_tried", len(asked))
    proof.equals("foreign_pages", len(accepted), 0, "accepted")
    refused = sum(status in (403, 415) for status in own)
    proof.equals("foreign_pages_own_refused", refused, 0, "what comes from no foreign page is let in")
    cors(proof, every)


def cors(proof: Proof, every: list[tuple[str, str]]) -> None:
    """With keys: leave to read for pages of one origin and for nobody else's."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        known = {"authorization": f"Bearer {add_key(keys, 'page')}"}
        with serving("--allow-origin", ALLOWED, keys=keys) as server:
            given = Counter[str]()
            for origin in (EVIL, "null", f"{ALLOWED}.evil.example", ALLOWED):
                for method, path in every:
                    for how in (known, {}, {"method": "OPTIONS", **PREFLIGHT}):
                        used = {"origin": origin, "host": "llm.example.com", **how}
                        told = sent(server.port, used.pop("method", method), path, used)[1]
                        given[origin] += any(name.startswith("access-control-") for name in told)
    stray = given.total() - given[ALLOWED]
    proof.equals("foreign_cors", stray, 0, "headers for origins that are not allowed")
    proof.equals("allowed_cors", given[ALLOWED], 3 * len(every), "all for the one that is")


def sent(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, list[str]]:
    """The status, and the names of the headers that came with it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1, "tokens": [40], **_messages(path)})
    try:
        used = {"content-type": "application/json", **headers}
        connection.request(method, path, body if method == "POST" else None, used)
        response = connection.getresponse()
        response.read()
        return response.status, [name.lower() for name, _ in response.getheaders()]
    finally:
        connection.close()


def _messages(path: str) -> dict[str, Any]:
    return {"messages": HELLO["messages"]} if path == CHAT else {}
