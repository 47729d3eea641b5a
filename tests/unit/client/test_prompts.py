"""Prompts and conversations to token ids: what is refused, and before which work."""

from collections.abc import Iterator
from typing import Any

import pytest

from quire.client.request.text_model import MAX_BYTES_PER_TOKEN, MAX_CONVERSATION_FACTOR, TextModel
from quire.errors import InvalidParameterError, InvalidTextError, RequestTooLargeError
from quire.text.chat.rendering.template import ChatTemplate, TemplateArguments
from quire.text.tokenizer import Tokenizer
from tests.support.errors import raises_code
from tests.support.models.small_tokenizers import byte_level, id_of
from tests.support.servers.talkers import model_info

LONGEST = 100
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model() -> Iterator[TextModel]:
    tokenizer = Tokenizer(byte_level().library, MAX_BYTES_PER_TOKEN * LONGEST, LONGEST)
    info = model_info(tokenizer.vocabulary_size, LONGEST)
    made = TextModel("chatml", info, tokenizer, ChatTemplate(CHATML, {}), frozenset({0}), {})
    yield made
    made.close()


@pytest.mark.parametrize("ids", [[1, True], [1, 1.0], [1, "1"], [1, None], [-1], [10**6], [2**70], [0, -(2**70)]])
def test_ids_that_are_no_rows_of_the_model_are_refused(model: TextModel, ids: list[Any]) -> None:
    with raises_code(InvalidParameterError, "invalid_token_ids"):
        model.prompt(ids)


def test_ids_are_taken_as_they_are(model: TextModel) -> None:
    assert model.prompt((0, 5, 0)) == [0, 5, 0]
    assert model.prompt([5] * LONGEST) == [5] * LONGEST


def test_nothing_and_too_much_are_refused(model: TextModel) -> None:
    prompts: tuple[list[int] | str, ...] = ([], "")
    for prompt in prompts:
        with raises_code(RequestTooLargeError, "empty_prompt"):
            model.prompt(prompt)
    with raises_code(RequestTooLargeError, "too_many_token_ids"):
        model.prompt([5] * 101)
    with raises_code(RequestTooLargeError, "too_many_tokens"):
        model.prompt("!?" * 60)
    with raises_code(RequestTooLargeError, "text_too_long"):
        model.prompt("é" * 401)


def test_a_tokenizer_may_know_more_than_the_model_has_rows_for() -> None:
    few = TextModel("few", model_info(10, LONGEST), Tokenizer(byte_level().library, 100), None, frozenset({0}), {})
    with raises_code(InvalidParameterError, "invalid_token_ids"):
        few.prompt("<|im_end|>")


def test_a_conversation_that_could_not_fit_is_not_rendered(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(ChatTemplate, "render", never)
    huge = "x" * (MAX_CONVERSATION_FACTOR * MAX_BYTES_PER_TOKEN * LONGEST)
    for arguments in ({"tools": [{huge: 1}]}, {"documents": [{"text": [huge]}]}, {"extra": {"date_string": huge}}):
        with raises_code(RequestTooLargeError, "conversation_too_long"):
            model.chat([{"role": "user", "content": "x"}], TemplateArguments(**arguments))
    with raises_code(RequestTooLargeError, "conversation_too_long"):
        model.chat([{"role": "user", "content": "é" * 800}, {"role": "user", "content": "é" * 801}])


def test_a_message_that_is_continued_ends_in_the_clients_text(model: TextModel) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat<|im_end|> on"}]
    ids = model.chat(messages, TemplateArguments(continue_final_message=True))
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|> on"
    assert byte_level().decode(ids, skip_special_tokens=False) == text
    end, begin = (id_of(byte_level(), name) for name in ("<|im_end|>", "<|im_start|>"))
    assert [one for one in ids if one in (end, begin)] == [begin, end, begin]


@pytest.mark.parametrize("role", ["end", "im_end|>", "System", "user ", "критик", "x" * 1000])
def test_roles_are_names_of_a_list(model: TextModel, role: str) -> None:
    with raises_code(InvalidTextError, "unknown_role") as refused:
        model.chat([{"role": "user", "content": "x"}, {"role": role, "content": "x"}])
    assert len(str(refused.value)) < 400
