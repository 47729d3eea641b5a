"""Requests by which one key makes others wait, each beside a plain twin; and the process that sends them.

    python -m proofs.findings.neighbours.attacks PORT NAME SECONDS [--twin NUM_REQUESTS ANSWER_TOKENS] KEY...

An attack's twin has no trap: as many requests, bodies of as many bytes, prompts and answers of as many tokens. So what
is compared is the trap alone, and not that a server with more to do is slower. The last line is what came of it.
"""

import argparse
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proofs.findings.neighbours.bodies import BODIES, CHAT, HarmfulBody

OF_PLAIN = ("messages", "prompt", "max_tokens", "n", "temperature", "stream")
"""What a twin has of its attack."""
WAIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Came:
    """What the requests of one attack came to."""

    num_requests: int
    answer_tokens: int
    """Of one answer, on average."""
    statuses: Mapping[str, int]


@dataclass
class Sender:
    """All connections of one attack, or of its twin, for some seconds."""

    port: int
    keys: list[str]
    attack: HarmfulBody
    seconds: float
    twin: Came | None = None
    """What the attack came to, where this is its twin."""
    statuses: Counter[str] = field(default_factory=Counter)
    answer_tokens: list[int] = field(default_factory=list)
    num_sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> Came:
        """Until it is over."""
        self.end_s = time.monotonic() + self.seconds
        count = self.attack.num_connections
        every_s = self.attack.every_s if self.twin is None else self.seconds * count / max(1, self.twin.num_requests)
        threads = [threading.Thread(target=self._connection, args=(at, every_s), daemon=True) for at in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        known = self.answer_tokens or [0]
        return Came(self.num_sent, max(1, round(sum(known) / len(known))), self.statuses)

    def _connection(self, at: int, every_s: float) -> None:
        next_s = time.monotonic() + every_s * at / self.attack.num_connections
        key = self.keys[at % len(self.keys)]
        while next_s < self.end_s:
            time.sleep(max(0.0, next_s - time.monotonic()))
            with self.lock:
                if self.twin is not None and self.num_sent >= self.twin.num_requests:
                    return
                number = self.num_sent = self.num_sent + 1
            status, num_tokens = self._exchange(key, self._body(number))
            with self.lock:
                self.statuses[status] += 1
                self.answer_tokens.append(num_tokens)
            next_s = max(next_s + every_s, time.monotonic())

    def _body(self, number: int) -> dict[str, Any]:
        body = self.attack.make(number, self.token)
        return body if self.twin is None else plain_twin(body, self.attack, number, self.twin.answer_tokens)

    def token(self, text: str) -> int:
        """The first token of a text."""
        if (known := TOKENS.get(text)) is None:
            wire = _sent(self.port, self.keys[0], "/tokenize", {"prompt": text})
            known = TOKENS[text] = int(json.loads(_whole(wire)[1])["tokens"][0])
        return known

    def _exchange(self, key: str, body: dict[str, Any]) -> tuple[str, int]:
        """The status and the tokens of an answer. A client that leaves is seen neither."""
        try:
            with _sent(self.port, key, CHAT, body) as wire:
                left_s = min(self.end_s - time.monotonic(), self.attack.leaves_after_s or WAIT_S)
                wire.settimeout(max(0.1, left_s))
                status, data = _whole(wire)
        except TimeoutError:
            return "left", int(body.get("max_tokens", 1))
        except OSError:
            return "cut", 1
        return status, num_tokens_of(data) // int(body.get("n", 1)) if status == "200" else 1


TOKENS: dict[str, int] = {}


def plain_twin(body: dict[str, Any], attack: HarmfulBody, number: int, answer_tokens: int) -> dict[str, Any]:
    """The same request without its trap, as long in bytes, prompt and answer."""
    twin = {name: value for name, value in body.items() if name in OF_PLAIN}
    if "max_tokens" in twin:
        twin |= {"max_tokens": answer_tokens, "ignore_eos": True}
    if attack.plain is not None:
        twin |= attack.plain(number)
    elif "tools" in body:  # written into the prompt, as the template does
        system = {"role": "system", "content": json.dumps(body["tools"])}
        twin["messages"] = [system, *body["messages"]]
    missing = len(json.dumps(body)) - len(json.dumps(twin)) - len(', "user": ""')
    return twin | {"user": "x" * missing} if missing > 0 else twin


def num_tokens_of(data: bytes) -> int:
    """Of a whole answer, or of a stream with usage in its last chunk."""
    line = next((one for one in reversed(data.splitlines()) if b'"usage"' in one), b"{}")
    usage = json.loads(line.removeprefix(b"data: ")).get("usage") or {}
    return int(usage.get("completion_tokens", 1))


def _sent(port: int, key: str, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    wire = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    wire.sendall(head.encode() + data)
    return wire


def _whole(wire: socket.socket) -> tuple[str, bytes]:
    """Status and body, read until the server closes. Chunks of a stream stay as they came: lines are looked for."""
    parts = list[bytes]()
    end_s = time.monotonic() + (wire.gettimeout() or WAIT_S)
    while part := wire.recv(65536):
        parts.append(part)
        if time.monotonic() > end_s:
            raise TimeoutError
    head, _, data = b"".join(parts).partition(b"\r\n\r\n")
    return head[9:12].decode(), data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("name", choices=sorted(BODIES))
    parser.add_argument("seconds", type=float)
    parser.add_argument("--twin", nargs=2, type=int)
    parser.add_argument("keys", nargs="+")
    read = parser.parse_args()
    twin = None if read.twin is None else Came(read.twin[0], read.twin[1], {})
    came = Sender(read.port, read.keys, BODIES[read.name], read.seconds, twin).run()
    print(json.dumps({"requests": came.num_requests, "answer_tokens": came.answer_tokens, **came.statuses}))


if __name__ == "__main__":
    main()
