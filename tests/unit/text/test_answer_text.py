"""Detokenised and cut at stop strings, both at once."""

from quire.text.detokenizer import AnswerText
from tests.support.models.small_tokenizers import byte_level


def push_all(answer: AnswerText, text: str) -> list[tuple[str, str | None]]:
    """What may be sent after each token and at the end, and the stop that was found by then."""
    ids = byte_level().encode(text, add_special_tokens=False)
    return [*((answer.push(one), answer.stop) for one in ids), (answer.finish(), answer.stop)]


def test_the_token_that_completes_a_stop_carries_it() -> None:
    deltas = push_all(AnswerText(byte_level(), (), ("👍",)), "ab👍cd")
    assert "".join(text for text, _ in deltas) == "ab"
    num_before = len(byte_level().encode("ab👍", add_special_tokens=False)) - 1
    assert [stop for _, stop in deltas] == [None] * num_before + ["👍"] * (len(deltas) - num_before)


def test_the_stop_string_is_sent_only_when_asked_for() -> None:
    deltas = push_all(AnswerText(byte_level(), (), ("b",), include_stop=True), "abc")
    assert "".join(text for text, _ in deltas) == "ab"


def test_what_was_held_back_comes_with_the_end() -> None:
    deltas = push_all(AnswerText(byte_level(), (), ("xyz",)), "axy")
    assert deltas[-1] == ("xy", None)


def test_the_end_itself_may_complete_a_stop() -> None:
    answer = AnswerText(byte_level(), (), ("a\ufffd",))
    for token_id in byte_level().encode("xaÿ", add_special_tokens=False)[:-1]:
        answer.push(token_id)
    assert (answer.stop, answer.finish(), answer.stop) == (None, "", "a\ufffd")
    assert answer.finish() == ""


def test_special_tokens_are_shown_when_asked_for() -> None:
    ids = byte_level().encode("<|im_end|>", add_special_tokens=False)
    assert AnswerText(byte_level(), (), ("stop",), skip_special_tokens=False).push(ids[0]) == "<|im_end|>"
