"""A dialect owns its bytes: one loop answers in OpenAI's events and in a toy's lines, and errors follow the path."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Semaphore
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.dialects import answering
from quire.api.dialects.answering import StreamResponse
from quire.api.dialects.error_formats import SERVER_ERRORS, ErrorFormats
from quire.api.dialects.openai.chat import ChatWriter
from quire.api.dialects.openai.error_body import OPENAI_ERRORS
from quire.api.dialects.openai.schemas import ChatFields
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.http.errors import ApiError
from quire.api.http.limits import MAX_HEADERS
from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import ModelEntry
from quire.backends.oracle import OracleRunner
from quire.client.engines.llm import LLM
from quire.client.reply.outputs import TEXT, Piece, ReasoningPart, ToolCallPart
from quire.client.reply.stream import Stream
from quire.client.request.params import SamplingParams
from quire.errors import EngineDeadError
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import PacedRunner, paced_talker, talker
from tests.support.servers.toy_dialect import PATH, PLAIN, TOY_ERRORS, ToyWriter, make_toy

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
PARTS = (TEXT, ReasoningPart(), ToolCallPart(0, "call_a", "look"))


@pytest.fixture(scope="module")
def toy() -> Iterator[LiveServer]:
    """A server with the toy's route beside its own."""
    with house(make=make_toy) as here:
        yield here


@pytest.fixture
def paced() -> Iterator[tuple[LiveServer, PacedRunner]]:
    """The same, and its model makes a step when it is told to."""
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, make=make_toy, is_checked=False) as here:
        yield here, runner
        runner.let_go()


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> Semaphore:
    """Silences are short; one permit for each time somebody looks whether there is one."""
    rings, look = Semaphore(0), StreamResponse._check_silence

    def counted(response: StreamResponse) -> None:
        look(response)
        rings.release()

    monkeypatch.setattr(answering, "STREAM_SILENT_S", 0.01)
    monkeypatch.setattr(StreamResponse, "_check_silence", counted)
    return rings


def let_ring(rings: Semaphore, count: int) -> None:
    for _ in range(count):
        assert rings.acquire(timeout=PATIENCE_S)


def ask(here: LiveServer, path: str = PATH, **more: Any) -> HTTPConnection:
    """Send a request and wait for nothing."""
    connection = here.connection()
    asked = {"say": "the cat", "prompt": "the cat", "stream": True, "count": 40, "max_tokens": 40, **more}
    connection.request("POST", path, json.dumps(asked).encode(), {"content-type": "application/json"})
    return connection


async def unsent(_message: Any) -> None:
    raise AssertionError("nothing is sent")


def response_to(*streams: Stream, first_byte_s: float = 0.0) -> StreamResponse:
    handles: Any = list(streams)
    nothing: Any = None
    response = StreamResponse(unsent, RequestRecord("a", "POST", PATH, handles=handles), nothing, nothing, first_byte_s)
    response.begin(ResolvedRequest(model=ModelEntry("m"), is_streamed=True), ToyWriter())
    return response


def read_until(response: HTTPResponse, mark: bytes) -> None:
    """Read lines up to one that has it."""
    while mark not in (line := response.readline()):
        assert line


def text_of(lines: list[str]) -> str:
    return "".join(json.loads(line.removeprefix("+ ")) for line in lines if line.startswith("+ "))


def broken(*_: object) -> Any:
    raise RuntimeError("the device is gone")


async def turns() -> None:
    """Whoever can go on has gone on: nothing here waits for a socket."""
    for _ in range(50):
        await asyncio.sleep(0)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=12),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 12),
)
def test_batches_hold_everything_in_its_order_and_then_raise_what_a_stream_ended_by(
    puts: list[tuple[int, bool]], are_broken: tuple[bool, bool], first_end: int
) -> None:
    streams = [Stream(str(at), lambda _: None) for at in (0, 1)]
    texts: list[list[str]] = [[], []]
    heard: list[list[str]] = [[], []]
    lost = [EngineDeadError("gone") if is_broken else None for is_broken in are_broken]

    async def feed() -> None:
        for count, (at, pauses) in enumerate(puts):
            if count == first_end:
                streams[0].end(lost[0])
            if not streams[at].is_over:
                streams[at].put([Piece(0, str(count))])
                texts[at].append(str(count))
            if pauses:
                await asyncio.sleep(0)
        for stream, error in zip(streams, lost, strict=True):
            stream.end(error)

    async def read() -> None:
        async with response_to(*streams) as response:
            async for batch in response:
                for at, piece in batch:
                    heard[at].append(piece.text)

    async def both() -> bool:
        reading = asyncio.ensure_future(read())
        await feed()
        await turns()
        assert reading.done()
        return reading.exception() is not None

    is_raised = asyncio.run(both())
    assert is_raised == any(are_broken)
    said, meant = (["".join(one) for one in rows] for rows in (heard, texts))
    assert all(whole.startswith(begun) for begun, whole in zip(said, meant, strict=True))
    if is_raised:  # whoever raised was heard out first
        assert any(is_broken and said[at] == meant[at] for at, is_broken in enumerate(are_broken))
    else:
        assert said == meant


@pytest.mark.parametrize(("first_byte_s", "heard"), [(1e-9, [[]]), (3600.0, []), (0.0, [])])
def test_when_something_is_due_an_empty_batch_comes(first_byte_s: float, heard: list[list[Any]]) -> None:
    async def listen() -> list[Any]:
        async with response_to(Stream("one", lambda _: None), first_byte_s=first_byte_s) as response:
            reading = asyncio.ensure_future(anext(aiter(response)))
            await turns()
            told = [reading.result()] if reading.done() else []
            reading.cancel()
        return told

    assert asyncio.run(listen()) == heard


def test_a_toy_api_streams_and_says_whole_what_the_engine_says(toy: LiveServer) -> None:
    with LLM(talker()) as llm:
        expected = llm.generate("the cat", SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))[0].text
    whole = toy.post(PATH, {"say": "the cat", "count": 5})
    streamed = toy.post(PATH, {"say": "the cat", "count": 5, "stream": True})
    assert whole.data.decode() == f"said {json.dumps(expected)} for 5 tokens\n"
    first, *lines, last = streamed.data.decode().splitlines()
    assert (first, text_of(lines), last) == ("begin", expected, "end 5 tokens")
    assert [reply.headers["content-type"] for reply in (whole, streamed)] == [PLAIN.decode()] * 2


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"say": 5}, "no 400 invalid_request: say must be a text; send one\n"),
        ({"say": "x", "count": 0}, "no 400 invalid_parameter: expected max_tokens of at least 1"),
        ({"say": "x", "model": "nobody"}, "no 404 model_not_found: there is no model 'nobody'"),
        ({"say": "x" * 9000}, "no 400 context_length_exceeded: This model's maximum context length"),
        (b"{", "no 400 invalid_json: expected JSON as request body"),
    ],
)
def test_a_toy_is_refused_in_its_own_words_before_its_stream(toy: LiveServer, asked: Any, told: str) -> None:
    refused = toy.post(PATH, asked if isinstance(asked, bytes) else {**asked, "stream": True})
    assert refused.data.decode().startswith(told)
    assert refused.headers["content-type"] == PLAIN.decode()
    assert int(refused.headers["content-length"]) == len(refused.data)


def test_what_goes_wrong_outside_a_route_is_told_in_the_words_of_its_path(toy: LiveServer) -> None:
    headers = {f"x_{at}": "1" for at in range(MAX_HEADERS + 1)}
    for path, is_toy in ((PATH, True), (f"{PATH}/below", True), (f"{PATH}s", False), (CHAT, False), ("/", False)):
        for reply in (toy.request("PUT", path), toy.post(path, {}, **headers)):
            assert reply.status in (404, 405, 431)
            if is_toy:
                assert reply.data.startswith(f"no {reply.status} ".encode())
            else:
                assert set(reply.json["error"]) == {"message", "type", "param", "code"}


def test_a_key_that_is_missing_is_told_in_the_words_of_the_path(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": []}')
    keys.chmod(0o600)
    with house(keys_file=keys, make=make_toy) as here:
        assert here.post(PATH, {"say": "x"}).data.startswith(b"no 401 invalid_api_key: expected an API key")
        assert here.post(COMPLETE, {"prompt": "x"}).code == "invalid_api_key"
        assert here.post(PATH, {"say": "x"}).headers["www-authenticate"] == "Bearer"


def test_an_error_after_a_toys_stream_began_is_its_last_line(paced: tuple[LiveServer, PacedRunner]) -> None:
    here, runner = paced
    connection = ask(here)
    assert runner.is_waiting.wait(PATIENCE_S)
    runner.allow(3)
    response = connection.getresponse()
    runner.run = broken  # type: ignore[method-assign,assignment]
    runner.let_go()
    lines = response.read().decode().splitlines()
    connection.close()
    assert (response.status, lines[0]) == (200, "begin")
    assert lines[-1].startswith("broken 503 engine_dead: ")


@pytest.mark.parametrize(("path", "keep_alive"), [(PATH, b".\n"), (COMPLETE, b'"text":"",')], ids=["toy", "openai"])
def test_a_pause_in_an_open_stream_is_filled(
    paced: tuple[LiveServer, PacedRunner], rings: Semaphore, path: str, keep_alive: bytes
) -> None:
    here, runner = paced
    connection = ask(here, path)
    assert runner.is_waiting.wait(PATIENCE_S)
    runner.allow(3)
    response = connection.getresponse()
    for _ in range(3):
        read_until(response, keep_alive)
    runner.let_go()
    assert response.read().endswith(b"end 40 tokens\n" if path == PATH else b"data: [DONE]\n\n")
    connection.close()


def test_before_the_first_byte_is_due_a_stream_is_silent_so_that_its_errors_have_a_status(
    paced: tuple[LiveServer, PacedRunner], rings: Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, runner = paced
    here.admission.settings = replace(here.admission.settings, first_byte_s=0.0)
    connection = ask(here)
    assert runner.is_waiting.wait(PATIENCE_S)
    let_ring(rings, 3)
    monkeypatch.setattr(OracleRunner, "run", broken)  # of the very step that waits
    runner.let_go()
    response = connection.getresponse()
    assert (response.status, response.read().startswith(b"no 503 engine_dead: ")) == (503, True)
    connection.close()


def test_a_whole_answer_is_not_disturbed_by_silences(paced: tuple[LiveServer, PacedRunner], rings: Semaphore) -> None:
    here, runner = paced
    connection = ask(here, COMPLETE, stream=False)
    assert runner.is_waiting.wait(PATIENCE_S)
    assert not rings.acquire(blocking=False)  # it has no timer
    runner.let_go()
    assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] <= 40
    connection.close()


def test_the_sdk_reads_over_keep_alives(paced: tuple[LiveServer, PacedRunner], rings: Semaphore) -> None:
    here, runner = paced
    with LLM(talker()) as llm:
        expected = llm.generate("the cat", SamplingParams(max_tokens=9, temperature=0.0))[0].text
    sdk = openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
    runner.allow(3)
    stream = sdk.completions.create(model="oracle", prompt="the cat", max_tokens=9, temperature=0.0, stream=True)
    texts = [next(stream).choices[0].text]
    let_ring(rings, 10)
    runner.let_go()
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == expected


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_chunk_is_compact_json_with_its_keys_in_the_apis_order(
    toy: LiveServer, path: str, options: dict[str, Any]
) -> None:
    asked = {"prompt": 'the "cat" ü', "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
    reply = toy.post(path, {**asked, "stream": True, "stream_options": options})
    *events, done, rest = reply.data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    for event in events:
        told = json.loads(event.removeprefix(b"data: "))
        assert b"data: " + json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode() == event
        assert list(told) == ["id", "object", "created", "model", "choices", *(["usage"] if options else [])]
    assert (told["choices"] == []) == bool(options)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_parts_of_an_answer_reach_a_writer_as_what_they_are() -> None:
    batch = [(0, Piece(0, "x", part=part)) for part in PARTS]
    assert ToyWriter().pieces([], batch) == b'+ "x"\n? "x"\n! look "x"\n'


def test_each_part_is_a_delta_of_its_own_kind() -> None:
    fields = ChatFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    writer = ChatWriter("m", fields, "default")
    data = writer.begin([]) + writer.pieces([], [(0, Piece(0, "x", part=part)) for part in PARTS])
    events = [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n")[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [next(iter(delta)) for delta in deltas[1:]] == ["content", "reasoning", "tool_calls", "tool_calls"]
    head, arguments = (delta["tool_calls"][0] for delta in deltas[3:])
    assert (head["type"], head["function"]["arguments"], arguments["function"]) == ("function", "", {"arguments": "x"})


def test_no_api_tells_of_the_machine_or_forgets_when_to_come_back() -> None:
    error = ApiError(503, "x", "at 0x7f00deadbeef", retry_after_s=1.2, headers=(("X-Why", "so"),))
    for spelled in (TOY_ERRORS, OPENAI_ERRORS):
        headers, body = spelled.answer(error)
        assert b"at ..." in body
        assert dict(headers) == {
            b"content-type": spelled.content_type,
            b"content-length": str(len(body)).encode(),
            b"retry-after": b"2",
            b"x-why": b"so",
        }


def test_an_api_owns_its_path_and_all_below_it() -> None:
    formats = ErrorFormats(OPENAI_ERRORS, {"/v1/toy": TOY_ERRORS})
    owned = [formats.of_path(path) is TOY_ERRORS for path in ("/v1/toy", "/v1/toy/a/b", "/v1/toys", "/v1", "/", "")]
    assert owned == [True, True, False, False, False, False]
    assert SERVER_ERRORS.of_path("/v1/chat/completions") is SERVER_ERRORS.default
