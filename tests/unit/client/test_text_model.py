"""The same promises with the tokenizer and the template of a real model, SmolLM2."""

from functools import cache

import pytest

from benchmarks.test_model import smollm2_directory
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.detokenizer import AnswerText
from quire.text.tokenizer import Tokenizer
from tests.support.models.texts import WORDS, check_texts

pytestmark = pytest.mark.model


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_files(smollm2_directory() / "tokenizer.json", max_bytes=100_000)


def test_no_case_of_the_proof_is_wrong_with_a_real_tokenizer() -> None:
    assert check_texts(smollm2(), count=2000, seed=11) == []


@pytest.mark.parametrize("kind", WORDS)
def test_real_text_comes_back_as_it_went_in(kind: str) -> None:
    text = "".join(WORDS[kind]) * 3
    assert smollm2().decode(smollm2().encode(text, add_special_tokens=False)) == text


def test_a_rendered_chat_holds_the_special_tokens_and_hides_them_again() -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    prompt = ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])
    ids = smollm2().encode(prompt.text, add_special_tokens=False)
    assert {ids[0], ids[-1]} <= smollm2().special_token_ids
    assert smollm2().decode(ids) == "user\nHi"


def test_an_answer_stops_at_a_string_that_no_token_begins_with() -> None:
    answer = AnswerText(smollm2(), smollm2().encode("Count:", False), ("r fo",))
    deltas = [answer.push(token_id) for token_id in smollm2().encode(" one two three four five", False)]
    assert ("".join(deltas), answer.stop) == (" one two three four five", None)
    answer = AnswerText(smollm2(), smollm2().encode("Count:", False), ("e fo",))
    deltas = [answer.push(token_id) for token_id in smollm2().encode(" one two three four five", False)]
    assert ("".join(deltas), answer.stop) == (" one two thre", "e fo")
