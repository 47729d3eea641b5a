"""Histories with broken calls: nothing of them is lost, and templates of every strictness accept them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.client.request.conversation import ToolUse, chat_prompt, tools_of
from quire.client.request.text_model import TextModel
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.chat.written_calls import forms
from tests.support.servers.talkers import AGENT_TEMPLATE, talker
from tests.support.servers.tool_formats import USER, Message, call, calling, result

IDS = st.sampled_from(["c1", "c2", "c3", "", None])
ARGUMENTS = st.sampled_from(['{"a": 1}', "{}", '{"a": "cut', "[1]", "7", "", None, "text"])
CALLS = st.builds(call, ARGUMENTS, IDS, st.sampled_from(["paint", "", None])) | st.sampled_from(
    [{}, {"id": "c1"}, {"id": "c1", "function": "paint"}, None, "paint"]
)
MESSAGES = st.one_of(
    st.just(USER),
    st.builds(result, st.sampled_from(["red", "blue"]), IDS),
    st.builds(lambda calls: calling(*calls), st.lists(CALLS, max_size=3)),
)
HISTORIES = st.lists(MESSAGES, min_size=1, max_size=8)


def texts_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The arguments and results, as a model reads them."""
    found = [message["content"].split("\n")[1] for message in messages if "<tool_response>" in message["content"]]
    found += [message["content"] for message in messages if message["role"] == "tool"]
    for message in messages:
        found += [part.split("\n")[1] for part in message["content"].split("<tool_call>")[1:]]
        for each in message.get("tool_calls", ()):
            arguments = each["function"]["arguments"] or "{}"
            found.append(json.dumps({"name": each["function"]["name"], "arguments": json.loads(arguments)}))
    return sorted(found)


@given(HISTORIES)
def test_calls_and_results_are_whole_pairs_or_text_and_none_is_lost(history: list[Message]) -> None:
    _, broken_as_text, all_as_text = forms(history)
    second, third = [message for _, message in broken_as_text], [message for _, message in all_as_text]
    assert [index for index, _ in broken_as_text] == [*range(len(history))]
    for index, message in enumerate(second):
        if message["role"] == "tool":
            before = next(one for one in reversed(second[:index]) if one["role"] != "tool")
            assert before.get("tool_calls"), "a result follows a call"
        for one in message.get("tool_calls", ()):
            assert isinstance(json.loads(one["function"]["arguments"] or "{}"), dict)
    assert not any(message["role"] == "tool" or message.get("tool_calls") for message in third)
    assert all(one["role"] != other["role"] for one, other in pairwise(third))
    num_calls = sum(len(message.get("tool_calls", ())) for message in history)
    assert len(texts_in(second)) == num_calls + sum(message["role"] == "tool" for message in history)
    text = "\n".join(message["content"] for message in third)
    assert text.count("<tool_call>") == num_calls
    assert text.count("<tool_response>") == sum(message["role"] == "tool" for message in history)


@given(st.lists(st.sampled_from(["one", "two", "no call"]), max_size=5))
def test_a_history_without_a_fault_is_left_as_it_is(turns: list[str]) -> None:
    history: list[Message] = [USER]
    for turn in turns:
        ids = {"one": ["c1"], "two": ["c1", "c2"], "no call": []}[turn]
        history += [calling(*(call(call_id=call_id) for call_id in ids)), *(result(call_id=one) for one in ids), USER]
    _, broken_as_text, _ = forms([*history, calling(call())])
    assert [message for _, message in broken_as_text] == [*history, calling(call())]


RAISES = "{{ raise_exception('no') }}"
STRICT = {
    "walks arguments": AGENT_TEMPLATE.replace(
        "{{ c.function.arguments | tojson }}",
        "{% for k, v in c.function.arguments | items %}{% endfor %}{{ c.function.arguments | tojson }}",
    ),
    "one call at a time": AGENT_TEMPLATE.replace(
        "{% for c in", "{% if m.tool_calls | length > 1 %}" + RAISES + "{% endif %}{% for c in"
    ),
    "results follow calls": AGENT_TEMPLATE.replace(
        "<{{ m.role }}>",
        "{% if m.role == 'tool' and (loop.first or messages[loop.index0 - 1].role not in ['assistant', 'tool']) %}"
        + RAISES
        + "{% endif %}<{{ m.role }}>",
    ),
    "turns of user and assistant": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + RAISES
    + "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
}


@pytest.fixture(scope="module", params=STRICT)
def strict(request: pytest.FixtureRequest) -> Iterator[TextModel]:
    opened = talker(512, max_sequence_tokens=2048)
    template = ChatTemplate(STRICT[request.param], {})
    yield TextModel("m", opened.engine.info, opened.text.tokenizer, template, opened.text.eos_token_ids, {})
    template.close()


BROKEN: dict[str, list[Message]] = {
    "arguments that were cut": [USER, calling(call('{"path": "a')), result("Unterminated string"), USER],
    "arguments that are a list": [USER, calling(call('["a"]')), result(), USER],
    "arguments that are missing": [USER, calling(call(None)), result(), USER],
    "a call without a function": [USER, calling({"id": "c1", "type": "function"}), result(), USER],
    "a call without a name": [USER, calling(call(name=None)), result(), USER],
    "a result without its call": [USER, result(), USER],
    "a result at the beginning": [result(), USER],
    "a result of another call": [USER, calling(call()), result(call_id="other"), USER],
    "two results of one call": [USER, calling(call()), result(), result(), USER],
    "a call without its result": [USER, calling(call()), USER],
    "two calls and one result": [USER, calling(call(), call(call_id="c2")), result(), USER],
    "a call that ends the history": [USER, calling(call('{"path'))],
}


@pytest.mark.parametrize("name", BROKEN)
def test_templates_of_every_strictness_accept_a_broken_history(strict: TextModel, name: str) -> None:
    history = BROKEN[name]
    tools = tools_of([{"type": "function", "function": {"name": "paint"}}]) if strict.formats().tools else []
    prompt = chat_prompt(strict, history, ToolUse(tools))
    text = strict.tokenizer.decode(prompt.ids, skip_special_tokens=False)
    for message in history:
        assert message["content"] in text
    assert "cut" not in name or '"path": "a' in text.replace("\\", "")
