"""Detokenised and cut at stop strings, both at once."""

from quire.text.answer_text import AnswerText
from quire.text.stop_strings import Delta
from tests.support.small_tokenizers import byte_level


def push_all(answer: AnswerText, text: str) -> list[Delta]:
    ids = byte_level().encode(text, add_special_tokens=False)
    return [*map(answer.push, ids), answer.finish()]


def test_the_token_that_completes_a_stop_carries_it() -> None:
    deltas = push_all(AnswerText(byte_level(), (), ("👍",)), "ab👍cd")
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [delta.stop for delta in deltas if delta.stop] == ["👍"]


def test_the_stop_string_is_sent_only_when_asked_for() -> None:
    deltas = push_all(AnswerText(byte_level(), (), ("b",), include_stop=True), "abc")
    assert "".join(delta.text for delta in deltas) == "ab"


def test_what_was_held_back_comes_with_the_end() -> None:
    deltas = push_all(AnswerText(byte_level(), (), ("xyz",)), "axy")
    assert deltas[-1] == Delta("xy")


def test_the_end_itself_may_complete_a_stop() -> None:
    answer = AnswerText(byte_level(), (), ("a\ufffd",))
    for token_id in byte_level().encode("xaÿ", add_special_tokens=False)[:-1]:
        answer.push(token_id)
    assert answer.finish() == Delta("", "a\ufffd")
    assert answer.finish() == Delta("")


def test_special_tokens_are_shown_when_asked_for() -> None:
    ids = byte_level().encode("<|im_end|>", add_special_tokens=False)
    assert AnswerText(byte_level(), (), skip_special_tokens=False).push(ids[0]) == Delta("<|im_end|>")
