"""Pre-tokenizers of byte-level BPE, by their name in GGUF files (`tokenizer.ggml.pre`).

One pre-tokenizer may be published by several vendors, so several names map to the same pattern.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, letter: str = r"\p{L}", mark: str = r"\p{L}\p{N}") -> str:
    """Return a pattern of contractions, words (with one preceding character), digits, punctuation, white space."""
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?[^\s{mark}]+[\r\n]*|{BLANKS}"


def _cased_words(digits: str, ending: str) -> str:
    """Return a pattern like that of `_words`, but each upper-case letter after a lower-case one starts a new word."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{UPPER}*{LOWER}+{ending}|{before}{UPPER}+{LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Settings of a pre-tokenizer, which splits text like GPT-2 if it has no pattern."""

    pattern: str | None = None
    has_single_digits: bool = False
    """Every digit is split off first."""
    is_nfc: bool = False
    """Text is normalized to Unicode NFC first."""
    ignores_merges: bool = False
    """A word that is in the vocabulary becomes that token regardless of merges."""
    has_bos: bool = False
    """Whether text starts with bos if the file does not specify it."""

    def build(self) -> Any:
        """Return this pre-tokenizer as an object of the `tokenizers` library."""
        from tokenizers import Regex, pre_tokenizers

        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        like_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not self.has_single_digits:
            return like_gpt2
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), like_gpt2])


LIKE_GPT2 = PreTokenizer()
SINGLE_DIGITS = PreTokenizer(has_single_digits=True)
THREE_DIGITS = PreTokenizer(pattern=_words(r"\p{N}{1,3}"))
LLAMA3 = PreTokenizer(pattern=_words(r"\p{N}{1,3}"), ignores_merges=True, has_bos=True)
SMOLLM3 = PreTokenizer(pattern=_words(r"\p{N}{1,3}"), ignores_merges=True)
QWEN2 = PreTokenizer(pattern=_words(r"\p{N}"), is_nfc=True)
QWEN35 = PreTokenizer(pattern=_words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"), is_nfc=True)
TEKKEN = PreTokenizer(pattern=_cased_words(r"\p{N}", ""), ignores_merges=True, has_bos=True)
GPT4O = PreTokenizer(pattern=_cased_words(r"\p{N}{1,3}", f"{CONTRACTIONS}?"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo"), LIKE_GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), SINGLE_DIGITS),
        **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), THREE_DIGITS),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2"), LLAMA3),
        "smaug-bpe": SMOLLM3,
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
        "qwen35": QWEN35,
        "tekken": TEKKEN,
        **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    }
)
