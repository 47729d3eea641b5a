"""Two keys and one server: who is let in, who gives way, what each is told, and that it is true."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.core.events import RequestEvent
from quire.core.request import Request
from quire.core.scheduling.waiting_queue import QueueConfig, WaitingQueue
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, Reply, house
from tests.support.servers.talkers import PacedRunner, paced_talker

COMPLETE = "/v1/completions"
BODY = {"model": "oracle", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "n": 2}


@dataclass
class Street:
    """A server that steps when it is told to, and keys for it."""

    here: LiveServer
    runner: PacedRunner
    secrets: dict[str, str]
    sent: list[HTTPConnection] = field(default_factory=list)
    num_entered: int = 0
    """Requests that the engine has queued or refused."""

    def send(self, tenant: str, **more: Any) -> HTTPConnection:
        """Ask, and be inside."""
        num_open_requests = self.num_open_requests(tenant)
        connection = self.here.connection(60)
        connection.request("POST", COMPLETE, json.dumps({**BODY, **more}), {"x-api-key": self.secrets[tenant]})
        self.sent.append(connection)
        self.here.wait_until(lambda: self.num_open_requests(tenant) == num_open_requests + 1)
        return connection

    def num_open_requests(self, tenant: str) -> int:
        return sum(record.tenant == tenant for record, _ in self.here.admission.open_requests.values())

    @property
    def num_asked(self) -> int:
        """Requests that the engine is told of or will be, between this step and the next."""
        return self.here.admission.models.named("oracle").open().num_open

    def post(self, tenant: str, path: str = COMPLETE, **more: Any) -> Reply:
        """Ask, and be answered at once."""
        return self.here.post(path, {**BODY, **more}, x_api_key=self.secrets[tenant])

    def refused(self, tenant: str) -> Reply:
        """Send a request that the engine refuses. It steps until it has received the request and no further, so that on
        a slow machine no running request ends meanwhile."""
        num_asked, num_entered = self.num_asked, self.num_entered
        with ThreadPoolExecutor(1) as beside:
            request = beside.submit(self.post, tenant)
            self.here.wait_until(lambda: self.num_asked > num_asked or request.done())
            self.step_until(lambda: self.num_entered > num_entered or request.done())
            return request.result()

    def step_until(self, is_so: Callable[[], bool]) -> None:
        """Commands are obeyed between steps."""

        def look() -> bool:
            if not is_so() and self.runner.is_waiting.is_set():
                self.runner.allow(1)
            return is_so()

        self.here.wait_until(look)

    def submitted(self, count: int) -> None:
        """Let the engine step until it has been told of so many. The commands are all there before the first step:
        while a slow machine makes them, nothing that runs may come to its end.
        """
        self.here.wait_until(lambda: self.num_asked == count)
        live = self.here.opened["oracle"].engine.scheduler.live
        self.step_until(lambda: len(live) == count)


@contextmanager
def street(tmp_path: Path, settings: AdmissionSettings, queue: QueueConfig | None = None) -> Iterator[Street]:
    keys = tmp_path / "keys.json"
    secrets = {name: add_key(keys, name) for name in ("a", "b")}
    opened, runner = paced_talker(max_running=2)
    opened.engine.scheduler.queue = WaitingQueue(queue or QueueConfig())
    with house(models={"oracle": opened}, keys_file=keys, settings=settings) as here:
        made = Street(here, runner, secrets)
        enter = opened.engine.enter

        def counted(request: Request, *, is_restored: bool) -> list[RequestEvent]:
            events = enter(request, is_restored=is_restored)
            made.num_entered += 1
            return events

        opened.engine.enter = counted  # type: ignore[method-assign]
        try:
            yield made
        finally:
            runner.let_go()
            for connection in made.sent:
                connection.close()


def answer(connection: HTTPConnection) -> Reply:
    response = connection.getresponse()
    return Reply(response.status, dict(response.getheaders()), response.read())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_waited_and_was_displaced_is_429_with_a_time(tmp_path: Path, is_streamed: bool) -> None:
    with street(tmp_path, AdmissionSettings(), QueueConfig(max_requests=4, class_reserve=0.0)) as there:
        running = there.send("a", max_tokens=300)
        there.step_until(lambda: there.here.states() == ["running"])
        waiting = [there.send("a", stream=is_streamed) for _ in range(4)]
        there.submitted(5)
        neighbour = there.send("b")
        there.runner.let_go()
        displaced = answer(waiting[-1])
        assert (displaced.status, displaced.code) == (429, "rate_limit_exceeded")
        assert displaced.json["error"]["type"] == "rate_limit_error"
        assert 1 <= int(displaced.headers["retry-after"]) <= 60
        assert "another tenant displaced" in displaced.json["error"]["message"]
        assert [answer(one).status for one in (running, neighbour, *waiting[:-1])] == [200] * 5
        there.here.wait_until_free()
        page = there.here.get("/metrics", x_api_key=there.secrets["b"]).data.decode()
    assert 'request_success_total{finished_reason="abort"' not in page, "what was displaced is no latency"


def test_what_was_displaced_costs_its_key_nothing(tmp_path: Path) -> None:
    with street(tmp_path, AdmissionSettings(max_open_requests=2)) as there:
        limited = add_key(tmp_path / "keys.json", "limited", requests_per_minute=4)
        there.secrets["limited"] = limited
        deadline_s = time.monotonic() + PATIENCE_S
        while there.here.get("/v1/models", x_api_key=limited).status != 200:
            assert time.monotonic() < deadline_s
        sent = [there.send("limited") for _ in range(2)]
        neighbour = there.send("b")
        assert answer(sent[1]).status == 429
        there.runner.let_go()
        assert [answer(one).status for one in (sent[0], neighbour)] == [200, 200]
        there.here.wait_until_free()
        assert there.post("limited").status == 200
        assert there.post("limited").status == 429


def test_at_a_full_server_what_runs_is_not_broken_off(tmp_path: Path) -> None:
    with street(tmp_path, AdmissionSettings(max_open_requests=2)) as there:
        first = there.send("a")
        second = there.send("a", stream=True, max_tokens=300)
        there.submitted(2)
        there.step_until(lambda: there.here.states() == ["running"])
        waiting = there.send("a")
        neighbour = there.send("b")
        assert answer(waiting).status == 429
        refused = there.post("b")
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded"), "it has half of two places"
        there.runner.let_go()
        assert [answer(one).status for one in (first, second, neighbour)] == [200, 200, 200]


def test_tokenizing_gives_way_as_well(tmp_path: Path) -> None:
    with street(tmp_path, AdmissionSettings(max_open_requests=9)) as there:
        half = there.here.connection(60)
        half.putrequest("POST", "/tokenize")
        half.putheader("x-api-key", there.secrets["a"])
        half.putheader("content-length", "100")
        for _ in range(8):
            there.send("a")
        half.endheaders(b'{"model": ')
        there.sent.append(half)
        there.here.wait_until(lambda: there.num_open_requests("a") == 9)
        there.send("b")
        assert answer(half).status == 429
        there.runner.let_go()


def test_a_key_at_its_share_is_turned_away_at_once_and_its_neighbour_is_heard(tmp_path: Path) -> None:
    with street(tmp_path, AdmissionSettings(), QueueConfig(max_requests=40)) as there:
        there.send("b", max_tokens=300)
        for _ in range(16):
            there.send("a")
        there.submitted(17)
        for refused in (there.refused("a"), there.post("a"), there.post("a")):
            assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
            assert "has 16 of at most 16 requests waiting" in refused.json["error"]["message"]
        assert there.here.post(COMPLETE, b"{", x_api_key=there.secrets["b"]).status == 400
        there.send("b")
        there.runner.let_go()
        assert {answer(one).status for one in there.sent} == {200}


def test_a_key_with_one_request_open_for_long_has_all_the_rest_of_the_queue(tmp_path: Path) -> None:
    with street(tmp_path, AdmissionSettings(), QueueConfig(max_requests=10)) as there:
        for _ in range(9):
            there.send("a", max_tokens=100)
        there.submitted(9)
        refused = there.refused("a")
        assert (refused.status, refused.code) == (503, "server_overloaded"), "alone it is the server that is full"
        there.runner.let_go()


def test_who_comes_back_early_is_refused_again_and_who_waits_comes_in_and_is_not_displaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = [0.0]
    monkeypatch.setattr("quire.api.access.admission.monotonic", lambda: time.monotonic() + later_s[0])
    with street(tmp_path, AdmissionSettings(), QueueConfig(max_requests=10)) as there:
        for _ in range(9):
            there.send("a", max_tokens=100)
        there.submitted(9)
        first = int(there.refused("a").headers["retry-after"])
        later_s[0] += first - 0.5
        assert there.post("a").status == 503
        later_s[0] += 0.5
        returned = there.send("a")
        neighbours = [there.send("b") for _ in range(4)]
        there.runner.let_go()
        assert [answer(one).status for one in (returned, *neighbours)] == [200] * 5


def test_bodies_that_are_still_coming_have_come_or_gone_by_the_time_that_is_told(tmp_path: Path) -> None:
    with street(tmp_path, AdmissionSettings(max_open_requests=4)) as there:
        halves = []
        for at in range(2):
            half = there.here.connection(60)
            half.putrequest("POST", COMPLETE)
            half.putheader("x-api-key", there.secrets["a"])
            half.putheader("content-length", "100")
            half.endheaders(b"{")
            halves.append(half)
            if not at:
                there.here.wait_until(lambda: there.num_open_requests("a") == 1)
        over = answer(halves[1])
        assert (over.status, over.headers["retry-after"]) == (429, "60")
        for half in halves:
            half.close()
        there.runner.let_go()
