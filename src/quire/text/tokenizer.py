"""Text to token ids and back. The parent process does this; workers see ids only. May touch `tokenizers`, no tensors.

Text is checked before the library sees it: its length in UTF-8, because tokenising is work a client can ask for at will
and a token is at least a byte of it; and its characters, because half a character (a lone surrogate) has no UTF-8. Of
what the library makes, one token more than a prompt may have is looked at.
"""

import os
from collections.abc import Iterable
from copy import copy
from pathlib import Path

import tokenizers

from quire.checkpoints import load_tokenizer
from quire.errors import ConfigError, InvalidTextError, RequestTooLargeError
from quire.text.token_bytes import join_bytes, token_bytes_for
from quire.text.tokenizer_twin import twin_of

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # text has threads of its own


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    Names of special tokens inside a text become those special tokens: right for a raw prompt, which may want them. For
    conversations see `chat_tokens`.
    """

    def __init__(self, library: tokenizers.Tokenizer, max_bytes: int, max_tokens: int | None = None) -> None:
        if max_bytes < 1:
            raise ConfigError(f"expected max_bytes of at least 1, got {max_bytes}")
        self.max_bytes = max_bytes
        self.max_tokens = max_tokens
        """Of one text; none leaves it to its bytes."""
        # A file may ask for cuts or padding that suited training. A server must never shorten a prompt in silence.
        library.no_truncation()
        library.no_padding()
        self.vocabulary_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest id that has a token. A model may have more rows than that, never to be read."""
        self.special_token_ids = frozenset(
            token_id for token_id, added in library.get_added_tokens_decoder().items() if added.special
        )
        self.library = library
        """The library's own object, for those who compile grammars from its vocabulary."""
        self.encoder = self._bounded_twin()
        """The same, ending one token past `max_tokens`."""
        self.bytes = token_bytes_for(library)
        """What each token adds to a text."""

    @classmethod
    def from_files(cls, tokenizer_file: Path, max_bytes: int, max_tokens: int | None = None) -> "Tokenizer":
        """Read a `tokenizer.json`. Texts of more bytes in UTF-8, or of more tokens, will be refused."""
        return cls(load_tokenizer(tokenizer_file), max_bytes, max_tokens)

    def limited(self, max_bytes: int, max_tokens: int) -> "Tokenizer":
        """The same with other limits. What took time to read is shared."""
        other = copy(self)
        other.max_bytes, other.max_tokens = max_bytes, max_tokens
        other.encoder = other._bounded_twin()
        return other

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The text's token ids. A rendered chat template already has its special tokens: do not add them again."""
        self.check(text)
        return self.not_too_many(encoded_ids(self.encoder, text, add_special_tokens))

    def encoding(self, text: str) -> tokenizers.Encoding:
        """The text's tokens and where they stand in it, without special tokens; refused like `encode`."""
        self.check(text)
        encoding = encoded(self.encoder, text)
        self.not_too_many(encoding.ids)
        return encoding

    def check(self, text: str) -> None:
        """Refuse what `encode` would refuse, at the cost of a glance."""
        if len(text) > self.max_bytes:  # a character has a byte at least: no need to make a copy of it
            raise self._too_long(len(text))
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise InvalidTextError(
                f"expected a text of whole characters, got half of a surrogate pair, U+{code:04X} at position "
                f"{error.start}; send both halves or neither"
            ) from None
        if size > self.max_bytes:
            raise self._too_long(size)

    def not_too_many(self, ids: list[int]) -> list[int]:
        """The ids, or the refusal of a text that has more tokens than one may have."""
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            rule = f"expected a prompt of at most {self.max_tokens} tokens, got more; shorten the prompt"
            raise RequestTooLargeError(rule, code="too_many_tokens")
        return ids

    def bound(self, library: tokenizers.Tokenizer) -> None:
        """Let a tokenizer's texts end one token past the most that one may have: the rest is never looked at."""
        if self.max_tokens is not None:
            library.enable_truncation(max_length=self.max_tokens + 1)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The whole text at once. Ids without a token add nothing; bytes that are not UTF-8 read as U+FFFD.

        Equal to the library's own decode wherever the bytes are valid. Where `<0xNN>` tokens are not, the library
        blots out every byte of their run, valid ones too; here each broken sequence is one U+FFFD, as everywhere else.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in token_ids if token_id not in hidden and 0 <= token_id < self.vocabulary_size]
        return join_bytes(self.bytes, shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:
        """What the token adds to a text, or to an empty one; a special token its name, an id without a token nothing.

        They need not be whole characters.
        """
        return self.bytes.at_start[token_id] if at_start else self.bytes.in_text[token_id]

    def _too_long(self, size: int) -> RequestTooLargeError:
        rule = f"expected a text of at most {self.max_bytes} bytes, got at least {size}; shorten the prompt"
        return RequestTooLargeError(rule, code="text_too_long")

    def _bounded_twin(self) -> tokenizers.Tokenizer:
        """Truncation is a setting of the library's object, and others may use that one."""
        twin = twin_of(self.library, {})
        is_equal = not twin.original_ids
        encoder = twin.library if is_equal else tokenizers.Tokenizer.from_str(self.library.to_str())
        self.bound(encoder)
        return encoder


def encoded(library: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """The text's tokens and where they stand in it. No special tokens are added.

    The library's `encode` holds the interpreter's lock until it is done, and with it every other thread, the event
    loop's too. Its calls for several texts let go of the lock, so a text is sent as the only one of several.
    """
    return library.encode_batch([text], add_special_tokens=False)[0]


def encoded_ids(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The text's token ids alone, which takes less than half the time."""
    return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
