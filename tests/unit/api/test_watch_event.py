"""What is told of requests to those who watch: timelines, rows of ten seconds, and events without an engine."""

import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import ModelEntry, Models
from quire.api.watch.activity import MAX_ROWS, MAX_TIMELINES, Activity
from quire.api.watch.timeline import MAX_SEGMENTS, Segment, segments_of, timeline_of
from quire.api.watch.watch_event import watch_event
from quire.client.engines.client import EngineStats, FleetMemberStats, FleetStats
from quire.client.prefix.reuse_log import ReuseLog
from quire.client.reply.reply import MAX_PAUSES, Reply
from quire.client.reply.stream import RequestHandle
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.core.events import Admitted, Finished, FirstToken, Preempted, Queued, SequenceFinished, Token
from quire.core.request import FinishReason
from tests.support.servers.talkers import talker


class Asked:
    """A request with one prompt of ten tokens, and a clock that is set by hand."""

    def __init__(self, tenant: str = "someone", model: str = "oracle") -> None:
        self.now_s = 100.0
        text, params = talker().text, SamplingParams(max_tokens=100)
        self.reply = Reply(make_request(text, [7] * 10, params), params, text.tokenizer, lambda: self.now_s)
        self.record = RequestRecord("req-1", "POST", "/v1/completions", started_s=100.0)
        self.record.tenant, self.record.model, self.record.priority = tenant, model, "normal"
        self.record.handles = [RequestHandle(self.reply, lambda _id: None, lambda _id: None)]
        self.num_tokens = 0

    def at(self, now_s: float, *events: Any) -> None:
        self.now_s = now_s
        self.reply.take(events)

    def token(self, now_s: float) -> None:
        self.num_tokens += 1
        self.at(now_s, Token("r", 0, 7, self.num_tokens, None))

    def end(self, now_s: float) -> None:
        self.at(now_s, SequenceFinished("r", 0, FinishReason.LENGTH, self.num_tokens, None))
        self.at(now_s, Finished("r", 10, 4, self.num_tokens))

    def segments(self, ended_s: float | None = None) -> list[tuple[str, float, float | None]]:
        return [tuple(one) for one in segments_of(self.record, ended_s)]  # type: ignore[misc]


def test_a_request_waits_has_its_prompt_computed_and_is_answered() -> None:
    asked = Asked()
    assert asked.segments() == [("waiting", 100.0, None)]
    asked.at(101.0, Queued("r"))
    asked.at(103.0, Admitted("r", 0.5, 2.0, 4))
    assert asked.segments() == [("waiting", 100.0, 102.5), ("prompt", 102.5, None)]
    asked.at(104.0, FirstToken("r", 4))
    asked.token(104.0)
    assert asked.segments()[1:] == [("prompt", 102.5, 104.0), ("answering", 104.0, None)]
    asked.end(106.0)
    assert asked.segments(106.5)[2] == ("answering", 104.0, 106.5)
    assert timeline_of(asked.record, 106.5)["state"] == "done"


def test_one_that_never_ran_has_only_waited() -> None:
    asked = Asked()
    assert asked.segments(105.0) == [("waiting", 100.0, 105.0)]
    assert timeline_of(asked.record, 105.0)["state"] == "failed"
    asked.record.is_cut = True
    assert timeline_of(asked.record, 105.0)["state"] == "cut"


def test_a_preempted_one_is_told_so_until_something_comes_again() -> None:
    asked = Asked()
    asked.at(101.0, Admitted("r", 0.0, 1.0, 4))
    asked.at(102.0, Preempted("r", 0))
    assert asked.segments()[1:] == [("prompt", 101.0, 102.0), ("preempted", 102.0, None)]
    asked.at(103.0, FirstToken("r", 4))
    asked.token(103.0)
    asked.token(104.0)
    asked.at(105.0, Preempted("r", 0))
    asked.at(105.5, Preempted("r", 0))
    asked.token(107.0)
    expected = [
        ("waiting", 100.0, 101.0),
        ("prompt", 101.0, 102.0),
        ("preempted", 102.0, 103.0),
        ("answering", 103.0, 105.0),
        ("preempted", 105.0, 107.0),
        ("answering", 107.0, None),
    ]
    assert asked.segments() == expected
    assert asked.reply.num_preemptions == 3
    asked.end(108.0)
    assert asked.segments(108.0) == [*expected[:-1], ("answering", 107.0, 108.0)]


def test_one_that_ends_while_it_is_preempted_ends_so() -> None:
    asked = Asked()
    asked.at(101.0, Admitted("r", 0.0, 1.0, 4), FirstToken("r", 4))
    asked.token(101.5)
    asked.at(102.0, Preempted("r", 0))
    assert asked.segments(110.0)[-1] == ("preempted", 102.0, 110.0)


def test_segments_of_one_that_is_preempted_for_ever_are_bounded() -> None:
    asked = Asked()
    asked.at(101.0, Admitted("r", 0.0, 1.0, 4), FirstToken("r", 4))
    for number in range(100):
        asked.token(102.0 + number)
        asked.at(102.5 + number, Preempted("r", 0))
    assert len(asked.reply.pauses) == MAX_PAUSES
    segments = asked.segments()
    assert len(segments) <= MAX_SEGMENTS
    assert segments[-1] == ("preempted", 201.5, None)
    assert all(one[2] == other[1] for one, other in itertools.pairwise(segments))


def test_a_row_has_what_came_in_its_ten_seconds_and_each_first_token_once() -> None:
    open_requests: dict[str, Any] = {}
    activity = Activity(open_requests)
    oracle = activity.of("oracle")
    asked = Asked()
    open_requests["a"] = (asked.record, None)
    oracle.end_row(activity.open_of("oracle"), 110.0, 10.0)
    asked.at(112.0, Admitted("r", 0.0, 1.0, 4), FirstToken("r", 4))
    for second in range(5):
        asked.token(112.0 + second)
    oracle.end_row(activity.open_of("oracle"), 120.0, 10.0)
    for second in range(10):
        asked.token(121.0 + second)
    asked.end(131.0)
    del open_requests["a"]
    activity.record_ended(asked.record)
    oracle.end_row(activity.open_of("oracle"), 130.0, 10.0)
    told = [
        (row.at_s, row.output_tokens_per_s, row.prompt_tokens_per_s, row.ttft_p50_s, row.hit_rate)
        for row in oracle.rows
    ]
    assert told == [(110.0, 0.0, 0.0, None, None), (120.0, 0.5, 1.0, 12.0, 0.4), (130.0, 1.0, 0.0, None, None)]
    totals = oracle.totals([])
    assert (totals.num_prompt_tokens, totals.num_cached_tokens, totals.num_output_tokens) == (10, 4, 15)
    assert totals.num_requests == 1


def test_rows_and_timelines_are_bounded() -> None:
    activity = Activity({})
    for number in range(MAX_ROWS + 40):
        activity.of("oracle").end_row([], float(number), 10.0)
    assert len(activity.of("oracle").rows) == MAX_ROWS
    assert activity.of("oracle").num_rows == MAX_ROWS + 40
    for _ in range(MAX_TIMELINES + 40):
        activity.record_ended(Asked().record)
    assert len(activity.timelines) == MAX_TIMELINES


def server_of(model: ModelEntry, *asked: Asked) -> Any:
    open_requests = {str(at): (one.record, None) for at, one in enumerate(asked)}
    activity = Activity(open_requests)
    return SimpleNamespace(
        models=Models([model]),
        open_requests=open_requests,
        activity=activity,
        reuse_log=ReuseLog(),
        is_draining=False,
    )


def test_at_a_gateway_the_members_are_told_and_what_runs_as_far_as_it_is_known() -> None:
    member = FleetMemberStats("tcp://one:1", "ready", 1, 5, 100, 0.25, "same")
    fleet = FleetStats((member,), 3, 1, 0, 2, 1)
    stats = EngineStats(num_blocks=100, block_size=16, kv_usage=0.25)
    client = SimpleNamespace(
        stats=lambda: stats,
        fleet_stats=lambda: fleet,
        workers=(),
        is_alive=True,
        is_ready=True,
        is_busy=False,
    )
    running, waiting = Asked("a"), Asked("b")
    running.at(101.0, Queued("r"), Admitted("r", 0.0, 1.0, 4), FirstToken("r", 4))
    running.token(102.0)
    model = ModelEntry("oracle", engine_client=client)  # type: ignore[arg-type]
    server = server_of(model, running, waiting)
    event = watch_event(server, server.activity, model, None, ["oracle"])
    told = msgspec.json.decode(msgspec.json.encode(event))
    assert told["pool"]["counts"] == {
        "free": 75, "cached": 0, "used": 25, "shared": 0, "pinned": 0, "computing": 0
    }  # fmt: skip
    assert told["pool"]["cells"] == ""
    assert told["fleet"]["members"][0]["address"] == "tcp://one:1"
    assert (told["fleet"]["num_moved"], told["fleet"]["num_held"], told["fleet"]["hit_rate"]) == (3, 2, 0.2)
    (row,) = told["running"]
    assert (row["tenant"], row["class"], row["phase"], row["computed"], row["known"]) == (
        "a",
        "normal",
        "answer",
        10,
        11,
    )
    assert told["queue"] == [{"class": "normal", "tenant": "b", "num_requests": 1}]
    assert [one["tenant"] for one in told["requests"]] == ["a", "b"]


@pytest.mark.parametrize("num_open", [0, 3, MAX_TIMELINES + 10])
def test_the_latest_requests_are_told_whether_they_have_ended_or_not(num_open: int) -> None:
    model = ModelEntry("oracle")
    open_ones = [Asked() for _ in range(num_open)]
    server = server_of(model, *open_ones)
    for _ in range(MAX_TIMELINES):
        server.activity.record_ended(Asked().record)
    requests = watch_event(server, server.activity, model, None, [])["requests"]
    assert len(requests) == MAX_TIMELINES
    assert sum(one["state"] != "failed" for one in requests) == min(num_open, MAX_TIMELINES)


def test_a_segment_is_a_phase_a_start_and_an_end() -> None:
    assert msgspec.json.encode(Segment("waiting", 1.0, None)) == b'["waiting",1.0,null]'
