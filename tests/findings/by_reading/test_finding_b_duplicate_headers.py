"""By reading: of a header that stands twice the door took the first, and the route the last."""

import json
import socket
from pathlib import Path

from quire.api.access.keys import add_key
from tests.support.servers.local_api import house
from tests.support.servers.talkers import paced_talker


def test_of_a_header_that_stands_twice_the_first_counts(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", max_class="high")
    opened, runner = paced_talker()
    body = json.dumps({"model": "oracle", "prompt": "x", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {secret}\r\nconnection: close\r\n"
    head += f"x-vllm-priority: 1\r\nx-vllm-priority: -1\r\ncontent-length: {len(body)}\r\n\r\n"
    with (
        house(models={"oracle": opened}, keys_file=tmp_path / "keys.json") as here,
        socket.create_connection(("127.0.0.1", here.port), timeout=30) as wire,
    ):
        wire.sendall(head.encode() + body)
        assert runner.is_waiting.wait(30)
        (record,) = [record for record, _ in here.admission.open_requests.values()]
        priority = record.priority
        runner.let_go()
        assert wire.recv(12) == b"HTTP/1.1 200"
        here.wait_until_free(30)
    assert priority == "low"
