"""What a member that is not quire is asked, and how what it says is read: no sockets."""

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.digests import Namespace
from quire.core.events import Admitted, Finished, FirstToken, Queued, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, FinishReason, PriorityClass, ResolvedSampling
from quire.engine.commands import Submit
from quire.errors import ConfigError, MessageError, QueueFullError, RequestError
from quire.fleet.openai.address import check_openai_request, parse_openai_address, read_key
from quire.fleet.openai.assignment import OpenAIAssignment
from quire.fleet.openai.metrics import OpenAIMetrics, read_metrics
from quire.fleet.openai.model_card import check_probe, read_model
from quire.fleet.openai.requests import completion_body, missing_feature
from quire.fleet.openai.stream import (
    MAX_LINE_BYTES,
    OpenAIChunk,
    OpenAIFailure,
    OpenAIStream,
    error_of,
    refusal_of,
)
from tests.support.errors import raises_code

SPACE = Namespace(1, "model", "", "slots", 16, "tenant-a")


def submit(params: ResolvedSampling | None = None, **fields: Any) -> Submit:
    made = Submit(
        "r",
        3,
        0.5,
        None,
        (1, 2, 3),
        SPACE,
        params or ResolvedSampling(),
        7,
        "tenant-a",
        PriorityClass.NORMAL,
        (Continuation(),),
        False,
        False,
    )
    return msgspec.structs.replace(made, **fields)


class TestAddresses:
    def test_a_line_names_a_server_its_events_its_key_and_its_model(self) -> None:
        line = "openai:http://gpu1:8000/v1 events=tcp://gpu1:5557 replay=tcp://gpu1:5558 key-file=/k model=m"
        found = parse_openai_address(line)
        assert (found.host, found.port, found.path, found.has_tls) == ("gpu1", 8000, "", False)
        assert (found.events, found.replay, found.key_file) == ("tcp://gpu1:5557", "tcp://gpu1:5558", Path("/k"))
        assert (found.model, found.line) == ("m", line)
        assert parse_openai_address("openai:https://[::1]/base/").authority == "[::1]:443"

    @pytest.mark.parametrize(
        ("line", "broken"),
        [
            ("openai:ftp://gpu1:8000", "invalid_member_address"),
            ("openai:http://", "invalid_member_address"),
            ("openai:http://gpu1:99999", "invalid_member_address"),
            ("openai:http://user:secret@gpu1:8000", "invalid_member_address"),
            ("openai:http://gpu1:8000 speed=9", "invalid_member_option"),
            ("openai:http://gpu1:8000 model=a model=b", "invalid_member_option"),
            ("openai:http://gpu1:8000 events=gpu1:5557", ("events",)),
            ("openai:http://gpu1:8000 replay=tcp://gpu1:5558", ("replay",)),
        ],
    )
    def test_a_line_that_names_none_is_an_error(self, line: str, broken: str | tuple[str, ...]) -> None:
        with pytest.raises(ConfigError) as refused:
            parse_openai_address(line)
        assert (refused.value.settings or refused.value.code) == broken

    @pytest.mark.parametrize(
        ("line", "is_clear"),
        [
            ("openai:http://127.0.0.1:8000", False),
            ("openai:http://localhost:8000", False),
            ("openai:http://[::1]:8000 events=ipc:///tmp/events", False),
            ("openai:https://gpu1:8000", False),
            ("openai:http://gpu1:8000", True),
            ("openai:https://gpu1:8000 events=tcp://gpu1:5557", True),
            ("openai:http://127.0.0.1:8000 events=tcp://127.0.0.1:5557 replay=tcp://10.0.0.1:5558", True),
        ],
    )
    def test_beyond_this_machine_a_clear_link_must_be_allowed(self, line: str, is_clear: bool) -> None:
        address = parse_openai_address(line)
        assert address.is_clear == is_clear
        check_openai_request(address, allows_clear=True)
        if is_clear:
            with raises_code(ConfigError, "unencrypted_member"):
                check_openai_request(address, allows_clear=False)
        else:
            check_openai_request(address, allows_clear=False)

    def test_a_key_is_read_from_its_file_or_the_environment_and_never_shown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "key"
        file.write_text("sk-1\n")
        with_file = parse_openai_address(f"openai:http://localhost:1 key-file={file}")
        without = parse_openai_address("openai:http://localhost:1")
        assert (read_key(with_file), read_key(without)) == ("sk-1", None)
        monkeypatch.setenv("QUIRE_STRANGER_KEY", "sk-2")
        assert (read_key(with_file), read_key(without)) == ("sk-1", "sk-2")
        file.write_text("two words\r\nX-Evil: 1")
        with pytest.raises(ConfigError) as told:
            read_key(with_file)
        assert "Evil" not in str(told.value)
        with raises_code(ConfigError, "key_not_readable"):
            read_key(parse_openai_address(f"openai:http://localhost:1 key-file={tmp_path / 'none'}"))


class TestBodies:
    def test_every_setting_that_chooses_tokens_is_sent(self) -> None:
        params = ResolvedSampling(
            max_tokens=50,
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias=((4, -3.0),),
            allowed_token_ids=(4, 5),
            min_tokens=9,
            stop_token_ids=frozenset({8, 2}),
            logprobs=3,
        )
        body = completion_body(submit(params), Continuation(), "m", 1000)
        assert body == {
            "model": "m",
            "prompt": [1, 2, 3],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "add_special_tokens": False,
            "max_tokens": 50,
            "min_tokens": 9,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "seed": 7,
            "ignore_eos": True,
            "stop_token_ids": [2, 8],
            "cache_salt": "tenant-a",
            "logit_bias": {"4": -3.0},
            "allowed_token_ids": [4, 5],
            "logprobs": 3,
            "return_tokens_as_token_ids": True,
        }

    def test_what_was_produced_elsewhere_is_prompt_and_the_limits_are_less_by_it(self) -> None:
        params = ResolvedSampling(max_tokens=10, min_tokens=3)
        body = completion_body(submit(params), Continuation(1, (4, 5)), "m", 1000)
        assert (body["prompt"], body["max_tokens"], body["min_tokens"], body["seed"]) == ([1, 2, 3, 4, 5], 8, 1, 8)

    def test_no_more_is_asked_for_than_a_sequence_there_may_have(self) -> None:
        body = completion_body(submit(ResolvedSampling(max_tokens=100, min_tokens=50)), Continuation(), "m", 8)
        assert (body["max_tokens"], body["min_tokens"]) == (5, 5)

    def test_a_seed_of_any_size_and_no_cache_group_are_what_a_server_takes(self) -> None:
        plain = replace(SPACE, cache_group="")
        body = completion_body(submit(seed=(1 << 64) - 1, namespace=plain), Continuation(), "m", 100)
        assert 0 <= body["seed"] < 1 << 63
        assert body["top_k"] == -1
        assert not {"cache_salt", "logit_bias", "allowed_token_ids", "logprobs"} & body.keys()

    def test_what_only_quire_can_do_is_named(self) -> None:
        plain = ResolvedSampling()
        assert missing_feature(plain, None, "") is None
        assert "grammar" in (missing_feature(plain, "root ::= x", "") or "")
        assert "prompt" in (missing_feature(ResolvedSampling(prompt_logprobs=1), None, "") or "")
        assert "banned" in (missing_feature(ResolvedSampling(banned_token_ids=(1,)), None, "") or "")
        assert "adapter" in (missing_feature(plain, None, "lora") or "")


def line(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "text": "…", "token_ids": list(tokens), **fields}


STREAM = b"".join(
    (
        b": a comment\n\n",
        line(choices=[choice(5, prompt_token_ids=[1, 2, 3])]),
        line(choices=[choice(6, 7)]).replace(b"\n\n", b"\r\n\r\n"),
        line(choices=[choice(text="")]),
        line(choices=[choice(8, finish_reason="stop", stop_reason=8)]),
        line(choices=[], usage={"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}),
        b"data: [DONE]\n\n",
    )
)


def read(data: bytes, cuts: list[int]) -> list[OpenAIChunk]:
    stream = OpenAIStream((1, 2, 3), 100, None, 16)
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [stream.feed(data[start:end]) for start, end in itertools.pairwise(borders)]


class TestStreams:
    @given(st.lists(st.integers(0, 10_000), max_size=12))
    def test_bytes_may_be_cut_anywhere(self, cuts: list[int]) -> None:
        chunks = read(STREAM, cuts)
        assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6, 7, 8]
        assert [chunk.reason for chunk in chunks if chunk.reason] == [FinishReason.STOP]
        assert [chunk.num_cached_tokens for chunk in chunks if chunk.num_cached_tokens is not None] == [2]
        assert sum(chunk.is_done for chunk in chunks) == 1

    @given(st.binary(max_size=200), st.integers(0, len(STREAM)))
    def test_bytes_that_are_no_stream_raise_one_kind_of_error_alone(self, noise: bytes, at: int) -> None:
        stream = OpenAIStream((1, 2, 3), 100, None, 16)
        with contextlib.suppress(MessageError):
            stream.feed(STREAM[:at] + noise + STREAM[at:])

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda some: (
        st.lists(some, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "token_ids", "usage", "error", "logprobs", "index"]), some)
    )))  # fmt: skip
    def test_json_of_any_form_raises_one_kind_of_error_alone(self, told: object) -> None:
        for num_alternatives in (None, 1):
            stream = OpenAIStream((1, 2, 3), 100, num_alternatives, 16)
            with contextlib.suppress(MessageError):
                stream.feed(b"data: " + json.dumps(told).encode() + b"\n\n")

    @pytest.mark.parametrize(
        ("told", "code"),
        [
            ({"choices": [choice(100)]}, "unknown_token_id"),
            ({"choices": [choice(-1)]}, "unknown_token_id"),
            ({"choices": [{"index": 0, "text": "words"}]}, "token_ids_missing"),
            ({"choices": [{**choice(5), "index": 1}]}, "unexpected_choice"),
            ({"choices": [choice(5, prompt_token_ids=[0, 1, 2, 3])]}, "another_prompt"),
            ({"usage": {"prompt_tokens_details": {"cached_tokens": 4}}}, "invalid_cached_tokens"),
            ({"choices": [choice(5), choice(6)]}, "several_choices"),
            ({"choices": [choice(*range(17))]}, "too_many_tokens"),
            ({"choices": [choice(5, text="x" * MAX_LINE_BYTES)]}, "event_too_long"),
        ],
    )
    def test_what_cannot_be_is_an_error_that_says_so(self, told: dict[str, Any], code: str) -> None:
        with raises_code(MessageError, code):
            OpenAIStream((1, 2, 3), 100, None, 16).feed(line(**told))

    def test_an_answer_does_not_go_on_behind_its_end(self) -> None:
        stream = OpenAIStream((1, 2, 3), 100, None, 16)
        stream.feed(line(choices=[choice(5, finish_reason="stop")]))
        with raises_code(MessageError, "tokens_after_end"):
            stream.feed(line(choices=[choice(6)]))

    def test_the_first_line_may_repeat_a_long_prompt_and_no_other_line_is_as_long(self) -> None:
        prompt = tuple(range(90, 90 + MAX_LINE_BYTES // 4))
        first = line(choices=[choice(5, prompt_token_ids=prompt)])
        assert len(first) > MAX_LINE_BYTES
        stream = OpenAIStream(prompt, 100, None, 16)
        assert stream.feed(first).token_ids == [5]
        with raises_code(MessageError, "event_too_long"):
            stream.feed(first[:-2])
        with raises_code(MessageError, "another_prompt"):
            OpenAIStream((*prompt[:-1], 1), 100, None, 16).feed(first)
        with raises_code(MessageError, "chunk_too_long"):
            OpenAIStream(prompt, 100, None, 16).feed(line(choices=[choice(5, text="x" * MAX_LINE_BYTES)]))

    def test_log_probabilities_are_read_with_their_ranks(self) -> None:
        tops = [{"token_id:5": -1.0, "token_id:9": -0.5}, {"token_id:6": -3.0, "token_id:1": -0.5, "token_id:2": -0.6}]
        told = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-1.0, -3.0], "top_logprobs": tops}
        said = OpenAIStream((1,), 100, 2, 16).feed(line(choices=[choice(5, 6, logprobs=told)]))
        first, second = said.logprobs
        assert (first.rank, first.alternatives) == (2, ((9, -0.5), (5, -1.0)))
        assert (second.logprob, second.rank, second.alternatives) == (-3.0, 3, ((1, -0.5), (2, -0.6)))
        with raises_code(MessageError, "invalid_logprobs"):
            OpenAIStream((1,), 100, 2, 16).feed(line(choices=[choice(5)]))

    def test_a_failure_in_the_middle_is_told_with_its_status(self) -> None:
        stream = OpenAIStream((1,), 100, None, 16)
        assert stream.feed(line(error={"message": "dead", "code": 500})).failure == OpenAIFailure(500, "dead")
        assert stream.feed(line(error={"message": "bad", "code": 400})).failure == OpenAIFailure(400, "bad")
        failure = stream.feed(line(choices=[choice(finish_reason="abort")])).failure
        assert failure is not None
        assert "abort" in failure.message

    def test_refusals_of_any_form_become_errors_that_clients_know(self) -> None:
        told = refusal_of(400, b'{"error": {"message": "too long", "code": 400}}')
        assert told == OpenAIFailure(400, "too long")
        assert refusal_of(422, b'{"detail": "no"}').message == "no"
        assert refusal_of(500, b"<html>").message == "<html>"
        assert refusal_of(500, b"").message == "no reason"
        assert isinstance(error_of(told, "", 0), RequestError)
        full = error_of(OpenAIFailure(503, "busy"), "17", 4)
        assert isinstance(full, QueueFullError)
        assert (full.retry_after_s, full.num_waiting) == (17, 4)
        assert [error_of(OpenAIFailure(status, ""), "", 0) for status in (401, 404, 500)] == [None] * 3


class TestFlights:
    def test_the_events_of_two_answers_come_in_their_order_with_the_epoch(self) -> None:
        flight = OpenAIAssignment(submit(continuations=(Continuation(0), Continuation(1, (9,)))), 3)
        assert flight.accept(0) == []
        events: list[RequestEvent] = flight.accept(1)
        assert (flight.is_accepted, flight.num_uncomputed_tokens) == (True, 3)
        events += flight.take_chunk(1, OpenAIChunk([4, 5]))
        assert flight.num_uncomputed_tokens == 0
        events += flight.take_chunk(0, OpenAIChunk([6], reason=FinishReason.STOP))
        events += flight.take_chunk(0, OpenAIChunk(num_cached_tokens=0)) + flight.close_stream(0)
        final = OpenAIChunk([7], reason=FinishReason.LENGTH, num_cached_tokens=2)
        events += flight.take_chunk(1, final) + flight.close_stream(1)
        kinds = [type(event) for event in events]
        ends = [SequenceFinished, Token, SequenceFinished, Finished]
        assert kinds == [Queued, Admitted, FirstToken, Token, Token, Token, *ends]
        assert {event.epoch for event in events} == {3}
        tokens = [event for event in events if isinstance(event, Token)]
        assert [(one.sequence_index, one.num_output_tokens) for one in tokens] == [(1, 2), (1, 3), (0, 1), (1, 4)]
        last = events[-1]
        assert isinstance(last, Finished)
        assert (last.num_cached_tokens, last.num_output_tokens) == (0, 5)
        assert flight.is_over
        assert flight.end(FinishReason.ERROR) == flight.take_chunk(0, OpenAIChunk([1])) == []

    def test_one_answer_can_be_left_and_the_other_goes_on(self) -> None:
        flight = OpenAIAssignment(submit(continuations=(Continuation(0), Continuation(1))), 3)
        flight.accept(0)
        kinds = [type(event) for event in flight.cancel(1)]
        assert kinds == [Queued, Admitted, SequenceFinished]
        assert flight.take_chunk(1, OpenAIChunk([4])) == []
        assert [type(event) for event in flight.end(FinishReason.DEADLINE)] == [SequenceFinished, Finished]


class TestFigures:
    def test_sizes_and_loads_of_all_engines_are_added_up(self) -> None:
        text = "\n".join(
            (
                "# HELP vllm:num_requests_running how many",
                'vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="50",x="a\\"b"} 1.0',
                'vllm:cache_config_info{block_size="128",engine="1",num_gpu_blocks="50"} 1.0',
                'vllm:num_requests_running{engine="0"} 2.0',
                'vllm:num_requests_running{engine="1"} 3.0 1700000000',
                "vllm:num_requests_waiting 4",
                'vllm:kv_cache_usage_perc{engine="0"} 0.5',
                'vllm:kv_cache_usage_perc{engine="1"} 0.1',
                "vllm:prompt_tokens_total 1e3",
                "vllm:generation_tokens_total 20",
                "vllm:request_prompt_tokens_sum 300",
                "vllm:request_prompt_tokens_count 3",
            )
        )
        found = read_metrics(text.encode())
        assert (found.num_running, found.num_waiting, found.block_size, found.num_blocks) == (5, 4, 128, 100)
        assert (found.num_used_blocks, found.num_computed_tokens, found.mean_prompt_tokens) == (30, 1020, 100.0)

    @given(st.text())
    def test_other_texts_say_nothing(self, text: str) -> None:
        assert isinstance(read_metrics(text.encode()), OpenAIMetrics)
        read_metrics(f'vllm:num_requests_running {text}\nvllm:cache_config_info{{block_size="{text}"}} 1'.encode())


class TestCards:
    def test_the_named_model_or_the_first_is_taken(self) -> None:
        body = b'{"object": "list", "data": [{"id": "a", "max_model_len": 9}, {"id": "b"}]}'
        assert (read_model(body, "").id, read_model(body, "b").max_model_len) == ("a", None)
        for wrong in (b"[]", b"", b'{"data": []}'):
            with pytest.raises(MessageError):
                read_model(wrong, "")
        with raises_code(MessageError, "model_not_served"):
            read_model(body, "c")

    def test_another_tokenizer_is_noticed(self) -> None:
        check_probe(b'{"tokens": [1, 2]}', [1, 2])
        with raises_code(MessageError, "another_tokenizer"):
            check_probe(b'{"tokens": [1, 3]}', [1, 2])
        for wrong in (b"{}", b"x"):
            with raises_code(MessageError, "malformed_message"):
                check_probe(wrong, [1, 2])
