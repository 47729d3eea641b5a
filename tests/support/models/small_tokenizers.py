"""Tokenizers small enough to make in a test, one for each kind of decoder. Most tokens are pieces of characters."""

from collections.abc import Callable
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from quire.text.tokenizer import Tokenizer

MAX_CHARS = 100_000
UNKNOWN = "<unk>"
LITERAL = ("<tool call>", "<終>", "été")
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CORPUS = [
    "the cat sat on the mat, then the other cat sat there",
    "def main():\n    return {'the': 1}\n",
    "日本語の文章 こんにちは 中文",
    "שלום עולם مرحبا بالعالم",
    "👍👍🏽👨‍👩‍👧 é é",
]


@cache
def byte_level() -> Tokenizer:
    """GPT-2's way, as in Llama 3, Qwen and SmolLM: a token is any run of bytes."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return _with_added_tokens(library)


@cache
def sentencepiece(strips: bool = True) -> Tokenizer:
    """Llama 2's and Mistral's way, or without stripping Gemma's: `▁` is a space, `<0xNN>` a byte."""
    library = tokenizers.Tokenizer(_pieces_with_bytes())
    replace = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return _with_added_tokens(library)


@cache
def metaspace() -> Tokenizer:
    """An older form of the same, which names the rule instead of the steps."""
    library = tokenizers.Tokenizer(_pieces_with_bytes())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_added_tokens(library)


@cache
def word_piece() -> Tokenizer:
    """BERT's way: words stand apart unless a piece begins with `##`."""
    return Tokenizer(word_library(decoders.WordPiece()), MAX_CHARS)


def word_library(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    words = [UNKNOWN, *"abcdefghijklmnopqrstuvwxyz.,!", "the", "##s", "cat", "hello", "world"]
    library = tokenizers.Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoder
    return library


def _pieces_with_bytes() -> models.BPE:
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("a", "t"), ("▁", "c"), ("▁c", "at"), ("日", "本")]
    tokens = [UNKNOWN, *SPECIAL[:2], *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"▁abcdefghijklmnopqrstuvwxyzאשל日本é.,'", *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return models.BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN, byte_fallback=True)


def _with_added_tokens(library: tokenizers.Tokenizer) -> Tokenizer:
    library.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    library.add_tokens([AddedToken(name, special=False) for name in LITERAL])
    return Tokenizer(library, MAX_CHARS)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    token_id = tokenizer.library.token_to_id(token)
    assert token_id is not None, token
    return token_id


ALL: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece that keeps its first space": lambda: sentencepiece(strips=False),
    "metaspace": metaspace,
    "word piece": word_piece,
}
