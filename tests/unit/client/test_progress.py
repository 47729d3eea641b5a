"""How much of a prompt is computed, and how long the rest takes: by events and a clock that is set."""

from hypothesis import given
from hypothesis import strategies as st

from quire.api.dialects.response_writer import progress_fields
from quire.client.reply.outputs import PrefillProgress
from quire.client.reply.reply import Reply
from quire.client.request.params import SamplingParams
from quire.client.request.requests import RequestOptions, make_request
from quire.core.events import Admitted, FirstToken, PromptProgress, Queued
from tests.support.servers.talkers import talker

PROMPT = list(range(1, 101))


def reply_at(clock: list[float]) -> Reply:
    text, params = talker().text, SamplingParams(max_tokens=1)
    request = make_request(text, PROMPT, params, RequestOptions(report_progress=True))
    assert request.reports_progress
    return Reply(request, params, text.tokenizer, lambda: clock[0])


def test_time_counts_from_the_end_of_the_queue_and_the_rest_is_estimated_by_the_rate_so_far() -> None:
    clock = [5.0]
    reply = reply_at(clock)
    reply.take([Queued("r")])
    clock[0] = 7.0
    assert reply.progress == PrefillProgress(100, 0, 0, 0.0, None)
    reply.take([Admitted("r", 0.0, 2.0, 20)])
    assert reply.progress == PrefillProgress(100, 20, 20, 0.0, None)
    clock[0] = 11.0
    reply.take([PromptProgress("r", 60, 20)])
    assert reply.progress == PrefillProgress(100, 20, 60, 4.0, 4.0)  # 40 tokens in 4 s, 40 are left
    clock[0] = 12.5
    assert reply.progress == PrefillProgress(100, 20, 60, 5.5, 2.5)
    clock[0] = 30.0
    assert reply.progress.left_s == 0.0
    reply.take([PromptProgress("r", 100, 20), FirstToken("r", 20)])
    clock[0] = 60.0
    assert reply.progress == PrefillProgress(100, 20, 100, 23.0, 0.0)


def test_a_prompt_that_is_computed_again_has_no_estimate_until_it_passes_where_it_began() -> None:
    clock = [0.0]
    reply = reply_at(clock)
    reply.take([Admitted("r", 0.0, 0.0, 64), PromptProgress("r", 32, 64)])
    assert (reply.progress.num_processed_tokens, reply.progress.left_s) == (32, None)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.0, 9.0)), max_size=9))
def test_whatever_is_reported_no_figure_is_negative(reports: list[tuple[int, float]]) -> None:
    clock = [0.0]
    reply = reply_at(clock)
    reply.take([Admitted("r", 0.0, 0.0, 0)])
    for count, pause_s in reports:
        clock[0] += pause_s
        reply.take([PromptProgress("r", count, 0)])
        fields = progress_fields([reply])
        assert fields is not None
        assert fields["processed"] == count <= fields["total"] == 100
        assert fields["time_ms"] == round(1000 * clock[0])
        assert fields["left_ms"] is None or fields["left_ms"] >= 0


def test_several_prompts_are_reported_together_and_none_before_they_are_known() -> None:
    clock = [0.0]
    first, second = reply_at(clock), reply_at(clock)
    for reply in (first, second):
        reply.take([Admitted("r", 0.0, 0.0, 10)])
    clock[0] = 1.0
    first.take([PromptProgress("r", 55, 10)])
    fields = progress_fields([first, second])
    assert fields == {"total": 200, "cache": 20, "processed": 65, "time_ms": 1000, "left_ms": None}
    assert progress_fields([]) is None
