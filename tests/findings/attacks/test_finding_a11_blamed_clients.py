"""Refusals that blame a template, or a client, for what is not theirs; and one that quotes twice."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.conversation_store import ConversationStore
from quire.errors import CapacityError, RequestError
from quire.text.chat.rendering.template import ChatTemplate
from tests.api.dialects.test_tools import tool_talker
from tests.support.errors import raises_code
from tests.support.machine.sandboxed import free_helpers
from tests.support.servers.local_api import house

CALLS = "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
SIMPLE = "{{ messages[0].content }}"


def nested(depth: int) -> list[dict[str, Any]]:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": value}}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize("depth", [300, 500, 700, 850, 960])
def test_arguments_that_are_nested_deep_are_refused_by_what_they_are(depth: int) -> None:
    """Failed: "no prompt came of it: Broken(message='the chat template does not compile: maximum recursion …')"."""
    template = ChatTemplate(CALLS, {})
    told = ""
    try:
        told = template.render(nested(depth)).text
    except RequestError as error:
        told = str(error)
    assert told.count("[") >= depth or ("nested too deep" in told and "fewer levels" in told), told
    assert depth > 300 or "nested" not in told
    template.close()


def test_a_renderer_that_is_held_up_is_the_servers_trouble_and_not_the_clients() -> None:
    """Failed: TemplateError, a chat template may take 2 s … send fewer or shorter messages, as 400."""
    template = ChatTemplate(SIMPLE, {})
    (helper,) = free_helpers(template)
    os.kill(helper.pid, signal.SIGSTOP)
    with raises_code(CapacityError, "renderer_starved"):
        template.render([{"role": "user", "content": "hello"}])
    assert template.render([{"role": "user", "content": "hello"}]).text == "hello"
    template.close()


def test_a_response_that_is_not_found_is_quoted_once(tmp_path: Path) -> None:
    """Failed: Previous response with id ''resp_nothing'' not found."""
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    with house(models={"oracle": tool_talker()}, settings=AdmissionSettings(store=store)) as here:
        reply = here.post("/v1/responses", {"model": "oracle", "input": "x", "previous_response_id": "resp_nothing"})
    store.close()
    assert (reply.status, reply.json["error"]["code"]) == (400, "previous_response_not_found")
    assert "with id 'resp_nothing' not found" in reply.json["error"]["message"]
