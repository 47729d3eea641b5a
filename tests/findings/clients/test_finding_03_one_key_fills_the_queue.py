"""One key fills the queue, or the server, and another that has nothing there is turned away."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from select import select

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.core.scheduling.waiting_queue import QueueConfig, WaitingQueue
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import PacedRunner, paced_talker

COMPLETE = "/v1/completions"
BODY = {"model": "oracle", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@dataclass
class Crowd:
    here: LiveServer
    greedy: str
    modest: str
    runner: PacedRunner
    sent: list[HTTPConnection]


def ask(here: LiveServer, secret: str) -> HTTPConnection:
    connection = here.connection(30)
    connection.request("POST", COMPLETE, json.dumps(BODY).encode(), {"x-api-key": secret})
    return connection


@contextmanager
def crowded(tmp_path: Path, settings: AdmissionSettings, count: int) -> Iterator[Crowd]:
    """A server that computes nothing yet, and a key that has sent this many."""
    keys = tmp_path / "keys.json"
    greedy, modest = add_key(keys, "greedy"), add_key(keys, "modest")
    opened, runner = paced_talker(max_running=1)
    opened.engine.scheduler.queue = WaitingQueue(QueueConfig(max_requests=10))
    with house(models={"oracle": opened}, keys_file=keys, settings=settings) as here:
        crowd = Crowd(here, greedy, modest, runner, [])
        try:
            for at in range(count):
                crowd.sent.append(ask(here, greedy))
                here.wait_until(lambda: len(here.admission.open_requests) == at + 1, 20)  # noqa: B023
            yield crowd
        finally:
            runner.let_go()
            for connection in crowd.sent:
                connection.close()


def wait_for(crowd: Crowd, connections: list[HTTPConnection], tenant: str, num_before: int = 0) -> None:
    """Until each of them is inside, or has its answer already."""

    def is_so() -> bool:
        num_open_requests = (
            sum(record.tenant == tenant for record, _ in crowd.here.admission.open_requests.values()) - num_before
        )
        num_answered = len(select([one.sock for one in connections], [], [], 0)[0])
        return num_open_requests + num_answered >= len(connections)

    crowd.here.wait_until(is_so, 20)


def statuses(connections: list[HTTPConnection]) -> list[int]:
    found = []
    for connection in connections:
        response = connection.getresponse()
        response.read()
        found.append(response.status)
    return found


def test_a_key_with_nothing_waiting_is_let_in_though_another_key_has_filled_the_queue(tmp_path: Path) -> None:
    with crowded(tmp_path, AdmissionSettings(), 12) as crowd:
        modest = [ask(crowd.here, crowd.modest) for _ in range(3)]
        crowd.sent += modest
        wait_for(crowd, modest, "modest")
        crowd.runner.let_go()
        assert statuses(modest) == [200, 200, 200]


def test_a_key_with_nothing_open_is_let_in_though_another_key_has_filled_the_server(tmp_path: Path) -> None:
    with crowded(tmp_path, AdmissionSettings(max_open_requests=6), 6) as crowd:
        greedy, modest = crowd.sent[:], ask(crowd.here, crowd.modest)
        crowd.sent.append(modest)
        wait_for(crowd, [modest], "modest")
        crowd.runner.let_go()
        assert statuses([modest]) == [200]
        assert sorted(statuses(greedy)) == [200] * 5 + [429]


def test_a_key_is_told_a_time_after_which_it_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later_s = [0.0]
    monkeypatch.setattr("quire.api.access.admission.monotonic", lambda: time.monotonic() + later_s[0], raising=False)
    with crowded(tmp_path, AdmissionSettings(), 9) as crowd:
        turned_away = ask(crowd.here, crowd.greedy)
        crowd.sent.append(turned_away)
        refused = told_between_steps(crowd, turned_away)
        assert refused.status in (429, 503)
        later_s[0] = float(refused.headers["retry-after"])
        again = ask(crowd.here, crowd.greedy)
        crowd.sent.append(again)
        wait_for(crowd, [again], "greedy", 9)
        crowd.runner.let_go()
        assert statuses([again]) == [200], "no other place came free, but that was the time it was told"


def told_between_steps(crowd: Crowd, connection: HTTPConnection) -> HTTPResponse:
    """Let the engine step, which hears of requests between two steps, until it has said what it thinks of one."""
    deadline_s = time.monotonic() + 30
    while not select([connection.sock], [], [], 0.2)[0]:
        assert time.monotonic() < deadline_s
        if crowd.runner.is_waiting.is_set():
            crowd.runner.allow(1)
    response = connection.getresponse()
    response.read()
    return response
