"""Text to token ids and back, in the server process; workers receive ids only. May import `tokenizers`, no tensors.

Text is checked before tokenization: its length in UTF-8, which bounds the work and the number of tokens (each has at
least one byte), and its characters, because a lone surrogate has no UTF-8 encoding. The library's output is truncated
one token after the limit, enough to see that a text is too long.
"""

import os
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from quire.checkpoints import load_tokenizer
from quire.errors import ConfigError, InvalidTextError, RequestTooLargeError
from quire.text.token_bytes import join_bytes, token_bytes_for

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # quire encodes texts in its own thread pool


class Tokenizer:
    """One model's tokenizer. Thread-safe.

    The name of a special token in a text becomes that token, because raw prompts may need it. For conversations, the
    module `control_tokens` prevents this.
    """

    def __init__(self, library: tokenizers.Tokenizer, max_bytes: int, max_tokens: int | None = None) -> None:
        if max_bytes < 1:
            raise ConfigError(f"expected max_bytes of at least 1, got {max_bytes}")
        self.max_bytes = max_bytes
        self.max_tokens = max_tokens
        """Maximum tokens per text; None: only `max_bytes` applies."""
        # A tokenizer file may enable truncation or padding for training. A server must not silently truncate prompts.
        library.no_truncation()
        library.no_padding()
        self.vocabulary_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest token id. The model's embedding matrix may have further rows, which are unused."""
        self.special_token_ids = frozenset(
            token_id for token_id, added in library.get_added_tokens_decoder().items() if added.special
        )
        self.library = library
        """The library's tokenizer, for compiling grammars from its vocabulary."""
        self.encoder = self._truncating_encoder()
        """The library's tokenizer, with output truncated one token after `max_tokens`."""
        self.bytes = token_bytes_for(library)
        """The bytes that each token adds to a text."""

    @classmethod
    def from_files(cls, tokenizer_file: Path, max_bytes: int, max_tokens: int | None = None) -> "Tokenizer":
        """Load a `tokenizer.json`. Longer texts, in UTF-8 bytes or in tokens, will be rejected."""
        return cls(load_tokenizer(tokenizer_file), max_bytes, max_tokens)

    def limited(self, max_bytes: int, max_tokens: int) -> "Tokenizer":
        """Return a copy with other limits, which shares the vocabulary."""
        clone = copy(self)
        clone.max_bytes, clone.max_tokens = max_bytes, max_tokens
        clone.encoder = clone._truncating_encoder()
        return clone

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the text's token ids; a rendered chat template already has its special tokens. Raises
        InvalidTextError for a lone surrogate, RequestTooLargeError for a text over a limit."""
        self.check(text)
        return self.check_num_tokens(encoded_ids(self.encoder, text, add_special_tokens))

    def encoding(self, text: str) -> tokenizers.Encoding:
        """Return the text's tokens and their character offsets, without special tokens. Raises like `encode`."""
        self.check(text)
        encoding = encoded(self.encoder, text)
        self.check_num_tokens(encoding.ids)
        return encoding

    def check(self, text: str) -> None:
        """Raise the errors of `encode` for invalid characters and too many bytes, without tokenizing."""
        if len(text) > self.max_bytes:  # a character has at least one byte, so encoding the text is not needed
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

    def check_num_tokens(self, ids: list[int]) -> list[int]:
        """Return these ids. Raises RequestTooLargeError if there are more than `max_tokens`."""
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            message = f"expected a prompt of at most {self.max_tokens} tokens, got more; shorten the prompt"
            raise RequestTooLargeError(message, code="too_many_tokens")
        return ids

    def bound(self, library: tokenizers.Tokenizer) -> None:
        """Make a tokenizer truncate its output one token after `max_tokens`."""
        if self.max_tokens is not None:
            library.enable_truncation(max_length=self.max_tokens + 1)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode a whole text. Ids without a token add no text; invalid UTF-8 becomes U+FFFD.

        Equal to the library's `decode` if the bytes are valid. In a run of `<0xNN>` tokens that is invalid UTF-8, the
        library replaces every byte, valid ones too; here each invalid sequence becomes one U+FFFD.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        ids = [token_id for token_id in token_ids if token_id not in hidden and 0 <= token_id < self.vocabulary_size]
        return join_bytes(self.bytes, ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:
        """Return the bytes that the token adds to a text (to an empty text if `at_start`), maybe part of a character.

        A special token adds its name. An id without a token adds no bytes.
        """
        return self.bytes.at_start[token_id] if at_start else self.bytes.in_text[token_id]

    def _too_long(self, size: int) -> RequestTooLargeError:
        message = f"expected a text of at most {self.max_bytes} bytes, got at least {size}; shorten the prompt"
        return RequestTooLargeError(message, code="text_too_long")

    def _truncating_encoder(self) -> tokenizers.Tokenizer:
        """Return a tokenizer object with truncation enabled; other code uses the first object, without truncation."""
        twin = twin_of(self.library, {})
        is_equal = not twin.original_ids
        encoder = twin.library if is_equal else tokenizers.Tokenizer.from_str(self.library.to_str())
        self.bound(encoder)
        return encoder


def encoded(library: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Return the text's tokens and their character offsets. No special tokens are added.

    The library's `encode` holds the GIL until it returns and so blocks all threads, including the event loop.
    `encode_batch` releases the GIL, so it is called with a batch of one text.
    """
    return library.encode_batch([text], add_special_tokens=False)[0]


def encoded_ids(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return only the text's token ids, which takes less than half the time of `encoded`."""
    return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


@dataclass(frozen=True, slots=True)
class Twin:
    """A second tokenizer object that shares the vocabulary of the first, but has its own settings."""

    library: tokenizers.Tokenizer
    original_ids: Mapping[int, int]
    """Twin's id -> id in the original tokenizer, for tokens whose ids differ."""


def twin_of(library: tokenizers.Tokenizer, names: Mapping[str, str]) -> Twin:
    """Return a second tokenizer with the vocabulary of `library`, with some added tokens renamed as `names` maps them.

    The library's object has both settings (truncation, added tokens) and a vocabulary of many megabytes. A twin shares
    the vocabulary, but has its own settings.
    """
    twin = tokenizers.Tokenizer(library.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (component := getattr(library, part)) is not None:
            setattr(twin, part, component)
    added = [
        (token_id, AddedToken(**{**token.__getstate__(), "content": names.get(token.content, token.content)}))
        for token_id, token in sorted(library.get_added_tokens_decoder().items())
    ]
    twin.add_tokens([token for _, token in added])
    ids = {twin.token_to_id(token.content): token_id for token_id, token in added}
    return Twin(twin, {twin_id: old_id for twin_id, old_id in ids.items() if twin_id is not None and twin_id != old_id})
