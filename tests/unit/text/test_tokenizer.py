"""Text to ids and back: what is refused, and before any work is done."""

import threading
import time
from pathlib import Path

import pytest

from quire.errors import CheckpointError, ConfigError, InvalidTextError, RequestError, RequestTooLargeError
from quire.text.tokenizer import Tokenizer
from tests.support.errors import raises_code
from tests.support.models.small_tokenizers import byte_level, id_of, sentencepiece


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level().library.to_str())
    return path


def test_a_tokenizer_read_from_its_file_encodes_as_the_one_that_was_saved(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.from_files(tokenizer_file, max_bytes=50)
    ids = tokenizer.encode("the cat 👍", add_special_tokens=True)
    assert ids == byte_level().encode("the cat 👍", add_special_tokens=True)
    assert tokenizer.decode(ids) == "the cat 👍"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with raises_code(CheckpointError, "tokenizer_missing"):
        Tokenizer.from_files(tmp_path / "tokenizer.json", max_bytes=50)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with raises_code(CheckpointError, "invalid_tokenizer"):
        Tokenizer.from_files(path, max_bytes=50)


def test_a_limit_below_one_character_is_refused() -> None:
    with raises_code(ConfigError, "invalid_config"):
        Tokenizer(byte_level().library, max_bytes=0)


def test_a_text_is_measured_before_it_is_tokenised(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.from_files(tokenizer_file, max_bytes=5)
    assert tokenizer.decode(tokenizer.encode("👍a", add_special_tokens=False)) == "👍a"
    for text in ("aaaaaa", "👍👍"):
        with raises_code(RequestTooLargeError, "text_too_long"):
            tokenizer.encode(text, add_special_tokens=False)


def test_a_text_is_tokenised_no_further_than_one_token_past_the_most(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.from_files(tokenizer_file, max_bytes=1000, max_tokens=3)
    assert len(tokenizer.encode("!?!", add_special_tokens=False)) == 3
    assert len(tokenizer.encoder.encode("!?" * 400, add_special_tokens=False).ids) == 4
    with raises_code(RequestTooLargeError, "too_many_tokens"):
        tokenizer.encode("!?!?", add_special_tokens=False)


def test_limits_are_set_after_reading_and_the_first_tokenizer_keeps_its_own() -> None:
    first = Tokenizer(byte_level().library, max_bytes=2)
    other = first.limited(max_bytes=1000, max_tokens=3)
    assert len(other.encode("!?!", add_special_tokens=False)) == 3
    with raises_code(RequestTooLargeError, "too_many_tokens"):
        other.encode("!?!?", add_special_tokens=False)
    with raises_code(RequestTooLargeError, "text_too_long"):
        first.encode("!?!", add_special_tokens=False)
    assert other.bytes is first.bytes


def test_a_bound_on_one_tokenizer_is_no_bound_on_another_of_the_same_library() -> None:
    library = byte_level().library
    Tokenizer(library, 1000, max_tokens=2)
    assert len(Tokenizer(library, 1000).encode("!?!?", add_special_tokens=False)) == 4


@pytest.mark.parametrize("text", ["ab\ud800", "ab\udfffcd", "ab\udc4d\ud83d"])
def test_half_a_character_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(InvalidTextError, match="at position 2"):
        byte_level().encode(text, add_special_tokens=False)


def test_both_refusals_are_errors_of_the_request() -> None:
    assert issubclass(InvalidTextError, RequestError)
    assert issubclass(RequestTooLargeError, RequestError)


def test_a_file_that_asks_for_cuts_and_padding_is_not_obeyed(tmp_path: Path) -> None:
    library = type(byte_level().library).from_str(byte_level().library.to_str())
    library.enable_truncation(max_length=2)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_files(tmp_path / "tokenizer.json", max_bytes=50)
    assert tokenizer.encode("def main", False) == byte_level().encode("def main", False)


def test_encoding_gives_the_library_s_own_ids_and_lets_other_threads_run_meanwhile() -> None:
    library = byte_level().library
    tokenizer = Tokenizer(library, max_bytes=1 << 21)
    text = "the cat sat, \u00e9t\u00e9 \U0001f600 " * 40_000
    for add in (True, False):
        assert tokenizer.encode(text, add) == library.encode(text, add_special_tokens=add).ids
    is_encoding, num_looks = threading.Event(), 0

    def encode() -> None:
        is_encoding.set()
        tokenizer.encode(text, add_special_tokens=False)
        is_encoding.clear()

    thread = threading.Thread(target=encode)
    thread.start()
    assert is_encoding.wait(20)
    while is_encoding.is_set():
        num_looks += 1
        time.sleep(0.0001)
    thread.join()
    assert num_looks > 2, "the interpreter stood still while a text was tokenised"


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im_start|>the<tool call><|im_end|>", add_special_tokens=False)
    assert {ids[0], ids[-1]} <= tokenizer.special_token_ids
    assert tokenizer.decode(ids) == "the<tool call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the<tool call><|im_end|>"
    assert tokenizer.token_bytes(ids[0]) == b"<|im_start|>"


@pytest.mark.parametrize("outside", [-1, -(2**40), 100_000, 2**32, 2**64])
def test_ids_without_a_token_add_nothing(outside: int) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode("the cat", add_special_tokens=False)
        assert tokenizer.decode([outside, *ids, outside]) == "the cat"
        assert tokenizer.token_bytes(outside) == tokenizer.token_bytes(outside, at_start=True) == b""


def test_the_vocabulary_ends_behind_the_largest_id() -> None:
    tokenizer = byte_level()
    assert tokenizer.library.id_to_token(tokenizer.vocabulary_size - 1) is not None
    assert tokenizer.library.id_to_token(tokenizer.vocabulary_size) is None


def test_broken_byte_tokens_blot_out_no_valid_neighbour() -> None:
    tokenizer = sentencepiece()
    ids = [id_of(tokenizer, name) for name in ("<0x61>", "<0xFF>", "<0x62>")]
    assert tokenizer.decode(ids) == "a\ufffdb"
    assert tokenizer.library.decode(ids) == "\ufffd\ufffd\ufffd"
