"""What can be seen of a server: metrics under the field's names, one line for each request."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from quire.api.dialects.openai.tokens import Tokenize
from quire.api.http.errors import ApiError
from quire.api.models.registry import ModelEntry, Models
from quire.client.engines.client import EngineStats
from quire.observe import access_log
from quire.observe.metrics import (
    ENGINE_TOTALS,
    FIRST_TOKEN_S,
    GAP_S,
    PHASE_S,
    TOKENS,
    Metrics,
    ModelSnapshot,
    RequestMetrics,
    one_two_five,
)
from tests.support.servers.local_api import LiveServer, house

ASKED = {"model": "oracle", "prompt": "hello there", "max_tokens": 7, "temperature": 0.0, "ignore_eos": True}
NAMES = (
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "prompt_tokens_total",
    "generation_tokens_total", "prompt_tokens_by_source_total", "prompt_tokens_cached_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "request_success_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_max_tokens", "request_params_n",
    "request_prefill_kv_computed_tokens",
)  # fmt: skip


def value(page: str, name: str, **labels: str) -> float:
    for line in page.splitlines():
        found = re.fullmatch(r"([a-z_:]+)\{(.*)\} (\S+)", line)
        told = dict(re.findall(r'(\w+)="([^"]*)"', found[2])) if found else {}
        if found and found[1] == f"vllm:{name}" and labels.items() <= told.items():
            return float(found[3])
    raise AssertionError(f"there is no {name} {labels}")


def test_metrics_count_what_was_asked_and_answered() -> None:
    with house() as here:
        for _ in range(3):
            assert here.post("/v1/completions", ASKED).status == 200
        here.wait_until_free()
        page = here.get("/metrics").data.decode()
    for name in NAMES:
        assert f"vllm:{name}" in page, name
    num_prompt = value(page, "prompt_tokens_total") / 3
    assert value(page, "generation_tokens_total", model_name="oracle", engine="0") == 21
    assert value(page, "request_success_total", finished_reason="length") == 3
    assert value(page, "prefix_cache_hits_total") == 2 * ((num_prompt - 1) // 4 * 4)
    assert value(page, "prompt_tokens_by_source_total", source="local_compute") == num_prompt + 2 * (
        num_prompt - (num_prompt - 1) // 4 * 4
    )
    assert value(page, "time_to_first_token_seconds_count") == 3
    assert value(page, "request_prompt_tokens_sum") == 3 * num_prompt
    assert value(page, "num_requests_running") == 0
    assert "python_gc" not in page, "nothing else of the process is shown"


def test_buckets_are_those_of_the_field() -> None:
    assert (FIRST_TOKEN_S[0], FIRST_TOKEN_S[-1], len(FIRST_TOKEN_S)) == (0.001, 2560, 22)
    assert (GAP_S[0], GAP_S[-1], len(GAP_S)) == (0.01, 80, 19)
    assert (PHASE_S[0], PHASE_S[-1], len(PHASE_S)) == (0.3, 7680, 21)
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert TOKENS[-1] == 1_000_000


SIZES = (("1.0", 1), ("64.0", 2), ("+Inf", 3))


def test_gauges_show_what_an_engine_can_tell_and_nothing_it_cannot() -> None:
    metrics = Metrics()
    metrics.set_sources(lambda: [ModelSnapshot("a", 2, 3, 0.25, 100, 32, 1, SIZES, 70), ModelSnapshot("b", 0, 0)])
    page = metrics.page().decode()
    assert value(page, "num_requests_running", model_name="a") == 2
    assert value(page, "num_requests_waiting_by_reason", model_name="a", reason="capacity") == 3
    assert value(page, "kv_cache_usage_perc", model_name="a") == 0.25
    assert value(page, "cache_config_info", block_size="32", num_gpu_blocks="100") == 1
    assert 'quire:worker_restarts_total{engine="0",model_name="a"} 1.0' in page
    assert value(page, "iteration_tokens_total_bucket", model_name="a", le="64.0") == 2
    assert value(page, "iteration_tokens_total_count", model_name="a") == 3
    assert value(page, "iteration_tokens_total_sum", model_name="a") == 70
    assert page.count("vllm:kv_cache_usage_perc{") == page.count("vllm:iteration_tokens_total_count{") == 1


def test_an_engines_totals_are_shown_under_the_fields_names_where_it_has_any() -> None:
    metrics = Metrics()
    totals = [(name, 10.0 + at) for at, name in enumerate(ENGINE_TOTALS)]
    metrics.set_sources(lambda: [ModelSnapshot("a", 0, 0, totals=totals), ModelSnapshot("b", 0, 0)])
    page = metrics.page().decode()
    assert value(page, "spec_decode_num_draft_tokens_total", model_name="a") == 11
    assert value(page, "spec_decode_num_accepted_tokens_total", model_name="a") == 12
    assert 'quire:computed_tokens_total{engine="0",model_name="a"} 10.0' in page
    for at, name in enumerate(("forced_tokens", "pins_yielded", "grammar_compile_seconds", "grammar_mask_seconds"), 13):
        assert f'quire:{name}_total{{engine="0",model_name="a"}} {at}.0' in page
    assert "draft_tokens_total{" in page
    assert page.count('model_name="b"') == 4, "requests that run and wait, and nothing else"


def test_a_request_that_came_to_nothing_has_no_first_token() -> None:
    metrics = Metrics("quire")
    metrics.observe(RequestMetrics("m", "abort", 5, 0, 0, 0, 1, None, 0, 0.5, None, 1.0))
    page = metrics.page().decode()
    assert 'quire:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0' in page
    assert "quire:time_to_first_token_seconds_count{" not in page


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The log, and everything as it was afterwards."""
    root = logging.getLogger()
    before, level, out = root.handlers[:], root.level, io.StringIO()
    yield out
    root.handlers[:] = before
    root.setLevel(level)


def test_every_request_leaves_one_line_and_a_refused_one_says_why(written: io.StringIO, here: LiveServer) -> None:
    access_log.configure_logging("json", stream=written)
    here.post("/v1/completions", ASKED, x_request_id="mine")
    here.post("/v1/completions", {**ASKED, "n": 99})
    here.get("/nothing")
    here.wait_until_free()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    good, bad, missing = [line for line in lines if line["from"] == "quire.access"]
    assert (good["status"], good["client_id"], good["output_tokens"]) == (200, "mine", 7)
    assert (good["preemptions"], good["replays"]) == (0, 0)
    assert (bad["status"], bad["error"]) == (400, "invalid_parameter")
    assert (missing["status"], missing["path"]) == (404, "/nothing")


def test_plain_lines_are_for_people_and_cannot_be_forged(written: io.StringIO) -> None:
    access_log.configure_logging("plain", stream=written)
    access_log.write_access({"path": "/a\nb status=200", "status": 404})
    logging.getLogger("quire.api").error("something %s", "happened")
    first, second = written.getvalue().splitlines()
    assert first.endswith("path='/a\\nb status=200' status=404")
    assert second.endswith("error something happened")


def test_a_trace_goes_to_the_log_and_not_to_the_client(
    written: io.StringIO, here: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret 0x7fffdeadbeef")

    access_log.configure_logging("json", stream=written)
    monkeypatch.setattr(Tokenize, "parse", broken)
    reply = here.post("/tokenize", {"prompt": "x"})
    assert (reply.status, reply.code) == (500, "internal_error")
    assert b"secret" not in reply.data
    here.wait_until(lambda: "ZeroDivisionError" in written.getvalue())


def test_a_model_that_loads_is_listed_and_answers_not_yet() -> None:
    model = ModelEntry("new", "/somewhere")
    assert (model.is_ready, model.is_dead, model.stats()) == (False, False, None)
    assert model.card()["max_model_len"] is None
    assert "somewhere" not in json.dumps(model.card())
    with pytest.raises(ApiError) as refused:
        model.open()
    assert (refused.value.status, refused.value.code) == (503, "model_loading")
    assert not Models([model]).is_ready
    assert EngineStats().num_restarts == 0


def test_several_answers_are_measured_one_by_one() -> None:
    with house() as here:
        assert here.post("/v1/completions", {**ASKED, "n": 4, "max_tokens": 7}).status == 200
        here.wait_until_free()
        page = here.get("/metrics").data.decode()
    assert value(page, "generation_tokens_total") == 28
    assert value(page, "request_max_num_generation_tokens_sum") == 7
    assert value(page, "inter_token_latency_seconds_count") <= 4 * 6
