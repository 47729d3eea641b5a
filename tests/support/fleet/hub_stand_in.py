"""A hub on loopback that speaks as much of the hub's API as its own library asks for, and can misbehave."""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_FROM = 64
"""Larger files are kept beside git, under their SHA-256."""


@dataclass
class Shelf:
    """A repository."""

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    is_gated: bool = False
    is_forbidden: bool = False
    is_redirected: bool = False
    """Files are sent by another path, as the hub does with large ones."""
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the listing says otherwise, by file: size, sha256, blobId; or a file that is not there."""

    def listing(self, name: str) -> dict[str, Any]:
        siblings = [self._sibling(file, data) for file, data in self.files.items()]
        siblings += [{"rfilename": file, **told} for file, told in self.told.items() if file not in self.files]
        return {"id": name, "modelId": name, "sha": self.commit, "siblings": siblings, "tags": [], "private": False}

    def _sibling(self, file: str, data: bytes) -> dict[str, Any]:
        told = self.told.get(file, {})
        size = told.get("size", len(data))
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()
        sibling: dict[str, Any] = {"rfilename": file, "size": size, "blobId": told.get("blobId", blob)}
        if len(data) > LFS_FROM:
            sha256 = told.get("sha256", hashlib.sha256(data).hexdigest())
            sibling["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 134}
        return sibling


@dataclass
class HubStandIn:
    """Repositories by name, and what will go wrong with the next files that are sent."""

    shelves: dict[str, Shelf] = field(default_factory=dict)
    misdeeds: deque[str] = field(default_factory=deque)
    """One for each answer with a file: "" for none, else `break` (half of it), `wrong` (other bytes), `whole` (a range
    is not heeded), `more` (too many bytes), `429`, `500`, `hang` (half of it, then nothing)."""
    num_bytes_sent: int = 0
    token: str | None = None
    """Without it, everything is refused."""
    requests: list[str] = field(default_factory=list)
    url: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def standing_in() -> Iterator[HubStandIn]:
    """The hub at `url`, until the block ends."""
    hub = HubStandIn()

    class Handler(_Handler):
        stand_in = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class has it
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.stand_in.requests.append(f"{self.command} {path}")
        if self.stand_in.token and self.headers.get("Authorization") != f"Bearer {self.stand_in.token}":
            return self._refuse(401, "RepoNotFound")
        if path.startswith("api/models/"):
            return self._list(path.removeprefix("api/models/"))
        name, _, rest = path.removeprefix("cdn/").partition("/resolve/")
        shelf = self.stand_in.shelves.get(name)
        if shelf is None:
            return self._refuse(404, "RepoNotFound")
        data = shelf.files.get(rest.partition("/")[2])
        if data is None:
            return self._refuse(404, "EntryNotFound")
        if shelf.is_redirected and not path.startswith("cdn/"):
            self.send_response(302)
            self.send_header("Location", f"{self.stand_in.url}/cdn/{path}")
            return self._end(b"")
        self._send_file(data, self.stand_in.misdeeds.popleft() if has_body and self.stand_in.misdeeds else "")
        return None

    def _list(self, name: str) -> None:
        shelf = self.stand_in.shelves.get(name)
        if shelf is None:
            return self._refuse(404, "RepoNotFound")
        if shelf.is_gated:
            return self._refuse(403, "GatedRepo")
        if shelf.is_forbidden:
            return self._refuse(403)
        if self.stand_in.misdeeds and self.stand_in.misdeeds[0] == "busy":
            self.stand_in.misdeeds.popleft()
            return self._refuse(429)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._end(json.dumps(shelf.listing(name)).encode())
        return None

    def _refuse(self, status: int, code: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if status == 429:
            self.send_header("Retry-After", "0")
        self._end(b"")

    def _end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, data: bytes, misdeed: str) -> None:
        if misdeed in ("429", "500"):
            return self._refuse(int(misdeed))
        first = 0
        if (asked := self.headers.get("Range", "")).startswith("bytes=") and misdeed != "whole":
            first = int(asked.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        body = data[first:]
        if misdeed == "wrong":
            body = bytes(byte ^ 1 for byte in body)
        if misdeed == "more":
            body += b"more"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if misdeed in ("break", "hang"):
            body = body[: max(1, len(body) // 2)]
            self.close_connection = True
        self.stand_in.num_bytes_sent += len(body)
        self.wfile.write(body)
        self.wfile.flush()
        if misdeed == "hang":
            self.stand_in.is_over.wait(60)
        return None
