"""Streamed or at once, the same text: for any tokens, any prompt, any stop strings. The proof runs more of the same."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.detokenizer import Detokenizer
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer
from tests.support.core.text_at_once import text_at_once
from tests.support.models.small_tokenizers import ALL, byte_level, sentencepiece
from tests.support.models.texts import (
    WORDS,
    check_texts,
    cut_at_stop,
    held_back,
    wrong_border,
    wrong_deltas,
    wrong_stop,
)

KINDS = pytest.mark.parametrize("kind", ALL)

token_ids = st.lists(st.integers(-2, 400) | st.sampled_from([2**31, 2**63]), max_size=30)
texts = st.text(max_size=30) | st.lists(st.sampled_from([word for words in WORDS.values() for word in words])).map(
    "".join
)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@KINDS
@given(prompt_ids=token_ids, answer_ids=token_ids, num_early=st.integers(0, 30))
def test_deltas_joined_are_the_text_at_once_for_any_ids(
    kind: str, prompt_ids: list[int], answer_ids: list[int], num_early: int
) -> None:
    assert wrong_deltas(ALL[kind](), prompt_ids, answer_ids, num_early) == []


@KINDS
@given(text=texts, border=st.integers(0, 60), num_early=st.integers(0, 60))
def test_deltas_of_real_text_are_what_the_library_decodes(kind: str, text: str, border: int, num_early: int) -> None:
    tokenizer = ALL[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert wrong_deltas(tokenizer, ids[:border], ids[border:], num_early) == []
    assert wrong_border(tokenizer, ids[:border], ids[border:]) == []


@given(text=texts)
def test_an_answer_to_nothing_reads_exactly_as_the_text_that_was_encoded(text: str) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "▁" not in text and "été" not in text:
            assert text_at_once(tokenizer, [], ids) == text


@KINDS
@given(data=st.data())
def test_stop_strings_cut_where_a_plain_search_of_the_whole_text_would(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    prompt_ids, answer_ids = data.draw(token_ids), data.draw(token_ids)
    text = text_at_once(tokenizer, prompt_ids, answer_ids)
    pieces = st.builds(lambda start, size: text[start : start + size] or "x", st.integers(0, 30), st.integers(1, 5))
    stops = data.draw(st.lists(pieces | st.text(min_size=1, max_size=2), max_size=4))
    assert wrong_stop(tokenizer, prompt_ids, answer_ids, stops, data.draw(st.booleans())) == []


@given(pieces=st.lists(st.text("ab", max_size=4), max_size=20), stops=stop_lists)
def test_what_is_held_back_is_just_what_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    searched, sent, seen = StopStrings(stops), "", ""
    for piece in pieces:
        delta = searched.push(piece)
        sent, seen = sent + delta.text, seen + piece
        text, stop = cut_at_stop(seen, stops)
        assert delta.stop == stop
        assert sent == (text if stop else text[: len(text) - held_back(text, stops)])
        if stop:
            break
    whole, stop = cut_at_stop(seen, stops)
    assert sent + searched.flush() == whole


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """For each byte, the id of a token that is this byte alone."""
    return {tokenizer.token_bytes(one)[0]: one for one in range(400) if len(tokenizer.token_bytes(one)) == 1}


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_every_short_string_of_telling_bytes_streams_right_behind_every_prompt(kind: str) -> None:
    tokenizer = ALL[kind]()
    id_of = byte_tokens(tokenizer)
    telling = [0x20, 0x41, 0x80, 0xA0, 0xBF, 0xC3, 0xE0, 0xED, 0xF0, 0x90, 0xF4]
    for size in range(5):
        for some_bytes in product(telling, repeat=size):
            ids = [id_of[byte] for byte in some_bytes]
            for border in range(size + 1):
                detokenizer = Detokenizer(tokenizer, ids[:border])
                streamed = "".join(map(detokenizer.push, ids[border:])) + detokenizer.finish()
                assert streamed == text_at_once(tokenizer, ids[:border], ids[border:]), (some_bytes, border)


@KINDS
def test_no_case_of_the_proof_is_wrong(kind: str) -> None:
    assert check_texts(ALL[kind](), count=500, seed=7) == []
