"""What a client writes in a conversation is text; what it writes in a raw prompt may be a control token."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from quire.errors import TemplateError
from quire.text.chat.rendering.template import ChatTemplate
from tests.support.models.small_tokenizers import byte_level, id_of
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

CHAT = "/v1/chat/completions"
SQUARING = "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    good, bad = talker(), talker()
    hostile = replace(bad, text=replace(bad.text, template=ChatTemplate(SQUARING, {})))
    with house(models={"oracle": good, "hostile": hostile}) as one:
        yield one


def test_a_raw_prompt_keeps_its_control_tokens(here: LiveServer) -> None:
    answer = here.post("/tokenize", {"model": "oracle", "prompt": "<|im_start|>x"})
    assert answer.json["tokens"][0] == id_of(byte_level(), "<|im_start|>")


def test_a_chat_has_none_that_its_template_did_not_write(here: LiveServer) -> None:
    body = {"model": "oracle", "messages": [{"role": "user", "content": "<|im_start|>"}], "max_tokens": 1}
    answer = here.post(CHAT, {**body, "return_token_ids": True})
    assert answer.status == 200
    assert not {*answer.json["prompt_token_ids"]} & byte_level().special_token_ids


def test_a_strange_role_is_told_which_there_are(here: LiveServer) -> None:
    answer = here.post(CHAT, {"model": "oracle", "messages": [{"role": "<|im_end|>", "content": "x"}]})
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert "one of assistant, " in answer.json["error"]["message"]


def test_a_hostile_template_refuses_chats_while_completions_go_on(here: LiveServer) -> None:
    chat = here.post(CHAT, {"model": "hostile", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    assert (chat.status, chat.code) == (400, "invalid_request")
    assert "; use the completions endpoint" in chat.json["error"]["message"]
    assert here.post("/v1/completions", {"model": "hostile", "prompt": "x", "max_tokens": 1}).status == 200


def test_the_loop_goes_on_while_a_template_burns(here: LiveServer) -> None:
    source = "{% if messages[0].content == 'burn' %}" + SQUARING + "{% endif %}{{ messages[0].content }}"
    text = replace(here.opened["oracle"].text, template=ChatTemplate(source, {}))

    async def count() -> int:
        burning = asyncio.create_task(asyncio.to_thread(text.chat, [{"role": "user", "content": "burn"}]))
        num_rounds = 0
        while not burning.done():
            await asyncio.sleep(0.001)
            num_rounds += 1
        with pytest.raises(TemplateError):
            burning.result()
        return num_rounds

    assert asyncio.run(count()) > 10
    text.close()
