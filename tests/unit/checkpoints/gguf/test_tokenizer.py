"""A tokenizer rebuilt from a GGUF file cuts and joins text as the model's own."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.test_model import smollm2
from quire.checkpoints import CheckpointError, load_tokenizer, resolve
from quire.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.support.errors import raises_code
from tests.support.models.tiny_models import SPECIAL, TEMPLATE, Tiny, byte_level_metadata, piece_metadata, write_gguf

TEXTS = [
    "hello world", "  two  blanks ", "tabs\tand\nlines\r\n\n", "1234567890", "x=3.14159e-10", "naïve café Ünïcödé",
    "日本語のテキスト", "emoji 👩‍👩‍👧‍👦 🎉", "العربية", "I'm, you're; WE'LL", "def f(x):\n    return x\n", "\0\x7f", "",
]  # fmt: skip


def tokenizer_of(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    checkpoint = resolve(str(write_gguf(folder / "tiny.gguf", Tiny(metadata=metadata))), cache=folder / "cache")
    assert checkpoint.tokenizer_file is not None
    return load_tokenizer(checkpoint.tokenizer_file)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokenizers_give_every_text_back(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level_metadata(pre))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_the_pre_tokenizer_decides_whether_digits_join(tmp_path: Path) -> None:
    joined = {"gpt-2": ["12", "3"], "smollm": ["1", "2", "3"], "llama3": ["12", "3"], "qwen2": ["1", "2", "3"]}
    for pre, tokens in joined.items():
        (tmp_path / pre).mkdir()
        assert (
            tokenizer_of(tmp_path / pre, byte_level_metadata(pre)).encode("123", add_special_tokens=False).tokens
            == tokens
        )


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'m", "ĠXMLParser", "Ġ2024", "Ġ+=", "Ġ1", "Ċ", "Ċ", "é"]),
        ("smollm", ["I", "'m", "ĠXMLParser", "Ġ", "2", "0", "2", "4", "Ġ+=", "Ġ", "1", "Ċ", "Ċ", "é"]),
        ("dbrx", ["I", "'m", "ĠXMLParser", "Ġ", "202", "4", "Ġ+=", "Ġ", "1", "ĊĊ", "é"]),
        ("qwen2", ["I", "'m", "ĠXMLParser", "Ġ", "2", "0", "2", "4", "Ġ+=", "Ġ", "1", "ĊĊ", "é"]),
        ("qwen35", ["I", "'m", "ĠXMLParser", "Ġ", "2", "0", "2", "4", "Ġ+=", "Ġ", "1", "ĊĊ", "é"]),
        ("tekken", ["I", "'m", "ĠXMLParser", "Ġ", "2", "0", "2", "4", "Ġ+=", "Ġ", "1", "ĊĊ", "é"]),
        ("gpt-4o", ["I'm", "ĠXMLParser", "Ġ", "202", "4", "Ġ+=", "Ġ", "1", "ĊĊ", "é"]),
    ],
)
def test_a_name_says_where_text_is_cut(pre: str, words: list[str]) -> None:
    cut = PRE_TOKENIZERS[pre].build()
    found = [word for word, _ in cut.pre_tokenize_str("I'm XMLParser 2024 += 1\n\né")]
    assert found == [word.replace("é", "Ã©") for word in words]


def test_where_letters_have_marks_only_some_cut_them_off() -> None:
    text = "हिन्दी"
    counts = {pre: len(PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)) for pre in ("qwen2", "qwen35", "tekken")}
    assert counts == {"qwen2": 4, "qwen35": 1, "tekken": 1}


def test_an_upper_case_letter_begins_a_word_only_where_the_name_says_so() -> None:
    names = ("qwen2", "tekken", "gpt-4o")
    counts = {pre: len(PRE_TOKENIZERS[pre].build().pre_tokenize_str("readFile")) for pre in names}
    assert counts == {"qwen2": 1, "tekken": 2, "gpt-4o": 2}


def test_pieces_with_listed_merges_are_merged_in_their_order(tmp_path: Path) -> None:
    metadata = piece_metadata()
    del metadata["tokenizer.ggml.scores"]
    own = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.pre": "gemma4", "tokenizer.ggml.add_space_prefix": False}
    merges = {"tokenizer.ggml.merges": ["l o", "e l"]}
    tokens = tokenizer_of(tmp_path, metadata | own | merges).encode("hello").tokens
    assert tokens == ["<s>", "h", "el", "lo"]


def test_special_and_user_defined_tokens_stay_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level_metadata())
    encoded = tokenizer.encode("hello<|im_end|>he<tool>llo")
    assert encoded.tokens == ["hello", "<|im_end|>", "he", "<tool>", "ll", "o"]
    assert tokenizer.decode(encoded.ids) == "hellohe<tool>llo"


def test_a_text_begins_and_ends_with_what_the_file_asks_for(tmp_path: Path) -> None:
    for bos, eos in ((False, False), (True, False), (False, True), (True, True)):
        folder = tmp_path / f"{bos}{eos}"
        folder.mkdir()
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        tokens = tokenizer_of(folder, byte_level_metadata() | flags).encode("he").tokens
        assert tokens == [SPECIAL[1]] * bos + ["he"] + [SPECIAL[2]] * eos


def test_llama_3_begins_with_bos_even_if_the_file_does_not_say_so(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, byte_level_metadata("llama-bpe")).encode("he").tokens == [SPECIAL[1], "he"]


def test_unused_entries_are_no_tokens(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5]
    assert tokenizer_of(tmp_path, metadata).token_to_id("[PAD1]") is None


def test_pieces_merge_by_score_fall_back_to_bytes_and_keep_blanks(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, piece_metadata())
    assert tokenizer.encode("hello wor").tokens == ["<s>", "▁hello", "▁w", "or"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    for text in [text for text in TEXTS if text]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text, text


def test_pieces_without_a_space_prefix_add_none(tmp_path: Path) -> None:
    metadata = piece_metadata() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = tokenizer_of(tmp_path, metadata)
    assert tokenizer.encode("hello").tokens == ["h", "el", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello ").ids) == " hello "


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokenizer.ggml.model": "bert"}, "unsupported_tokenizer"),
        ({"tokenizer.ggml.pre": "bloom"}, "unsupported_pre_tokenizer"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "invalid_tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "invalid_tokens"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "invalid_tokenizer"),
        ({"tokenizer.ggml.merges": [1, 2]}, "invalid_merges"),
        ({"tokenizer.ggml.add_bos_token": 3}, "invalid_add_bos_token"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    with raises_code(CheckpointError, code):
        tokenizer_of(tmp_path, byte_level_metadata() | {"tokenizer.ggml.eos_token_id": 0} | change)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokenizer.ggml.scores": [1.0]}, "wrong_num_scores"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "white_space_removed"),
    ],
)
def test_pieces_that_cannot_be_rebuilt_are_refused(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    with raises_code(CheckpointError, code):
        tokenizer_of(tmp_path, piece_metadata() | change)


def test_a_piece_too_long_to_be_cut_is_refused(tmp_path: Path) -> None:
    metadata = piece_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-1], "z" * 300]
    with raises_code(CheckpointError, "tokens_too_long"):
        tokenizer_of(tmp_path, metadata)


def test_the_chat_template_is_carried_over(tmp_path: Path) -> None:
    checkpoint = resolve(str(write_gguf(tmp_path / "tiny.gguf")), cache=tmp_path / "cache")
    assert checkpoint.chat_template == TEMPLATE


@pytest.mark.model
def test_smollm2_cuts_known_texts_as_it_was_trained_to() -> None:
    tokenizer_file = smollm2().tokenizer_file
    assert tokenizer_file is not None
    tokenizer = load_tokenizer(tokenizer_file)
    assert tokenizer.encode("Hello world").tokens == ["Hello", "Ġworld"]
    assert tokenizer.encode("The capital of France").tokens == ["The", "Ġcapital", "Ġof", "ĠFrance"]
    assert tokenizer.encode("in 2024.").tokens == ["in", "Ġ", "2", "0", "2", "4", "."]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").tokens == [
        "<|im_start|>",
        "user",
        "Ċ",
        "hi",
        "<|im_end|>",
    ]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.model
def test_smollm2_is_a_llama_of_thirty_layers_with_a_template_and_an_end() -> None:
    checkpoint = smollm2()
    assert (checkpoint.config["model_type"], checkpoint.config["num_hidden_layers"]) == ("llama", 30)
    assert (set(checkpoint.eos_token_ids), checkpoint.bos_token_id) == ({2}, 1)
    assert "<|im_start|>" in (checkpoint.chat_template or "")
    assert smollm2() == checkpoint
