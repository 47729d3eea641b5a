"""A server that is only its watch stream: what it says is written by a test, over loopback or a Unix socket."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = tuple[int, bytes] | Iterable[bytes]
"""A whole answer, or the pieces of a stream, which ends behind the last."""


def snapshot(**changes: Any) -> dict[str, Any]:
    """One of a server that works; any field may be another."""
    counts = {"free": 500, "cached": 300, "used": 100, "shared": 80, "pinned": 15, "computing": 5}
    running = {
        "request_id": "req_1", "tenant": "alice", "class": "normal", "phase": "answer", "computed": 640, "known": 641,
        "prompt_tokens": 600, "cached_tokens": 512, "output_tokens": 41,
    }  # fmt: skip
    rates = {"output_tokens_per_s": 812.0, "prompt_tokens_per_s": 4100.0, "ttft_p50_s": 0.12, "hit_rate": 0.83}
    told = {
        "v": 1, "at_s": 1000.0, "model": "coder",
        "models": [{"name": "coder", "state": "ready", "is_watched": True},
                   {"name": "writer", "state": "loaded", "is_watched": False}],
        "pool": {"num_blocks": 1000, "block_size": 32, "blocks_per_cell": 1, "cells": "AAEC", "counts": counts},
        "tree": {"nodes": []},
        "steps": [{"step": at, "at_s": 999.0 + at / 50, "prompt_tokens": 192 * (at % 2), "output_tokens": 16,
                   "rows": 16, "ms": 19.5} for at in range(1, 51)],
        "running": [running],
        "queue": [{"class": "low", "tenant": "nightly", "num_requests": 7}],
        "requests": [],
        "misses": [{"reason": "diverged", "num_tokens": 41_000, "num_requests": 12}],
        "totals": {"num_prompt_tokens": 9000, "num_cached_tokens": 7000, "num_output_tokens": 500, "num_requests": 60,
                   "num_preemptions": 2},
        "history": [{"at_s": 700.0 + 10 * at, "span_s": 10.0, **rates} for at in range(31)],
        "workers": [{"number": 1, "state": "ready", "started_s": 1.0, "ended_s": None, "why": None}],
        "fleet": None,
        "warnings": [],
    }  # fmt: skip
    return told | changes


def event(told: dict[str, Any]) -> bytes:
    """As it goes over the wire."""
    return b"event: snapshot\ndata: " + json.dumps(told).encode() + b"\n\n"


@dataclass
class StandIn:
    """What was asked so far, and who answers."""

    answer: Callable[[str, dict[str, str]], Answer]
    url: str = ""
    socket_path: Path | None = None
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers."""


@contextmanager
def stand_in(answer: Callable[[str, dict[str, str]], Answer], socket_path: Path | None = None) -> Iterator[StandIn]:
    """It runs until the test ends; `answer` is given the path and the headers of each question."""
    here = StandIn(answer, socket_path=socket_path)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _take(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            here.asked.append((self.command, self.path, headers))
            told = here.answer(self.path, headers)
            status, whole = told if isinstance(told, tuple) else (200, None)
            self.send_response(status)
            kind = "text/event-stream" if whole is None else "application/json"
            self.send_header("content-type", kind)
            self.send_header("connection", "close")
            if whole is not None:
                self.send_header("content-length", str(len(whole)))
            self.end_headers()
            self.close_connection = True
            try:
                for piece in (whole,) if isinstance(told, tuple) else told:
                    self.wfile.write(piece or b"")
                    self.wfile.flush()
            except OSError:
                pass  # the reader has gone

        do_GET = do_POST = do_DELETE = do_PUT = _take  # noqa: N815 - the library's names

        def address_string(self) -> str:
            return "somebody"

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server: socketserver.BaseServer
    if socket_path is None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        here.url = f"http://127.0.0.1:{server.server_address[1]}"
    else:
        server = socketserver.ThreadingUnixStreamServer(str(socket_path), Handler)
        server.daemon_threads = True
        here.url = "http://127.0.0.1:8000"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="stand-in")
    thread.start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
