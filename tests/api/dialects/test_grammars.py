"""Answers that must match something, in all the words that clients have for it."""

import json
import re
from typing import Any

import openai
import pytest

from tests.support.servers.local_api import LiveServer

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
GBNF = 'root ::= "x" [0-9] "y"'
LARK = 'start: "x" /[0-9]/ "y"'


def body(**more: Any) -> dict[str, Any]:
    return {"model": "oracle", "messages": HELLO, "max_tokens": 200, "temperature": 1.0, "seed": 5, **more}


def is_place(text: str) -> bool:
    return set(json.loads(text)) == {"city", "size"}


@pytest.mark.parametrize(("extra", "matches"), [
    ({"response_format": FORMAT}, is_place),
    ({"response_format": FORMAT, "stream": False, "logprobs": True}, is_place),
    ({"structured_outputs": {"json": SCHEMA}}, is_place),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_place),
    ({"guided_json": SCHEMA}, is_place),
    ({"structured_outputs": {"regex": "[ab]{3}/c"}}, re.compile("[ab]{3}/c").fullmatch),
    ({"guided_regex": "[ab]{3}"}, re.compile("[ab]{3}").fullmatch),
    ({"regex": "[ab]{3}"}, re.compile("[ab]{3}").fullmatch),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, ("yes", 'n"o').__contains__),
    ({"guided_choice": ["yes", "no"]}, ("yes", "no").__contains__),
    ({"choice": ["yes", "no"]}, ("yes", "no").__contains__),
    ({"structured_outputs": {"grammar": LARK}}, re.compile("x[0-9]y").fullmatch),
    ({"guided_grammar": GBNF}, re.compile("x[0-9]y").fullmatch),
    ({"grammar": GBNF}, re.compile("x[0-9]y").fullmatch),
])  # fmt: skip
def test_an_answer_matches_whatever_was_asked(here: LiveServer, extra: dict[str, Any], matches: Any) -> None:
    reply = here.post("/v1/chat/completions", body(**extra))
    assert reply.status == 200, reply.data
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert matches(choice["message"]["content"]), choice


@pytest.mark.parametrize(
    "extra", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_json_mode_begins_an_object_and_never_anything_else(here: LiveServer, extra: dict[str, Any]) -> None:
    text = here.post("/v1/chat/completions", body(**extra, max_tokens=3)).json["choices"][0]["message"]["content"]
    assert text.startswith("{")


def test_ways_of_saying_it_that_are_left_empty_say_nothing(here: LiveServer) -> None:
    empty = {"json": None, "json_object": False, "regex": None, "structural_tag": None}
    extra = {"structured_outputs": empty, "guided_json_object": False, "response_format": None, "regex": "[ab]{3}"}
    reply = here.post("/v1/chat/completions", body(**extra))
    assert re.fullmatch("[ab]{3}", reply.json["choices"][0]["message"]["content"])


def test_the_sdk_streams_what_it_asked_for(here: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as sdk:
        stream: Any = sdk.chat.completions.create(**body(response_format=FORMAT, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        completion = sdk.completions.create(
            model="oracle", prompt="the cat", max_tokens=200, extra_body={"structured_outputs": {"json": SCHEMA}}
        )
    assert is_place(text)
    assert is_place(completion.choices[0].text)


@pytest.mark.parametrize(("extra", "param", "sentence"), [
    ({"response_format": {"type": "xml"}}, "response_format", "expected response_format of type text"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema with a schema"),
    ({"response_format": "json"}, "response_format", "dictionary"),
    ({"structured_outputs": {"yaml": 1}}, "structured_outputs", "got 'yaml'"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": {"type": "objekt"}}, "grammar", "Invalid type: objekt"),
    ({"regex": "("}, "grammar", "cannot be used"),
    ({"grammar": "start: ("}, "grammar", "cannot be used"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format", "got bool"),
    ({"structured_outputs": {"json": False}}, "structured_outputs", "got bool"),
    ({"choice": []}, "choice", "1 to 10000 strings"),
    ({"regex": "a", "choice": ["b"]}, "choice", "one grammar"),
    ({"regex": "a", "min_tokens": 3}, "min_tokens", "expected no min_tokens with a grammar"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "expected no ignore_eos with a grammar"),
    ({"guided_json": {"enum": list(range(10_001))}}, "guided_json", "at most 10000 values"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_words(
    here: LiveServer, extra: dict[str, Any], param: str, sentence: str
) -> None:
    reply = here.post("/v1/chat/completions", body(**extra))
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.data
    assert sentence in reply.json["error"]["message"]
