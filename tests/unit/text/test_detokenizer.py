"""What comes out token by token. That it is right for any tokens at all is in `property/test_text.py`."""

import pytest

from quire.text.detokenizer import Detokenizer
from quire.text.token_bytes import TokenTable
from quire.text.tokenizer import Tokenizer
from tests.support.core.text_at_once import text_at_once
from tests.support.models.small_tokenizers import ALL, byte_level, id_of, sentencepiece


def byte_ids(tokenizer: Tokenizer, some_bytes: bytes) -> list[int]:
    known = {tokenizer.token_bytes(one): one for one in range(300)}
    return [known[bytes([byte])] for byte in some_bytes]


def deltas(tokenizer: Tokenizer, prompt: bytes, answer: bytes) -> list[str]:
    detokenizer = Detokenizer(tokenizer, byte_ids(tokenizer, prompt))
    return [*map(detokenizer.push, byte_ids(tokenizer, answer)), detokenizer.finish()]


def test_a_character_comes_out_whole_with_its_last_byte() -> None:
    assert deltas(byte_level(), b"", "a👍b".encode()) == ["a", "", "", "", "👍", "b", ""]


def test_an_answer_that_ends_inside_a_character_ends_with_one_replacement() -> None:
    assert deltas(byte_level(), b"", b"a\xf0\x9f\x91") == ["a", "", "", "", "\ufffd"]


def test_a_byte_that_can_begin_nothing_is_replaced_at_once() -> None:
    assert deltas(byte_level(), b"", b"\xff\xc0a") == ["\ufffd", "\ufffd", "a", ""]


def test_a_character_begun_by_the_prompt_and_completed_by_the_answer_belongs_to_the_answer() -> None:
    assert deltas(byte_level(), b"hello \xf0\x9f", b"\x91\x8d!") == ["", "👍", "!", ""]


@pytest.mark.parametrize("answer", [b"", b"!", b"\x91!", b"\xf0\x9f\x91\x8d"])
def test_half_a_character_that_stays_half_is_the_prompts_and_not_shown_again(answer: bytes) -> None:
    shown = "".join(deltas(byte_level(), b"hello \xf0\x9f", answer))
    assert shown == answer.decode("utf-8", "ignore")


def test_a_surrogate_begun_in_the_prompt_shows_nothing_in_the_answer() -> None:
    assert "".join(deltas(byte_level(), b"\xed\xa0", b"!")) == "!"


def test_an_answer_keeps_its_first_space_behind_a_prompt_and_loses_it_behind_nothing() -> None:
    tokenizer = sentencepiece()
    the, start = id_of(tokenizer, "▁the"), id_of(tokenizer, "<s>")
    for prompt_ids, text in ((), "the"), ((start,), "the"), ((the,), " the"), ((start, the), " the"):
        assert Detokenizer(tokenizer, prompt_ids).push(the) == text
        assert text_at_once(tokenizer, prompt_ids, [the]) == text


def test_a_lone_space_at_the_start_is_dropped_once() -> None:
    tokenizer = sentencepiece()
    space, the = id_of(tokenizer, "▁"), id_of(tokenizer, "▁the")
    detokenizer = Detokenizer(tokenizer, ())
    assert [detokenizer.push(space), detokenizer.push(the)] == ["", " the"]


def test_special_tokens_interrupt_no_character_unless_they_are_shown() -> None:
    tokenizer = byte_level()
    first, *rest = byte_ids(tokenizer, "é".encode())
    end = id_of(tokenizer, "<|im_end|>")
    ids = [first, end, 10**9, *rest]
    for is_hidden, text in ((True, "é"), (False, "\ufffd<|im_end|>\ufffd")):
        detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=is_hidden)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text
        assert text_at_once(tokenizer, (), ids, skip_special_tokens=is_hidden) == text


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("some_bytes", [b"\xff", b"\x80", b"\xf0\x9f\x91", "👍".encode(), b"\xed\xa0"])
def test_twenty_thousand_tokens_cost_as_much_each_as_one(
    kind: str, some_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ALL[kind]()
    ids = (byte_ids(tokenizer, some_bytes) * 20_000)[:20_000]
    asked: list[int] = []

    class Counted(TokenTable):
        def __getitem__(self, token_id: int) -> bytes:
            asked.append(token_id)
            return super().__getitem__(token_id)

    for name in ("in_text", "at_start"):
        monkeypatch.setattr(tokenizer.bytes, name, Counted(getattr(tokenizer.bytes, name).__getitem__))
    detokenizer = Detokenizer(tokenizer, ids)
    assert len(asked) <= 3
    asked.clear()
    streamed = ""
    for token_id in ids:
        streamed += detokenizer.push(token_id)
        assert len(detokenizer._decoder.getstate()[0]) <= 3
    assert len(asked) <= len(ids) + 1
    assert streamed + detokenizer.finish() == text_at_once(tokenizer, ids, ids)
