"""The operator's routes and `quire top`: the routes refuse all other keys, no hostile name breaks the screen, and its
figures are those of the server.
"""

import asyncio
import json
import random
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.dashboard_load import agents
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key
from quire.cli.shared.found_servers import admin_request
from quire.cli.watch.top_figures import TopMetrics, json_fields
from quire.cli.watch.top_glyphs import ASCII, UNICODE
from quire.cli.watch.top_picture import Frame, screen_lines
from quire.cli.watch.top_watcher import TopWatcher, fetch_once
from quire.cli.watch.watch_source import WatchSource
from quire.cli.watch.watched_state import read_snapshot
from quire.errors import RequestError
from tests.support.servers.watch_stand_in import snapshot

SERVED = ("--blocks", "2048", "--running", "16", "--sequence-tokens", "4096", "--step-s", "0.02")
NUM_AGENTS = 24
ROUTES = ("/v1/admin/watch", "/v1/admin/watch?model=oracle", "/v1/admin/blocks/1")
OPERATIONS = ("stats", "requests", "drain", "cache/clear", "models/oracle/unload", "requests/req_1")
FAKE_HEADERS = (
    ("x-admin", "true"), ("x-forwarded-user", "operator"), ("x-forwarded-for", "127.0.0.1"), ("cookie", "admin=1"),
    ("x-original-url", "/health"), ("x-http-method-override", "GET"), ("host", "localhost"), ("x-api-key", "operator"),
)  # fmt: skip


@contextmanager
def _server_with_keys(proof: Proof) -> Iterator[tuple[Server, dict[str, str]]]:
    """Run a server with one admin key, and with tenants whose names sound like an administrator's."""
    keys_file = Path(mkdtemp(dir=proof.folder)) / "keys.json"
    keys = {name: add_key(keys_file, name) for name in ("alice", "admin", "operator")}
    keys["boss"] = add_key(keys_file, "boss", admin=True)
    with started(proof.folder, *SERVED, "--keys-file", str(keys_file)) as server:
        yield server, keys


def _status(port: int, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of an answer, without waiting for its body; 0 if the request could not be sent."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        response.close()
        return response.status
    except (HTTPException, OSError, UnicodeError, ValueError):
        return 0
    finally:
        connection.close()


def _near_secret(dice: random.Random, secret: str) -> str:
    """A text that is almost the secret."""
    position = dice.randrange(len(secret))
    letter = dice.choice(string.ascii_letters)
    return dice.choice(
        (
            secret[:position],
            secret + letter,
            secret.swapcase(),
            secret[:position] + ("#" if secret[position] != "#" else "+") + secret[position:],
        )
    )


def _disguised_path(dice: random.Random, path: str) -> str:
    return dice.choice(
        (path, f"/health/..{path}", f"{path}/", f"/{path}", f"{path};/health", path.replace("admin", "%61dmin"))
    )


@section("operator's doors")
def operator_routes(proof: Proof) -> None:
    """Try wrong keys and tenants' keys, and use the key of a dashboard page for routes that the page does not read."""
    dice, tries = proof.random, proof.sized(quick=300, full=2000)
    with _server_with_keys(proof) as (server, keys):
        num_accepted = [0, 0]
        for _ in range(tries):
            tenant = dice.choice(("alice", "admin", "operator"))
            key = dice.choice((keys[tenant], "", _near_secret(dice, keys["boss"]), "boss"))
            headers = dict(dice.sample(FAKE_HEADERS, dice.randrange(4)))
            headers[dice.choice(("authorization", "x-api-key"))] = dice.choice((f"Bearer {key}", key, f"Basic {key}"))
            num_accepted[0] += _status(server.port, "GET", _disguised_path(dice, dice.choice(ROUTES)), headers) == 200
        key = _page_key(server)
        for _ in range(tries):
            num_accepted[1] += _status(server.port, *_bad_page_request(dice, key)) == 200
        page_headers = {"authorization": f"Bearer {key}"}
        statuses = [_status(server.port, "GET", path, page_headers) for path in ROUTES]
        statuses += [_status(server.port, "GET", path, {"authorization": f"Bearer {keys['boss']}"}) for path in ROUTES]
        is_alive = _status(server.port, "GET", "/ready", {}) == 200
    proof.report("tries", 2 * tries)
    proof.equals("let_in_without_an_admin_key", num_accepted[0], 0)
    proof.equals(
        "let_through_the_dashboard", num_accepted[1], 0, "with a wrong page key, or on routes that no page reads"
    )
    proof.equals("operators_refused", sum(status != 200 for status in statuses), 0)
    proof.holds("nobody_drained_the_server", is_alive, "it still answers")


def _page_key(server: Server) -> str:
    """The key that a page of `quire dashboard` gets."""
    token = admin_request(server.admin_path, "POST", "/dashboard")["token"]
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/admin/session", headers={"authorization": f"Bearer {token}"})
    key = str(json.loads(connection.getresponse().read())["key"])
    connection.close()
    return key


def _bad_page_request(dice: random.Random, token: str) -> tuple[str, str, dict[str, str]]:
    """A request of a dashboard page with a wrong key, another method, or another route."""
    headers = {"authorization": f"Bearer {token}"}
    method, path = "GET", dice.choice(ROUTES)
    kind = dice.randrange(3)
    if kind == 0:
        headers = {"authorization": f"Bearer {_near_secret(dice, token)}", "x-api-key": token, "cookie": f"key={token}"}
    elif kind == 1:
        method = dice.choice(("POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"))
        path = f"/v1/admin/{dice.choice(OPERATIONS)}"
    else:
        path = dice.choice(("/v1/admin/", "/", "/v1/admin/watch/../", "/v1/admin/blocks/../")) + dice.choice(OPERATIONS)
    return method, path, headers


@section("top screens")
def screens(proof: Proof) -> None:
    """Draw names with terminal control characters, of any length, on screens of any size."""
    dice, num_wrong, num_lines = proof.random, 0, 0
    for _ in range(proof.sized(quick=1000, full=20_000)):
        figures = TopMetrics("http://127.0.0.1:8000")
        figures.add(read_snapshot(json.dumps(_hostile_snapshot(dice)).encode()))
        glyphs = dice.choice((UNICODE, ASCII))
        frame = Frame(dice.randint(20, 240), dice.randint(1, 80), glyphs)
        lines = screen_lines(figures, frame, dice.choice((None, _name(dice))), "q ends")
        num_lines += len(lines)
        num_wrong += len(lines) > frame.height
        num_wrong += sum(line.cell_len > frame.width or not line.plain.isprintable() for line in lines)
        num_wrong += glyphs.is_ascii and not all(line.plain.isascii() for line in lines)
    proof.report("top_lines", num_lines)
    proof.equals("top_lines_upset", num_wrong, 0, "too wide, too many, or with control characters")


def _name(dice: random.Random) -> str:
    pieces = (
        "\x1b[2J",
        "\x1b]0;x\x07",
        "\r\n",
        "\x00",
        "a",
        "é",
        "文",
        "\u202e",
        "\ud7ff",
        "[bold]",
        "{}",
        "\x9b31m",
        " ",
    )
    return "".join(dice.choices(pieces, k=dice.choice((0, 1, 5, 200))))


def _hostile_snapshot(dice: random.Random) -> dict[str, Any]:
    fields = snapshot(model=_name(dice), models=[{"name": _name(dice), "state": _name(dice)} for _ in range(3)])
    names = ("request_id", "tenant", "class", "phase")
    fields["running"] = [
        fields["running"][0] | {word: _name(dice) for word in names} for _ in range(dice.choice((0, 1, 5, 300)))
    ]
    fields["queue"] = [{"class": _name(dice), "tenant": _name(dice), "num_requests": dice.randrange(10**9)}] * 9
    fields["misses"] = [{"reason": _name(dice), "num_tokens": dice.randrange(10**12), "num_requests": 1}] * 9
    fields["warnings"] = [{"tenant": _name(dice), "line": _name(dice), "num_lost_tokens": 1, "num_requests": 1}]
    fields["workers"] = [{"number": 1, "state": "ended", "why": _name(dice)}]
    states = dict.fromkeys(("free", "cached", "used", "shared", "pinned", "computing"), 0)
    fields["pool"]["counts"] = {state: dice.choice((0, 1, 10**9)) for state in states}
    return fields


@section("top and its server")
async def figures(proof: Proof) -> None:
    """Check the JSON of `quire top`, by the admin socket and by an admin key; a tenant's key is refused."""
    with _server_with_keys(proof) as (server, keys):
        url = f"http://127.0.0.1:{server.port}"
        tenants = {name: keys[name] for name in ("alice", "operator")}
        async with agents(url, tenants, NUM_AGENTS, proof.random):
            await asyncio.sleep(proof.sized(quick=15, full=60))
            by_socket = await _fields_once(WatchSource(url, server.admin_path))
            by_key = await _fields_once(WatchSource(url, key=keys["boss"]))
            watched = await asyncio.to_thread(_fields_after_watching, WatchSource(url, server.admin_path))
        refused = await asyncio.to_thread(_is_refused, WatchSource(url, key=keys["alice"]))
    wrong = sum(_num_wrong_figures(fields) for fields in (by_socket, by_key, watched))
    proof.report("top_output_tokens_per_s", watched["output_tokens_per_s"] or 0.0, "an oracle's pace: no measurement")
    proof.report("top_running", watched["num_running"])
    proof.equals("top_figures_wrong", wrong, 0, "blocks that do not add up, unknown tenants and the like")
    proof.holds("top_needs_an_admin_key", refused, "a tenant's key is refused")


async def _fields_once(source: WatchSource) -> dict[str, Any]:
    return json_fields(await asyncio.to_thread(fetch_once, source, None))


def _fields_after_watching(source: WatchSource) -> dict[str, Any]:
    """The figures after some seconds of watching."""
    all_fields: list[dict[str, Any]] = []
    with TopWatcher(source) as watcher:
        for _ in range(20):
            watcher.wait(10)
            watcher.show(lambda figures, _: all_fields.append(json_fields(figures)))
    return all_fields[-1]


def _is_refused(source: WatchSource) -> bool:
    try:
        fetch_once(source, None)
    except RequestError:
        return True
    return False


def _num_wrong_figures(fields: dict[str, Any]) -> int:
    pool = fields["pool"] or {"num_blocks": -1}
    blocks = sum(count for name, count in pool.items() if name not in ("num_blocks", "block_size"))
    checks: list[Callable[[], bool]] = [
        lambda: fields["model"] == "oracle",
        lambda: blocks == pool["num_blocks"] == 2048,
        lambda: 0 < fields["num_running"] <= 16,
        lambda: {request["tenant"] for request in fields["running"]} <= {"alice", "operator"},
        lambda: all(request["computed"] <= request["known"] for request in fields["running"]),
        lambda: fields["totals"]["num_output_tokens"] > 0,
        lambda: 0 <= (fields["hit_rate"] or 0.0) <= 1,
    ]
    return sum(not check() for check in checks)
