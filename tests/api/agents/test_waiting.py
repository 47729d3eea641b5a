"""A stream that waits is opened in time and never silent, in every dialect; its progress is reported on request."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import openai
import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.dialects import answering
from quire.backends.oracle import OracleRunner
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import PacedRunner, paced_talker

CHAT, COMPLETE, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
QUESTION = "the cat sat on the mat " * 30
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3},
    COMPLETE: {"prompt": QUESTION, "max_tokens": 3},
    MESSAGES: {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3},
    RESPONSES: {"input": QUESTION, "max_output_tokens": 3},
}
OPENING: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, {"choices": [{"delta": {}}]}],
    COMPLETE: [{"choices": [{"text": ""}]}],
    MESSAGES: [{"type": "message_start"}, {"type": "ping"}],
    RESPONSES: [
        {"type": "response.created", "sequence_number": 0},
        {"type": "response.in_progress", "sequence_number": 1},
        {"type": "response.in_progress", "sequence_number": 1},
    ],
}
"""The first events of a stream that waits: its usual beginning, and a sign of life."""
ROUTES = pytest.mark.parametrize("path", list(BODIES))
Paced = tuple[LiveServer, PacedRunner]


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paced]:
    """A server whose streams are opened at once, and whose model makes a step when a test allows it."""
    monkeypatch.setattr(answering, "STREAM_SILENT_S", 0.01)
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, settings=AdmissionSettings(first_byte_s=1e-6), is_checked=False) as here:
        yield here, runner
        runner.let_go()


@pytest.fixture
def patient() -> Iterator[Paced]:
    """The same with streams that open with their first token or their first progress."""
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, settings=AdmissionSettings(first_byte_s=0.0), is_checked=False) as here:
        yield here, runner
        runner.let_go()


def send(here: LiveServer, path: str, **more: Any) -> HTTPConnection:
    connection = here.connection()
    body = {"stream": True, "temperature": 0.0, **BODIES[path], **more}
    connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
    return connection


def next_event(response: HTTPResponse) -> dict[str, Any]:
    """The next event's data."""
    while not (line := response.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return event


def all_events(response: HTTPResponse) -> list[dict[str, Any]]:
    lines = response.read().split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]


def includes(event: Any, part: Any) -> bool:
    """Whether an event has all fields of `part`."""
    if isinstance(part, dict):
        if not part:
            return bool(event == part)
        return all(name in event and includes(event[name], value) for name, value in part.items())
    if isinstance(part, list):
        return len(event) == len(part) and all(map(includes, event, part))
    return bool(event == part)


def is_life(path: str, event: dict[str, Any]) -> bool:
    return includes(event, OPENING[path][-1])


def text_of(path: str, events: list[dict[str, Any]]) -> str:
    if path in (MESSAGES, RESPONSES):
        deltas = [event["delta"] for event in events if event["type"].endswith(("block_delta", "text.delta"))]
        return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@ROUTES
def test_a_stream_that_waits_begins_like_any_other_and_shows_life_until_its_answer(paced: Paced, path: str) -> None:
    here, runner = paced
    connection = send(here, path)
    response = connection.getresponse()  # no step was allowed: the prompt is not computed
    assert response.status == 200
    waited = [next_event(response) for _ in OPENING[path]]
    assert all(map(includes, waited, OPENING[path])), waited
    for _ in range(3):
        waited.append(next_event(response))
        assert is_life(path, waited[-1])
    runner.let_go()
    events = waited + all_events(response)
    connection.close()
    quick = send(here, path)
    expected = all_events(quick.getresponse())
    quick.close()
    assert text_of(path, events) == text_of(path, expected) != ""
    if path == RESPONSES:  # signs of life have no numbers of their own
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(numbers[-1] + 1))


@ROUTES
def test_an_error_after_the_early_opening_is_an_event_in_the_apis_own_shape(
    paced: Paced, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, runner = paced

    def broken(*_: object) -> Any:
        raise RuntimeError("the device is gone")

    connection = send(here, path)
    response = connection.getresponse()
    next_event(response)
    monkeypatch.setattr(OracleRunner, "run", broken)
    runner.let_go()
    last = all_events(response)[-1]
    connection.close()
    shape = {
        MESSAGES: {"type": "error", "error": {"type": "overloaded_error"}},
        RESPONSES: {"type": "response.failed", "response": {"status": "failed"}},
    }.get(path, {"error": {"code": "engine_dead"}})
    assert includes(last, shape), last


@ROUTES
def test_a_whole_response_stays_silent_until_it_is_complete(paced: Paced, path: str) -> None:
    here, runner = paced
    connection = send(here, path, stream=False, return_progress=True)
    assert runner.is_waiting.wait(PATIENCE_S)
    runner.let_go()
    response = connection.getresponse()
    assert "prompt_progress" not in json.loads(response.read())
    assert response.getheader("content-length")
    connection.close()


@ROUTES
def test_progress_rises_step_by_step_from_what_was_cached_to_the_whole_prompt(patient: Paced, path: str) -> None:
    here, runner = patient
    connection = send(here, path, return_progress=True)
    runner.allow(1)
    response = connection.getresponse()
    reports: list[dict[str, Any]] = []
    while len(reports) < 3:
        if progress := next_event(response).get("prompt_progress"):
            reports.append(progress)
            runner.allow(1)
    runner.let_go()
    reports += [event["prompt_progress"] for event in all_events(response) if "prompt_progress" in event]
    connection.close()
    total = reports[0]["total"]
    processed = [report["processed"] for report in reports]
    assert (processed[:3], processed[-1]) == ([64, 128, 192], total)
    assert processed == sorted(set(processed))
    assert all(set(report) == {"total", "cache", "processed", "time_ms", "left_ms"} for report in reports)
    assert all(report["total"] == total and report["cache"] == 0 for report in reports)
    assert all(report["left_ms"] >= 0 for report in reports)
    assert reports[-1]["left_ms"] == 0
    times = [report["time_ms"] for report in reports]
    assert times == sorted(times)

    again = send(here, path, return_progress=True)
    (hit,) = [event["prompt_progress"] for event in all_events(again.getresponse()) if "prompt_progress" in event]
    assert 0 < hit["cache"] < hit["processed"] == total
    again.close()
    plain = send(here, path)
    assert not any("prompt_progress" in event for event in all_events(plain.getresponse()))
    plain.close()


def test_the_openai_sdk_reads_over_signs_of_life_and_finds_the_progress(paced: Paced) -> None:
    here, runner = paced
    sdk = openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
    runner.allow(2)
    extra = {"return_progress": True}
    stream = sdk.chat.completions.create(model="oracle", stream=True, temperature=0.0, extra_body=extra, **BODIES[CHAT])
    chunks = [next(stream) for _ in range(6)]
    runner.let_go()
    chunks += list(stream)
    assert any(chunk.model_extra and "prompt_progress" in chunk.model_extra for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    with sdk.responses.stream(model="oracle", input=QUESTION, max_output_tokens=3, extra_body=extra) as events:
        assert [event.type for event in events][-1] == "response.incomplete"


def test_the_anthropic_sdk_reads_over_signs_of_life_and_its_usage_is_that_of_the_end(paced: Paced) -> None:
    anthropic = pytest.importorskip("anthropic")
    here, runner = paced
    sdk = anthropic.Anthropic(base_url=here.url, api_key="none", max_retries=0)
    with sdk.messages.stream(model="oracle", **BODIES[MESSAGES]) as stream:
        first = next(stream)
        runner.let_go()
        message = stream.get_final_message()
    assert first.type == "message_start"
    assert message.usage.input_tokens > 200
    assert message.stop_reason == "max_tokens"


def test_a_prompt_sent_again_after_its_client_left_is_not_computed_again(patient: Paced) -> None:
    here, runner = patient
    first = send(here, CHAT)
    assert runner.is_waiting.wait(PATIENCE_S)
    runner.allow(2)
    assert runner.is_waiting.wait(PATIENCE_S)
    second = send(here, CHAT)
    here.wait_until_asked(2)
    first.close()
    here.wait_until(lambda: len(here.admission.open_requests) == 1)
    runner.let_go()
    events = all_events(second.getresponse())
    second.close()
    assert text_of(CHAT, events)
    scheduler = here.opened["oracle"].engine.scheduler
    num_prompt = len(here.opened["oracle"].text.chat_parts(BODIES[CHAT]["messages"], None)[0])
    assert scheduler.stats.num_computed_tokens <= num_prompt + 4 + 2  # a block, and the output
