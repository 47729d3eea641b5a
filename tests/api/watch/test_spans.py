"""Spans of requests: one for each that asked a model, under the field's names, below whoever asked, without text."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from quire.api.access.auth import Gate
from quire.api.app import make_asgi
from quire.api.http.request_span import RequestSpans
from quire.api.server_state import ServerState
from quire.errors import ConfigError
from quire.observe import spans
from quire.observe.spans import RequestSpan, RequestSpanWriter, open_spans
from tests.support.servers.local_api import LiveServer, house

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-1] + "0"


@dataclass
class Traced:
    house: LiveServer
    exporter: InMemorySpanExporter

    def spans(self, count: int) -> tuple[ReadableSpan, ...]:
        """A request's span follows its last byte."""
        self.house.wait_until(lambda: len(self.exporter.get_finished_spans()) >= count)
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    writer = RequestSpanWriter(SimpleSpanProcessor(exporter), "1.2.3")

    def make(admission: ServerState, gate: Gate) -> object:
        return make_asgi(admission, gate, RequestSpans(writer).write)

    with house(make=make) as here:
        yield Traced(here, exporter)


def ask(here: LiveServer, path: str = "/v1/completions", **fields: object) -> int:
    body = {"model": "oracle", "max_tokens": 4, **fields}
    if path == "/v1/completions":
        body.setdefault("prompt", "the secret word")
    else:
        body.setdefault("messages", [{"role": "user", "content": "the secret word"}])
    headers = {"traceparent": PARENT, "tracestate": "secret=word", "x-request-id": "secret-name"}
    return here.post(path, body, **headers).status


def test_a_request_has_one_span_with_its_figures_below_whoever_asked(traced: Traced) -> None:
    assert ask(traced.house, n=2, temperature=0.5, ignore_eos=True) == 200
    (span,) = traced.spans(1)
    found = dict(span.attributes or {})
    assert span.name == "text_completion oracle"
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.output_tokens"] == 8
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    for name in ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode"):
        assert isinstance(found[f"gen_ai.latency.{name}"], float)
    assert (span.end_time or 0) > (span.start_time or 0)
    assert span.resource.attributes["service.version"] == "1.2.3"


def test_no_text_of_a_client_is_in_a_span(traced: Traced) -> None:
    assert ask(traced.house) == 200
    assert ask(traced.house, "/v1/chat/completions", user="secret") == 200
    assert ask(traced.house, temperature="secret") == 400
    for span in traced.spans(2):
        assert "secret" not in json.dumps(json.loads(span.to_json()))


def test_what_asks_no_model_has_no_span(traced: Traced) -> None:
    for path in ("/health", "/v1/models", "/none"):
        traced.house.get(path)
    assert ask(traced.house, "/v1/chat/completions") == 200
    assert [span.name for span in traced.spans(1)] == ["chat oracle"]


def test_who_is_not_sampled_has_none(traced: Traced) -> None:
    body = {"model": "oracle", "prompt": "a", "max_tokens": 1}
    assert traced.house.post("/v1/completions", body, traceparent=NOT_SAMPLED).status == 200
    assert ask(traced.house) == 200
    assert len(traced.spans(1)) == 1


def test_a_header_that_is_none_begins_a_trace_of_its_own(traced: Traced) -> None:
    body = {"model": "oracle", "prompt": "a", "max_tokens": 1}
    assert traced.house.post("/v1/completions", body, traceparent="00-zz").status == 200
    (span,) = traced.spans(1)
    assert span.parent is None


class _Broken(SpanProcessor):
    def on_start(self, span: object, parent_context: object = None) -> None:
        raise RuntimeError("on purpose")


def test_a_library_that_fails_is_told_once_and_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    writer = RequestSpanWriter(_Broken(), "1")
    for _ in range(3):
        writer.write(RequestSpan("a", 1.0, 2.0, {}))
    assert [record.message.partition(";")[0] for record in caplog.records] == ["could not write a span"]


def test_an_error_of_the_server_is_one_of_the_span() -> None:
    exporter = InMemorySpanExporter()
    writer = RequestSpanWriter(SimpleSpanProcessor(exporter), "1")
    writer.write(RequestSpan("a", 1.0, 2.0, {}, error="engine_dead"))
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.start_time, span.end_time) == (1_000_000_000, 2_000_000_000)


def test_without_a_setting_or_a_variable_nothing_is_written() -> None:
    assert open_spans(None, "1", {}) is None
    assert open_spans(None, "1", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9/", None])
def test_a_collector_that_is_not_there_holds_up_nothing(endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "CLOSE_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    writer = open_spans(endpoint, "1")
    assert writer is not None
    writer.write(RequestSpan("a", 1.0, 2.0, {}))
    writer.close()


def test_what_is_not_installed_is_refused_where_it_was_asked_for_and_told_where_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as refused:
        open_spans("http://localhost:4318", "1", {})
    assert refused.value.settings == ("otel",)
    assert open_spans(None, "1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}) is None
    assert "install quire[otel]" in caplog.text


def test_the_library_is_not_loaded_by_who_wants_no_spans() -> None:
    code = "import sys, quire.api.serving; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0
