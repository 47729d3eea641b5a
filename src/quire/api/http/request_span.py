"""OpenTelemetry spans of requests, with attributes of the GenAI conventions and the latencies that vLLM reports.

Spans contain numbers, server settings and fixed names, but no text from the client except its `traceparent` header.
"""

import time

from quire.api.http.request_record import RequestRecord, figures_of
from quire.observe.metrics import RequestMetrics
from quire.observe.spans import AttributeValue, RequestSpan, RequestSpanWriter

COMPLETIONS = "/v1/completions"


class RequestSpans:
    """Writes a span for every finished request."""

    def __init__(self, writer: RequestSpanWriter) -> None:
        self._writer = writer

    def write(self, record: RequestRecord) -> None:
        """Write the span of a finished request, if it was for a model."""
        if record.model:
            self._writer.write(span_of(record, time.time()))


def span_of(record: RequestRecord, now_unix_s: float) -> RequestSpan:
    """Return the span of a request that ends now."""
    figures = figures_of(record)
    operation = "text_completion" if record.path == COMPLETIONS else "chat"
    status = 499 if record.is_cut else record.status
    error = record.error or ("client_closed_request" if record.is_cut else "")
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.choice.count": record.num_answers,
        "gen_ai.usage.input_tokens": figures.num_prompt_tokens,
        "gen_ai.usage.output_tokens": figures.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": figures.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": figures.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": figures.num_output_tokens,
        "gen_ai.usage.num_sequences": record.num_answers,
        "http.response.status_code": status,
        **_latencies(figures),
        **_parameters_and_finish_reasons(record),
    }
    if error:
        attributes["error.type"] = error
    return RequestSpan(
        f"{operation} {record.model}",
        now_unix_s - figures.total_s,
        now_unix_s,
        attributes,
        record.headers.get("traceparent", ""),
        error if status >= 500 else "",
    )


def _latencies(figures: RequestMetrics) -> dict[str, AttributeValue]:
    """Return vLLM's latency attributes, in seconds; without a first token, only queue time and total time."""
    latencies: dict[str, AttributeValue] = {
        "gen_ai.latency.time_in_queue": figures.queue_s,
        "gen_ai.latency.e2e": figures.total_s,
    }
    first_s = figures.first_token_s
    if first_s is not None:
        latencies["gen_ai.latency.time_to_first_token"] = first_s
        latencies["gen_ai.latency.time_in_model_prefill"] = max(0.0, first_s - figures.queue_s)
        latencies["gen_ai.latency.time_in_model_decode"] = max(0.0, figures.total_s - first_s)
        latencies["gen_ai.latency.time_in_model_inference"] = max(0.0, figures.total_s - figures.queue_s)
    return latencies


def _parameters_and_finish_reasons(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {}
    if record.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = record.max_tokens
    if record.handles:
        params = record.handles[0].reply.request.params
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
        pieces = [piece for handle in record.handles for piece in handle.reply.pieces]
        attributes["gen_ai.response.finish_reasons"] = [piece.finish_reason for piece in pieces if piece.finish_reason]
    return attributes
