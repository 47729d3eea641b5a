"""OpenTelemetry spans, one per request; needs the extra `otel`. Attributes are counts and times, never text or tokens.

The OpenTelemetry library queues a bounded number of spans and sends them in batches from its own thread; spans that it
cannot send are dropped. The library is imported only if spans are enabled.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

log = logging.getLogger("quire.spans")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_S = 5
"""Timeout for sending a batch, in seconds."""
CLOSE_S = 5.0
AttributeValue = str | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The span data of one request."""

    name: str
    started_unix_s: float
    ended_unix_s: float
    attributes: Mapping[str, AttributeValue]
    traceparent: str = ""
    """The client's traceparent header, or empty."""
    error: str = ""
    """The error code; empty if the request succeeded."""


class RequestSpanWriter:
    """Writes spans to one span processor of the library."""

    def __init__(self, processor: "SpanProcessor", version: str) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - optional dependency
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - optional dependency

        name = os.environ.get("OTEL_SERVICE_NAME") or "quire"
        resource = Resource.create({"service.name": name, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", version)
        self._has_failed = False

    def write(self, span: RequestSpan) -> None:
        """Pass a span to the library. Failures are logged once and never affect a request."""
        try:
            self._write(span)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("could not write a span; more spans may be missing")

    def close(self) -> None:
        """Send the remaining spans, waiting at most `CLOSE_S`."""
        thread = threading.Thread(target=self._provider.shutdown, name="quire-spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _write(self, span: RequestSpan) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415 - optional dependency
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - optional dependency
            TraceContextTextMapPropagator,
        )

        # The tracestate header is ignored, because it is free text from the client.
        context = TraceContextTextMapPropagator().extract({"traceparent": span.traceparent})
        otel_span = self._tracer.start_span(
            span.name, context, SpanKind.SERVER, span.attributes, start_time=int(span.started_unix_s * 1e9)
        )
        if span.error:
            otel_span.set_status(Status(StatusCode.ERROR, span.error))
        otel_span.end(int(span.ended_unix_s * 1e9))


def open_spans(endpoint: str | None, version: str, environ: Mapping[str, str] = os.environ) -> RequestSpanWriter | None:
    """Open a writer for `endpoint`, or for the endpoint in OpenTelemetry's variables; None if neither is set.

    If the library is not installed: raises ConfigError if `endpoint` is set, but only logs a warning if a variable is
    set, because variables may be meant for other programs.
    """
    if endpoint is None and not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - optional
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        message = f"spans need OpenTelemetry, which is not installed ({error.name}); install quire[otel]"
        if endpoint is not None:
            raise ConfigError(message, ("otel",)) from error
        log.warning("%s", message)
        return None
    # If the URL is None, the library reads the variables itself.
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    return RequestSpanWriter(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)), version)
