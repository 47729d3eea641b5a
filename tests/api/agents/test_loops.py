"""Answers that repeat themselves are ended if the client or the operator wants it, and each API says why."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.backends.oracle import OracleRunner
from quire.client.engines.opening import OpenedModel
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

LIMIT, LETTER = 700, 70
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": LIMIT},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": LIMIT},
    "/v1/responses": {"input": "hello", "max_output_tokens": LIMIT},
    "/v1/messages": {"messages": HELLO, "max_tokens": LIMIT},
}


class StuckRunner(OracleRunner):
    """An oracle that samples one token for ever."""

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        result = super().run(plan, masks)
        rows = {key: row._replace(token_ids=(LETTER,) * len(row.token_ids)) for key, row in result.rows.items()}
        return StepResult(result.step, rows)


def stuck() -> OpenedModel:
    opened = talker(512, max_sequence_tokens=1024)
    opened.engine.runner = StuckRunner(opened.engine.runner.capacity)
    return opened


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    with house(models={"oracle": stuck()}) as served:
        yield served


def answer(here: LiveServer, path: str, **more: Any) -> Any:
    reply = here.post(path, {"model": "oracle", **BODIES[path], **more})
    assert reply.status == 200, reply.data
    return reply.json


def num_output(body: Any) -> int:
    usage = body["usage"]
    return int(usage.get("completion_tokens", usage.get("output_tokens")))


def end_of(body: Any) -> dict[str, Any]:
    """The part of an answer, or of the event of a stream, that reports its end."""
    inner = body.get("response", body)
    if "choices" in inner:
        return dict(inner["choices"][0])
    end = inner.get("incomplete_details") or inner.get("delta") or inner
    return end if isinstance(end, dict) else {}


REASONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"finish_reason": "length", "stop_reason": None},
    "/v1/chat/completions": {"finish_reason": "length", "stop_reason": None},
    "/v1/responses": {"reason": "max_output_tokens"},
    "/v1/messages": {"stop_reason": "max_tokens", "stop_sequence": None},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_loop_ends_at_256_tokens_if_the_request_wants_it(here: LiveServer, path: str) -> None:
    body = answer(here, path, stop_loops=True)
    assert num_output(body) == 256
    assert {**REASONS[path], "finish_detail": "loop"}.items() <= end_of(body).items()


@pytest.mark.parametrize("path", BODIES)
def test_a_loop_goes_on_to_the_limit_otherwise(here: LiveServer, path: str) -> None:
    body = answer(here, path)
    assert num_output(body) == LIMIT
    assert "finish_detail" not in end_of(body)
    assert REASONS[path].items() <= end_of(body).items()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_ends_like_the_whole_answer(here: LiveServer, path: str) -> None:
    reply = here.post(path, {"model": "oracle", **BODIES[path], "stop_loops": True, "stream": True})
    lines = [line.removeprefix("data: ") for line in reply.data.decode().splitlines() if line.startswith("data: {")]
    ends = [end for line in lines if "finish_detail" in (end := end_of(json.loads(line)))]
    assert len(ends) == 1
    assert REASONS[path].items() <= ends[0].items()


def test_text_held_back_for_a_stop_string_is_part_of_a_loop_that_ends(here: LiveServer) -> None:
    free = answer(here, "/v1/completions", stop_loops=True)["choices"][0]["text"]
    held = answer(here, "/v1/completions", stop_loops=True, stop=[free[0] * 300])["choices"][0]["text"]
    assert len(free) == 256
    assert held == free


def test_the_operator_sets_what_requests_leave_out() -> None:
    settings = AdmissionSettings(are_loops_stopped=True)
    with house(models={"oracle": stuck()}, settings=settings) as here:
        assert num_output(answer(here, "/v1/completions")) == 256
        assert num_output(answer(here, "/v1/completions", stop_loops=False)) == LIMIT


def test_what_a_grammar_forces_is_no_loop() -> None:
    with house(models={"oracle": talker(512, max_sequence_tokens=1024)}) as here:
        body = answer(here, "/v1/completions", stop_loops=True, regex="(ab){300}")
    assert body["choices"][0]["text"] == "ab" * 300
    assert body["choices"][0]["finish_reason"] == "stop"
    assert num_output(body) > 256
