"""The real model behind a gateway: a member is killed under its streams; replicas on one machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from benchmarks.test_model import smollm2_directory
from quire.fleet.protocol.keys import make_keys
from tests.support.machine.patience import PATIENCE_S
from tests.support.machine.spawned import spawned

SMALL = ("--memory", "1500MiB", "--max-model-len", "256", "--max-running", "4", "--threads", "1")
PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "My favourite colour is"]


@contextmanager
def quire(folder: Path, until: str, *words: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A command that has written a line that begins so; and what followed in it."""
    command = [sys.executable, "-m", "quire", *words]
    with spawned(command, None, {**os.environ, "HOME": str(folder)}, stops_s=PATIENCE_S) as one:
        yield one.process, one.wait_for(rf"^{until} ([^,;\n]+)")


def ask(url: str, number: int) -> str:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    body = {
        "model": "small",
        "prompt": PROMPTS[number],
        "max_tokens": 48,
        "temperature": float(number % 2),
        "seed": number,
        "ignore_eos": True,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    told = json.loads(response.read())
    connection.close()
    assert response.status == 200, told
    return str(told["choices"][0]["text"])


def all_answers(url: str) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda number: ask(url, number), range(len(PROMPTS))))


@pytest.mark.model
def test_a_killed_member_of_the_real_model_changes_no_character_of_any_answer(tmp_path: Path) -> None:
    member_keys, gateway_keys = make_keys(tmp_path / "keys")
    model = str(smollm2_directory())
    with ExitStack() as held:
        member = ("fleet", "member", model, "--listen", "tcp://127.0.0.1:*", "--fleet-keys", str(member_keys), *SMALL)
        members = [held.enter_context(quire(tmp_path, "member at", *member)) for _ in range(2)]
        listed = tmp_path / "members.txt"
        listed.write_text("\n".join(address for _, address in members))
        words = ("fleet", "gateway", "--members", str(listed), "--name", "small", "--fleet-keys", str(gateway_keys))
        own = ("--port", "0", "--admin-socket", str(tmp_path / "admin.sock"))
        _, url = held.enter_context(quire(tmp_path, "listening on", *words, *own))
        expected = all_answers(url)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(all_answers, url)
            members[0][0].send_signal(signal.SIGKILL)
            assert asking.result(PATIENCE_S) == expected
        assert all_answers(url) == expected


@pytest.mark.model
def test_replicas_of_the_real_model_answer_as_one_server_does(tmp_path: Path) -> None:
    own = ("--port", "0", "--admin-socket", str(tmp_path / "admin.sock"), "--served-model-name", "small")
    answers = []
    for replicas in ("1", "2"):
        # As much for each as for one alone: otherwise fewer rows would go into a step.
        sizes = ("--memory", f"{1500 * int(replicas)}MiB", "--threads", replicas, *SMALL[2:6])
        words = ("serve", str(smollm2_directory()), "--replicas", replicas, *sizes, *own)
        with quire(tmp_path, "listening on", *words) as (_, url):
            answers.append(all_answers(url))
    assert answers[0] == answers[1]
