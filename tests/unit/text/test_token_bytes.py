"""A text is the sum of its tokens' bytes, or the tokenizer is refused."""

from string import ascii_letters

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.errors import CheckpointError
from quire.text.token_bytes import BYTE_OF_CHARACTER, DecodedBytes, token_bytes_for
from quire.text.tokenizer import Tokenizer
from tests.support.errors import raises_code
from tests.support.models.small_tokenizers import (
    UNKNOWN,
    byte_level,
    id_of,
    metaspace,
    sentencepiece,
    word_library,
    word_piece,
)


def test_the_byte_alphabet_has_a_character_for_every_byte() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert BYTE_OF_CHARACTER["Ġ"] == ord(" ")
    assert BYTE_OF_CHARACTER["Ċ"] == ord("\n")


def test_a_byte_level_decoder_is_read_by_its_alphabet_even_inside_a_sequence() -> None:
    library = byte_level().library
    assert not isinstance(token_bytes_for(library), DecodedBytes)
    wrapped = type(library).from_str(library.to_str())
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert not isinstance(token_bytes_for(wrapped), DecodedBytes)


def test_an_added_token_with_characters_outside_the_alphabet_is_meant_literally() -> None:
    for name in ("<tool call>", "<終>"):
        assert byte_level().token_bytes(id_of(byte_level(), name)) == name.encode()


def test_any_other_decoder_is_asked() -> None:
    for tokenizer in (sentencepiece(), metaspace(), word_piece()):
        assert isinstance(token_bytes_for(tokenizer.library), DecodedBytes)


def test_the_first_token_of_a_text_loses_its_space_where_the_tokenizer_says_so() -> None:
    for tokenizer, first in ((sentencepiece(), b"the"), (sentencepiece(strips=False), b" the"), (metaspace(), b"the")):
        token_id = id_of(tokenizer, "▁the")
        assert tokenizer.token_bytes(token_id) == b" the"
        assert tokenizer.token_bytes(token_id, at_start=True) == first


def test_a_byte_token_is_its_byte_first_or_later() -> None:
    tokenizer = sentencepiece()
    token_id = id_of(tokenizer, "<0xE4>")
    assert tokenizer.token_bytes(token_id) == tokenizer.token_bytes(token_id, at_start=True) == b"\xe4"
    assert tokenizer.token_bytes(id_of(tokenizer, "<0x20>"), at_start=True) == b""


def test_a_decoder_that_looks_at_the_next_token_is_refused() -> None:
    letters = [*ascii_letters, *(letter + "</w>" for letter in ascii_letters)]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], end_of_word_suffix="</w>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.BPEDecoder(suffix="</w>")
    with raises_code(CheckpointError, "unsupported_decoder"):
        token_bytes_for(library)


def test_a_tokenizer_without_a_decoder_puts_spaces_between_its_tokens() -> None:
    library = word_library(decoders.WordPiece())
    library.decoder = None
    tokenizer = Tokenizer(library, max_bytes=50)
    cat = id_of(tokenizer, "cat")
    assert tokenizer.token_bytes(cat) == b" cat"
    assert tokenizer.token_bytes(cat, at_start=True) == b"cat"


def test_a_tokenizer_of_signs_alone_is_refused() -> None:
    signs = tokenizers.Tokenizer(models.WordPiece({UNKNOWN: 0, "!": 1}, unk_token=UNKNOWN))
    with raises_code(CheckpointError, "plain_token_missing"):
        token_bytes_for(signs)
