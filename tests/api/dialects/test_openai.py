"""What the OpenAI API promises, asked by its own SDK and by hand; the oracle answers, so that everything is exact."""

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from quire.api.dialects import answering
from quire.api.dialects.openai.chat import ChatWriter
from quire.api.http.errors import ApiError
from quire.client.engines.llm import LLM
from quire.client.reply.outputs import Piece
from quire.client.reply.reply import Reply
from quire.client.request.params import SamplingParams
from quire.core.step import UNSATISFIABLE
from tests.support.servers.local_api import LiveServer
from tests.support.servers.talkers import talker

HELLO = [{"role": "user", "content": "hello"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "oracle", "messages": HELLO, "max_tokens": 12, "temperature": 0.0, **more}


def prompt(text: Any = "the cat", **more: Any) -> dict[str, Any]:
    return {"model": "oracle", "prompt": text, "max_tokens": 12, "temperature": 0.0, **more}


@pytest.fixture
def sdk(here: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("seed", range(6))
def test_a_streamed_chat_says_what_a_whole_one_says(sdk: openai.OpenAI, seed: int) -> None:
    asked: Any = {"model": "oracle", "messages": [{"role": "user", "content": f"question {seed}"}], "max_tokens": 60,
                  "seed": seed, "n": 2, "stop": ["zz", "q"]}  # fmt: skip
    whole = sdk.chat.completions.create(**asked)
    texts, reasons = ["", ""], ["", ""]
    for chunk in sdk.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_a_chat_is_what_the_engine_says_in_process(sdk: openai.OpenAI) -> None:
    with LLM(talker()) as llm:
        (expected,) = llm.chat(HELLO, SamplingParams(max_tokens=12, temperature=0.0))
    got = sdk.chat.completions.create(**body())
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(expected.prompt_token_ids), 12)
    assert got.id.startswith("chatcmpl-")
    assert got.object == "chat.completion"


def test_a_completion_is_what_the_engine_says_in_process(sdk: openai.OpenAI) -> None:
    with LLM(talker()) as llm:
        expected = llm.generate("the cat", SamplingParams(max_tokens=12, temperature=0.0))[0].text
    assert sdk.completions.create(**prompt()).choices[0].text == expected
    chunks = sdk.completions.create(**prompt(), stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_cached_tokens_are_always_told(here: LiveServer) -> None:
    unseen = prompt(list(range(60, 100)))
    cold, warm = (here.post("/v1/completions", unseen).json["usage"] for _ in range(2))
    assert cold["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 40}
    assert warm["prompt_tokens_details"] == {"cached_tokens": 36, "cache_write_tokens": 0}
    assert warm["prompt_tokens"] == 40
    assert warm["total_tokens"] == 52


def test_usage_comes_last_in_a_stream_and_is_null_before(here: LiveServer) -> None:
    events = here.post("/v1/chat/completions", body(stream=True, stream_options={"include_usage": True})).events
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


def test_without_stream_options_no_usage_is_sent(here: LiveServer) -> None:
    events = here.post("/v1/chat/completions", body(stream=True)).events
    assert not any("usage" in event for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_usage_can_come_with_every_chunk(here: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = here.post("/v1/completions", prompt(stream=True, stream_options=options)).events
    assert all(event["usage"]["prompt_tokens"] == 2 for event in events)


def test_chat_logprobs_have_one_entry_for_each_token(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**body(), logprobs=True, top_logprobs=3)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert joined.decode("utf-8", "replace").startswith((whole.choices[0].message.content or "")[:5])
    streamed = [
        entry
        for chunk in sdk.chat.completions.create(**body(), logprobs=True, top_logprobs=3, stream=True)
        for entry in ((chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or [])
    ]
    assert [one.token for one in streamed] == [one.token for one in logprobs.content]


def test_completion_logprobs_are_parallel_arrays(here: LiveServer) -> None:
    told = here.post("/v1/completions", prompt(logprobs=2)).json["choices"][0]["logprobs"]
    assert {len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {12}
    assert told["text_offset"][:2] == [0, len(told["tokens"][0])]


def test_an_echo_repeats_the_prompt_with_its_logprobs(here: LiveServer) -> None:
    plain = here.post("/v1/completions", prompt()).json["choices"][0]["text"]
    whole = here.post("/v1/completions", prompt(echo=True, logprobs=1)).json["choices"][0]
    assert whole["text"].startswith("the cat")
    assert whole["logprobs"]["token_logprobs"][0] is None
    assert whole["logprobs"]["tokens"][:2] == ["the", " cat"]
    assert len(whole["logprobs"]["tokens"]) == 14
    assert here.post("/v1/completions", prompt(echo=True)).json["choices"][0]["text"] == "the cat" + plain
    assert here.post("/v1/completions", prompt(echo=True, stream=True)).text == "the cat" + plain


def test_a_prompt_can_be_scored_without_an_answer(here: LiveServer) -> None:
    whole = here.post("/v1/completions", prompt(echo=True, logprobs=1, max_tokens=0)).json
    assert whole["choices"][0]["text"] == "the cat"
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == 2
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    told = here.post("/v1/completions", prompt(prompt_logprobs=1, max_tokens=0)).json["choices"][0]
    assert (told["text"], len(told["prompt_logprobs"])) == ("", 2)


def test_a_prompt_can_be_echoed_and_nothing_else_is_computed(here: LiveServer) -> None:
    stats = here.opened["oracle"].engine.scheduler.stats
    before = stats.num_output_tokens
    asked = prompt(echo=True, max_tokens=0)
    assert here.post("/v1/completions", asked).json["choices"][0]["text"] == "the cat"
    assert here.post("/v1/completions", asked | {"stream": True}).text == "the cat"
    assert stats.num_output_tokens == before


def test_several_prompts_and_answers_are_numbered_through(here: LiveServer) -> None:
    asked = prompt(["the cat", "a dog"], n=2, temperature=1.0, seed=3)
    whole = here.post("/v1/completions", asked).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for event in here.post("/v1/completions", asked | {"stream": True}).events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]


def test_token_ids_may_be_given_and_asked_for(here: LiveServer) -> None:
    ids = here.post("/tokenize", {"model": "oracle", "prompt": "the cat", "add_special_tokens": False}).json["tokens"]
    by_text = here.post("/v1/completions", prompt(return_token_ids=True)).json["choices"][0]
    by_ids = here.post("/v1/completions", prompt(ids)).json["choices"][0]
    assert by_ids["text"] == by_text["text"]
    assert by_text["prompt_token_ids"] == ids
    assert len(by_text["token_ids"]) == 12
    assert here.post("/detokenize", {"model": "oracle", "tokens": ids}).json == {"prompt": "the cat"}


def test_tokens_may_be_named_by_number(here: LiveServer) -> None:
    told = here.post("/v1/completions", prompt(logprobs=0, return_tokens_as_token_ids=True)).json
    assert all(name.startswith("token_id:") for name in told["choices"][0]["logprobs"]["tokens"])


def test_prompt_logprobs_have_ranks(here: LiveServer) -> None:
    told = here.post("/v1/chat/completions", body(prompt_logprobs=1)).json
    assert told["prompt_logprobs"][0] is None
    assert len(told["prompt_logprobs"]) == told["usage"]["prompt_tokens"]
    assert all(entry["rank"] == 1 for one in told["prompt_logprobs"][1:] for entry in one.values())


def test_a_stop_text_ends_an_answer_and_is_named(here: LiveServer) -> None:
    whole = here.post("/v1/completions", prompt(max_tokens=40)).json["choices"][0]["text"]
    stop = whole[20:22]
    cut = here.post("/v1/completions", prompt(max_tokens=40, stop=stop)).json["choices"][0]
    kept = here.post("/v1/completions", prompt(max_tokens=40, stop=[stop], include_stop_str_in_output=True)).json
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["text"] == whole[: whole.index(stop)]
    assert kept["choices"][0]["text"] == cut["text"] + stop


def test_a_seed_gives_the_same_answer_and_another_another(here: LiveServer) -> None:
    texts = [here.post("/v1/completions", prompt(temperature=1.0, seed=seed)).json["choices"][0]["text"]
             for seed in (7, 7, 8)]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("extra", [
    {"top_k": 4}, {"top_k": -1}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5}, {"logit_bias": {"40": 5}}, {"min_tokens": 3}, {"ignore_eos": True},
    {"stop_token_ids": [5]}, {"allowed_token_ids": [40, 41]}, {"skip_special_tokens": False}, {"user": "me"},
    {"service_tier": "auto"}, {"metadata": {"a": "b"}}, {"store": True}, {"response_format": {"type": "text"}},
    {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"parallel_tool_calls": True}, {"nobody_knows": [1]},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"cache_salt": "x"}, {"reasoning_effort": "low"},
    {"stream_options": None}, {"n": None}, {"max_completion_tokens": 12}, {"max_tokens": None, "stop_token_ids": []},
])  # fmt: skip
def test_what_clients_send_beside_the_essential_is_taken(here: LiveServer, extra: dict[str, Any]) -> None:
    reply = here.post("/v1/chat/completions", body(**extra))
    assert reply.status == 200, reply.data
    assert reply.json["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("extra", [
    {"use_beam_search": True}, {"bad_words": ["x"]}, {"function_call": "auto"},
    {"chat_template": "x"}, {"truncate_prompt_tokens": 5}, {"functions": [{}]}, {"modalities": ["audio"]},
    {"suffix": "x"}, {"prompt_embeds": "AAAA"}, {"length_penalty": 2},
])  # fmt: skip
def test_what_is_not_built_is_refused_and_never_ignored(here: LiveServer, extra: dict[str, Any]) -> None:
    reply = here.post("/v1/chat/completions", body(**extra))
    assert (reply.status, reply.code) == (400, "unsupported_parameter")
    assert reply.json["error"]["param"] == next(iter(extra))


def test_models_are_listed_and_routed_by_name(here: LiveServer) -> None:
    assert [card["id"] for card in here.get("/v1/models").json["data"]] == ["oracle", "other"]
    assert here.get("/v1/models/other").json["max_model_len"] == 512
    assert here.post("/v1/completions", prompt() | {"model": "other"}).json["model"] == "other"
    unknown = here.post("/v1/completions", prompt() | {"model": "gpt-9"})
    assert (unknown.status, unknown.code) == (404, "model_not_found")
    unnamed = here.post("/v1/completions", {"prompt": "x"})
    assert (unnamed.status, unnamed.json["error"]["param"]) == (400, "model")


def test_a_conversation_is_tokenised_as_the_template_writes_it(here: LiveServer) -> None:
    told = here.post("/tokenize", {"model": "oracle", "messages": HELLO, "return_token_strs": True}).json
    assert "".join(told["token_strs"]) == "<user>hello\n<assistant>"
    assert told["count"] == len(told["tokens"])
    assert here.post("/tokenize", {"model": "oracle"}).status == 400


def test_what_does_not_fit_is_refused_and_not_shortened(sdk: openai.OpenAI) -> None:
    for asked in (prompt("word " * 300), prompt(max_tokens=511), prompt([40] * 600), prompt("x" * 5000)):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.completions.create(**asked)
        assert refused.value.code == "context_length_exceeded"


def test_the_sdk_meets_its_own_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nobody")
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(**body(temperature=-1))
    assert refused.value.param == "temperature"
    assert sdk.models.retrieve("oracle").id == "oracle"


def test_a_clients_request_id_is_echoed_if_it_is_harmless(here: LiveServer) -> None:
    assert here.get("/v1/models", x_request_id="my-id.1_A").headers["x-request-id"] == "my-id.1_A"
    for hostile in ("a" * 129, "<script>", "a b", ""):
        assert here.get("/v1/models", x_request_id=hostile).headers["x-request-id"].startswith("req-")
    first = here.post("/v1/completions", prompt(request_id="same"))
    second = here.post("/v1/completions", prompt(request_id="same"))
    assert first.json["id"] != second.json["id"]


def test_many_at_once_get_what_each_gets_alone(here: LiveServer) -> None:
    asks = [prompt(f"question {at}", seed=at, temperature=1.0, max_tokens=30) for at in range(40)]
    alone = [here.post("/v1/completions", one).json["choices"][0]["text"] for one in asks]

    async def together() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none")

        async def one(asked: Any) -> str:
            return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**asked)])

        async with client:
            return list(await asyncio.gather(*(one(asked | {"stream": True}) for asked in asks)))

    assert asyncio.run(together()) == alone


def test_a_large_answer_is_worded_beside_the_loop(here: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    really = ChatWriter.whole

    def spy(writer: ChatWriter, replies: Sequence[Reply]) -> bytes:
        threads.append(threading.current_thread().name)
        return really(writer, replies)

    monkeypatch.setattr(ChatWriter, "whole", spy)
    small = here.post("/v1/chat/completions", body(logprobs=True, top_logprobs=2, ignore_eos=True)).json
    large = here.post("/v1/chat/completions", body(logprobs=True, top_logprobs=20, n=4, ignore_eos=True)).json
    assert threads[0] == "house"
    assert threads[1] != "house"
    tokens = [[entry["token"] for entry in one["choices"][0]["logprobs"]["content"]] for one in (small, large)]
    assert len(tokens[0]) == len(tokens[1]) == 12
    streamed = here.post("/v1/chat/completions", body(logprobs=True, top_logprobs=20, n=4, stream=True, seed=1)).events
    assert {choice["index"] for event in streamed for choice in event["choices"]} == {0, 1, 2, 3}
    many = [40, 41] * 50_000
    assert here.post("/detokenize", {"model": "oracle", "tokens": many}).json["prompt"] == "IJ" * 50_000


def test_the_description_names_every_route_and_body(here: LiveServer) -> None:
    schema = here.get("/openapi.json").json
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health"} <= set(schema["paths"])
    assert "messages" in schema["components"]["schemas"]["ChatFields"]["properties"]
    refs = json.dumps(schema).split('"#/components/schemas/')[1:]
    assert {ref.partition('"')[0] for ref in refs} <= set(schema["components"]["schemas"])


def test_a_message_that_is_shaped_wrongly_is_the_clients_mistake(here: LiveServer) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": 5}
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = here.post(path, {"model": "oracle", "messages": [message], "max_tokens": 2})
        assert (reply.status, "tool_calls to be a list" in reply.json["error"]["message"]) == (400, True)


def test_a_path_that_is_no_text_is_no_mistake_of_ours(here: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", here.port)) as wire:
        wire.sendall(b"GET /nope?\xff\xfe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert wire.recv(1 << 16)[9:12] in (b"400", b"404")


def test_a_request_that_leaves_no_token_to_choose_is_the_clients_mistake() -> None:
    reply: Any = SimpleNamespace(work_error=None)
    with pytest.raises(ApiError) as refused:
        answering.check_finish(
            Piece(0, "", finish_reason="error", error="none is left", error_code=UNSATISFIABLE), reply
        )
    assert (refused.value.status, "contradicts itself" in refused.value.message) == (400, True)
