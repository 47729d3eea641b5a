"""Too much: who is turned away, how, and until when; and how a server ends."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.api.access.quotas import Bucket, Quotas, Terms
from quire.api.asgi import RequestMiddleware
from quire.client.request.text_model import TextModel
from quire.core.scheduling.waiting_queue import QueueConfig, WaitingQueue
from quire.errors import QueueFullError
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import PacedRunner, paced_talker, talker

COMPLETE = "/v1/completions"
BODY = {"model": "oracle", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def paced() -> Iterator[tuple[LiveServer, PacedRunner]]:
    opened, runner = paced_talker(max_running=1)
    with house(models={"oracle": opened}, settings=AdmissionSettings(max_open_requests=3), drain_s=0.3) as here:
        yield here, runner
        runner.let_go()


def ask(here: LiveServer, **more: Any) -> HTTPConnection:
    connection = here.connection()
    connection.request("POST", COMPLETE, json.dumps({**BODY, "max_tokens": 100, **more}).encode())
    return connection


def test_a_full_house_turns_away_and_says_when_to_come_back(paced: tuple[LiveServer, PacedRunner]) -> None:
    here, runner = paced
    open_requests = [ask(here, prompt=f"question {at}") for at in range(3)]
    here.wait_until(lambda: len(here.admission.open_requests) == 3)
    refused = here.post(COMPLETE, BODY)
    assert (refused.status, refused.code) == (503, "server_overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert here.get("/v1/models").status == 200
    runner.let_go()
    for connection in open_requests:
        assert connection.getresponse().status == 200
        connection.close()
    here.wait_until_free()
    assert here.post(COMPLETE, BODY).status == 200


def test_a_full_queue_is_503_and_a_full_share_429(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    usual, other = add_key(keys, "usual"), add_key(keys, "other")
    for queue, waiting, status, code in (
        (QueueConfig(max_requests=2, class_reserve=0.0), [usual] * 2, 503, "server_overloaded"),
        (
            QueueConfig(max_requests=100, tenant_weights={"other": 99.0}),
            [other] + [usual] * 8,
            429,
            "rate_limit_exceeded",
        ),
    ):
        opened, runner = paced_talker(max_running=1)
        opened.engine.scheduler.queue = WaitingQueue(queue)
        with house(models={"oracle": opened}, keys_file=keys) as here:
            open_requests = [_ask_with(here, usual, {**BODY, "max_tokens": 100, "stream": True})]
            assert runner.is_waiting.wait(20)
            _step(runner)
            here.wait_until(lambda: here.states() == ["running"], 20)
            open_requests += [_ask_with(here, secret, {**BODY, "max_tokens": 100}) for secret in waiting]
            engine_client = next(iter(here.admission.models)).open()
            here.wait_until(lambda: engine_client.num_open == len(open_requests))  # noqa: B023
            while len(opened.engine.scheduler.live) < len(open_requests):
                _step(runner)
            refused = _refused(here, runner, usual)
            runner.let_go()
            for connection in open_requests:
                connection.getresponse().read()
                connection.close()
        assert (refused.status, refused.code) == (status, code)
        assert int(refused.headers["retry-after"]) >= 1


def _step(runner: PacedRunner) -> None:
    """Commands are obeyed between steps."""
    runner.allow(1)
    assert runner.is_waiting.wait(60)


def _refused(here: LiveServer, runner: PacedRunner, secret: str = "", **more: Any) -> Any:
    """What the engine says to a request, which it hears of between two steps."""
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.append(here.post(COMPLETE, {**BODY, **more}, x_api_key=secret)))
    asking.start()
    asking.join(0.2)
    while asking.is_alive():
        _step(runner)
        asking.join(0.2)  # seldom, so that those inside are not at their ends before the answer comes
    return got[0]


def _wait_until_running(runner: PacedRunner) -> None:
    """The first request has left the queue: all places there are free for those that come next."""
    assert runner.is_waiting.wait(60)


def _step_until_heard(here: LiveServer, runner: PacedRunner, num_requests: int) -> None:
    """The engine has heard of so many: one runs, all others wait."""
    here.wait_until(lambda: next(iter(here.admission.models)).open().num_open == num_requests)
    while len(here.opened["oracle"].engine.scheduler.live) < num_requests:
        _step(runner)


def test_a_place_in_the_queue_is_kept_for_each_class() -> None:
    opened, runner = paced_talker(max_running=1)
    opened.engine.scheduler.queue = WaitingQueue(QueueConfig(max_requests=10))
    with house(models={"oracle": opened}) as here:
        open_requests = [ask(here, prompt="the first")]
        _wait_until_running(runner)
        open_requests += [ask(here, prompt=f"question {at}") for at in range(8)]
        _step_until_heard(here, runner, 9)
        assert _refused(here, runner).status == 503
        open_requests.append(ask(here, prompt="urgent", priority=-1))
        open_requests.append(ask(here, prompt="patient", priority=1))
        _step_until_heard(here, runner, 11)
        assert _refused(here, runner, priority=1).status == 503
        runner.let_go()
        assert {connection.getresponse().status for connection in open_requests} == {200}
        for connection in open_requests:
            connection.close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[LiveServer, dict[str, str]]]:
    """A house that has places left for other classes only; with keys, one of them for patient work alone."""
    keys = tmp_path / "keys.json"
    secrets = {
        "urgent": add_key(keys, "urgent", max_class="high"),
        "usual": add_key(keys, "usual"),
        "patient": add_key(keys, "patient", max_class="low"),
    }
    opened, runner = paced_talker(max_running=1)
    opened.engine.scheduler.queue = WaitingQueue(QueueConfig(max_requests=10))
    with house(models={"oracle": opened}, keys_file=keys) as here:
        open_requests = [_ask_with(here, secrets["usual"], {**BODY, "max_tokens": 100})]
        _wait_until_running(runner)
        open_requests += [_ask_with(here, secrets["usual"], {**BODY, "max_tokens": 100}) for _ in range(8)]
        _step_until_heard(here, runner, 9)
        assert _refused(here, runner, secrets["usual"]).status == 503
        here.wait_until_asked(9)
        yield here, secrets
        runner.let_go()
        for connection in open_requests:
            assert connection.getresponse().status == 200
            connection.close()


def _ask_with(here: LiveServer, secret: str, body: Any, **headers: str) -> HTTPConnection:
    connection = here.connection()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", COMPLETE, data, {"x-api-key": secret, **names})
    return connection


def test_a_full_house_turns_away_at_once_and_works_on_no_text_for_it(
    full: tuple[LiveServer, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, secrets = full
    monkeypatch.setattr(TextModel, "prompt", lambda *_: pytest.fail("text was worked on"))
    for _ in range(3):  # the engine is in the middle of a step, and hears of none of them
        refused = here.post(COMPLETE, BODY, x_api_key=secrets["usual"], x_request_id="mine")
        assert (refused.status, refused.code) == (503, "server_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-request-id"] == "mine"
    assert here.post(COMPLETE, b"{", x_api_key=secrets["usual"]).status == 400
    assert here.get("/v1/models", x_api_key=secrets["usual"]).status == 200


def test_a_full_house_still_asks_for_a_key_first(full: tuple[LiveServer, dict[str, str]]) -> None:
    here, _ = full
    assert {here.post(COMPLETE, BODY, **given).status for given in ({}, {"x_api_key": "sk-wrong"})} == {401}


@pytest.mark.parametrize(
    ("who", "body", "headers"),
    [
        ("urgent", {**BODY, "priority": -1}, {}),
        ("usual", {**BODY, "priority": 1}, {}),
        ("usual", {**BODY, "service_tier": "flex"}, {}),
        ("usual", json.dumps({**BODY, "later": 1}).replace("later", r"\u0070riority").encode(), {}),
        ("usual", json.dumps({**BODY, "later": "flex"}).replace("later", r"service\u005Ftier").encode(), {}),
        ("usual", BODY, {"x_vllm_priority": "1"}),
        ("patient", BODY, {}),
    ],
)
def test_whoever_may_be_of_another_class_is_heard(
    full: tuple[LiveServer, dict[str, str]], who: str, body: Any, headers: dict[str, str]
) -> None:
    here, secrets = full
    heard = _ask_with(here, secrets[who], body, **headers)
    try:
        here.wait_until(
            lambda: [record.is_waiting for record, _ in here.admission.open_requests.values()].count(True) == 9
        )
    finally:
        heard.close()
        here.wait_until_asked(9)


def test_at_a_full_house_the_first_of_two_keys_counts_as_it_does_behind_it(
    full: tuple[LiveServer, dict[str, str]],
) -> None:
    here, secrets = full
    data = json.dumps(BODY).encode()
    for first, second, status in ((secrets["usual"], "sk-wrong", 503), ("sk-wrong", secrets["usual"], 401)):
        connection = here.connection()
        connection.putrequest("POST", COMPLETE)
        for name, value in (("x-api-key", first), ("x-api-key", second), ("content-length", str(len(data)))):
            connection.putheader(name, value)
        connection.endheaders(data)
        assert connection.getresponse().status == status
        connection.close()


def test_who_was_let_in_at_a_full_house_stays_in_while_it_drains(full: tuple[LiveServer, dict[str, str]]) -> None:
    here, secrets = full
    data = json.dumps({**BODY, "priority": 1}).encode()
    connection = here.connection()
    connection.putrequest("POST", COMPLETE)
    connection.putheader("x-api-key", secrets["usual"])
    connection.putheader("content-length", str(len(data)))
    connection.endheaders(data[:5])
    here.wait_until(lambda: len(here.admission.open_requests) == 10)
    here.admission.is_draining = True
    connection.send(data[5:])
    here.wait_until(lambda: [record.is_waiting for record, _ in here.admission.open_requests.values()].count(True) == 9)
    connection.close()
    here.wait_until(lambda: len(here.admission.open_requests) == 9)


def test_a_reader_that_does_not_even_take_a_refusal_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.asgi.STUCK_S", 0.01)
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr("quire.api.asgi.write_access", lines.append)
    cut: list[bool] = []

    async def refuses(_scope: Any, _receive: Any, _send: Any) -> None:
        raise QueueFullError(1, 1)

    async def never(_message: Any) -> None:
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": COMPLETE, "headers": [], "quire.abort": lambda: cut.append(True)}
    asyncio.run(RequestMiddleware(refuses)(scope, never, never))
    assert cut == [True]
    assert [(line["status"], line["error"]) for line in lines] == [(499, "reader_too_slow")]


def test_a_full_model_does_not_turn_away_who_asks_for_another() -> None:
    opened, runner = paced_talker(max_running=1)
    opened.engine.scheduler.queue = WaitingQueue(QueueConfig(max_requests=10))
    models = {"oracle": opened, "other": talker()}
    with house(models=models) as here:
        open_requests = [ask(here, prompt="the first")]
        _wait_until_running(runner)
        open_requests += [ask(here, prompt=f"question {at}") for at in range(8)]
        _step_until_heard(here, runner, 9)
        assert _refused(here, runner).status == 503
        assert here.post(COMPLETE, BODY).status == 503
        assert here.post(COMPLETE, {**BODY, "model": "other"}).status == 200
        runner.let_go()
        for connection in open_requests:
            connection.getresponse().read()
            connection.close()


def test_who_leaves_at_a_full_house_in_the_middle_of_a_body_has_left(full: tuple[LiveServer, dict[str, str]]) -> None:
    here, secrets = full
    connection = here.connection()
    connection.putrequest("POST", COMPLETE)
    connection.putheader("x-api-key", secrets["usual"])
    connection.putheader("content-length", "100")
    connection.endheaders(b'{"model": ')
    here.wait_until(lambda: len(here.admission.open_requests) == 10)
    connection.close()
    here.wait_until(lambda: len(here.admission.open_requests) == 9)


def test_a_key_over_its_requests_is_told_when_to_come_back(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", requests_per_minute=2)
    with house(keys_file=tmp_path / "keys.json") as here:
        started_s = time.monotonic()
        first, second, third = (here.post(COMPLETE, BODY, x_api_key=secret) for _ in range(3))
        assert (first.status, second.status, third.status) == (200, 200, 429)
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert third.code == "rate_limit_exceeded"
        assert 29 - (time.monotonic() - started_s) <= int(third.headers["retry-after"]) <= 30
        assert third.headers["x-ratelimit-limit-requests"] == "2"
        assert here.post(COMPLETE, {**BODY, "n": 9}, x_api_key=secret).status == 429, "charged before it is read"
        assert here.get("/v1/models", x_api_key=secret).status == 200


def test_a_key_pays_for_prompt_and_answer_in_tokens(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", tokens_per_minute=60)
    with house(keys_file=tmp_path / "keys.json") as here:
        asked = {**BODY, "prompt": list(range(60, 90)), "max_tokens": 40, "ignore_eos": True}
        started_s = time.monotonic()
        assert here.post(COMPLETE, asked, x_api_key=secret).status == 200
        over = here.post(COMPLETE, asked, x_api_key=secret)
        assert over.status == 429
        wait_s = 10 + len(json.dumps(asked)) / 8  # what is overdrawn, and a token for every 8 bytes of the body
        assert wait_s - 1 - (time.monotonic() - started_s) <= int(over.headers["retry-after"]) <= wait_s + 2


def test_a_key_may_have_so_many_at_once(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", concurrent=1)
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, keys_file=tmp_path / "keys.json") as here:
        connection = here.connection()
        connection.request("POST", COMPLETE, json.dumps(BODY).encode(), {"x-api-key": secret})
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        refused = here.post(COMPLETE, BODY, x_api_key=secret)
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert "retry-after" in refused.headers
        runner.let_go()
        assert connection.getresponse().status == 200
        connection.close()
        here.wait_until_free()
        assert here.post(COMPLETE, BODY, x_api_key=secret).status == 200


def test_a_bucket_lets_its_rate_through_and_a_minutes_worth_at_once() -> None:
    bucket = Bucket(60)
    for _ in range(60):
        assert bucket.wait_s(1, 1000.0) == 0
        bucket.take(1, 1000.0)
    assert bucket.wait_s(1, 1000.0) == pytest.approx(1.0)
    assert (bucket.available(1000.0), bucket.available(1010.0), bucket.available(2000.0)) == (0, 10, 60)
    assert bucket.wait_s(30, 1010.0) == pytest.approx(20.0)
    assert bucket.wait_s(1000, 2000.0) == 0, "what can never fit may be taken from a full bucket"
    bucket.take(120, 2000.0)
    assert bucket.wait_s(1, 2000.0) == pytest.approx(61.0)


def test_over_any_long_time_a_bucket_keeps_its_rate() -> None:
    bucket, taken = Bucket(30), 0
    for tick in range(36_000):
        if bucket.wait_s(1, tick / 10) == 0:
            bucket.take(1, tick / 10)
            taken += 1
    assert 30 * 60 <= taken <= 30 * 61


def test_changed_terms_begin_anew_and_what_is_open_stays_open() -> None:
    quotas = Quotas()
    quota = quotas.of("alice", Terms(concurrent=2))
    quota.num_open = 2
    assert quotas.of("alice", Terms(concurrent=2)) is quota
    assert quotas.of("alice", Terms(concurrent=5)).num_open == 2
    quota.num_open -= 2  # who came in under the old terms leaves under the new ones
    assert (quotas.of("alice", Terms(concurrent=5)).num_open, quota.concurrent) == (0, 5)


def test_a_dead_engine_is_503_before_an_answer_and_an_event_within_one() -> None:
    with house(models={"oracle": talker(fails_at=6)}, is_checked=False) as here:
        begun = here.post(COMPLETE, {**BODY, "max_tokens": 100, "stream": True})
        code = begun.events[-1]["error"]["code"] if begun.status == 200 else begun.code
        assert code == "engine_dead"
        later = here.post(COMPLETE, BODY)
        assert (later.status, later.code) == (503, "engine_dead")
        assert "retry-after" in later.headers
        assert (here.get("/health").status, here.get("/ready").status) == (503, 503)
        assert here.get("/v1/models").status == 200


def test_a_stream_whose_engine_dies_ends_in_words() -> None:
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, is_checked=False) as here:
        connection = ask(here, stream=True)
        assert runner.is_waiting.wait(60)
        runner.allow(3)
        response = connection.getresponse()
        runner.run = _broken  # type: ignore[method-assign,assignment]
        runner.let_go()
        data = response.read().decode()
        connection.close()
    assert '"code":"engine_dead"' in data
    assert data.endswith("data: [DONE]\n\n")


def _broken(_plan: object) -> Any:
    raise RuntimeError("the device is gone at 0x7f0000001234")


def test_a_server_that_drains_lets_those_inside_finish() -> None:
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, drain_s=60) as here:
        connection = ask(here, stream=True, max_tokens=20)
        assert runner.is_waiting.wait(60)
        here.loop.call_soon_threadsafe(here.shutdown.request)
        here.wait_until(lambda: here.admission.is_draining)
        ready = here.get("/ready")
        assert (ready.status, "retry-after" in ready.headers) == (503, True)
        refused = here.post(COMPLETE, BODY)
        assert (refused.status, refused.code) == (503, "server_draining")
        assert "retry-after" in refused.headers
        runner.let_go()
        data = connection.getresponse().read()
        assert data.endswith(b"data: [DONE]\n\n")
        assert b"error" not in data
        connection.close()
        here.wait_for_end()
    assert here.results == [0]


def test_what_is_not_done_by_the_bound_is_ended_in_words(paced: tuple[LiveServer, PacedRunner]) -> None:
    here, runner = paced
    streaming, waiting = ask(here, stream=True), None
    assert runner.is_waiting.wait(60)
    runner.allow(2)
    assert runner.is_waiting.wait(60)
    waiting = ask(here, prompt="another")
    here.wait_until(lambda: len(here.admission.open_requests) == 2)
    here.loop.call_soon_threadsafe(here.shutdown.request)
    data = streaming.getresponse().read().decode()
    assert '"code":"server_draining"' in data
    assert data.endswith("data: [DONE]\n\n")
    runner.let_go()
    answer = waiting.getresponse()
    assert answer.status in (200, 503)
    assert answer.read()
    streaming.close()
    waiting.close()


def test_whoever_is_still_entering_when_all_are_ended_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    with house(drain_s=0.0) as here:
        really, entered, go_on = TextModel.prompt, threading.Event(), threading.Event()

        def slow(text: TextModel, prompt: Any) -> list[int]:
            entered.set()
            go_on.wait(20)
            return really(text, prompt)

        monkeypatch.setattr(TextModel, "prompt", slow)
        connection = ask(here)
        assert entered.wait(60)
        here.loop.call_soon_threadsafe(here.shutdown.request)
        here.wait_until(lambda: all(record.ending for record, _ in here.admission.open_requests.values()))
        go_on.set()
        response = connection.getresponse()
        assert response.status == 503
        assert b"server_draining" in response.read()
        connection.close()
        here.wait_for_end()


def test_asked_a_second_time_the_server_does_not_wait() -> None:
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, drain_s=60) as here:
        connection = ask(here, stream=True)
        assert runner.is_waiting.wait(60)
        runner.allow(2)
        assert runner.is_waiting.wait(60)
        for _ in range(2):
            here.loop.call_soon_threadsafe(here.shutdown.request)
        assert b"server_draining" in connection.getresponse().read()
        connection.close()
        runner.let_go()
        here.wait_for_end()
    assert here.results == [1]
