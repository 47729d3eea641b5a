"""Text to token ids and back. The parent process does this; workers see ids only. May touch `tokenizers`, no tensors.

Text is checked before the library sees it: its length, because tokenising is work a client can ask for at will, and
its characters, because half a character (a lone surrogate) has no UTF-8.
"""

from asyncio import get_running_loop
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers

from quire.checkpoints import load_tokenizer
from quire.engine.token_bytes import join_bytes, token_bytes_for
from quire.errors import ConfigError, InvalidTextError, RequestTooLargeError

NUM_THREADS = 2
"""Threads that tokenise beside the event loop. The library lets go of the interpreter's lock while it works."""


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    Names of special tokens inside a text, as chat templates write them, become those special tokens.
    """

    def __init__(self, library: tokenizers.Tokenizer, max_chars: int) -> None:
        if max_chars < 1:
            raise ConfigError(f"max_chars must be at least 1, {max_chars} given")
        # A file may ask for cuts or padding that suited training. A server must never shorten a prompt in silence.
        library.no_truncation()
        library.no_padding()
        self.max_chars = max_chars
        self.vocabulary_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest id that has a token. A model may have more rows than that, never to be read."""
        self.special_token_ids = frozenset(
            token_id for token_id, added in library.get_added_tokens_decoder().items() if added.special
        )
        self.library = library
        """The library's own object, for those who compile grammars from its vocabulary."""
        self._bytes = token_bytes_for(library)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-tokenize")

    @classmethod
    def from_files(cls, tokenizer_file: Path, max_chars: int) -> "Tokenizer":
        """Read a `tokenizer.json`. Texts of more than `max_chars` characters will be refused."""
        return cls(load_tokenizer(tokenizer_file), max_chars)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The text's token ids. A rendered chat template already has its special tokens: do not add them again."""
        self.check(text)
        return self._encode_checked(text, add_special_tokens)

    async def encode_off_loop(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same without holding up the event loop. What is refused is refused at once."""
        self.check(text)
        return await get_running_loop().run_in_executor(self._threads, self._encode_checked, text, add_special_tokens)

    def check(self, text: str) -> None:
        """Refuse what `encode` would refuse, at the cost of a glance."""
        if len(text) > self.max_chars:
            raise RequestTooLargeError(
                f"a text may have {self.max_chars} characters, {len(text)} given; shorten the prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise InvalidTextError(
                f"a text must be made of whole characters, U+{code:04X} at position {error.start} is half of a"
                " surrogate pair; send both halves or neither"
            ) from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The whole text at once. Ids without a token add nothing; bytes that are not UTF-8 read as U+FFFD.

        Equal to the library's own decode wherever the bytes are valid. Where `<0xNN>` tokens are not, the library
        blots out every byte of their run, valid ones too; here each broken sequence is one U+FFFD, as everywhere else.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in token_ids if token_id not in hidden and 0 <= token_id < self.vocabulary_size]
        return join_bytes(self._bytes, shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:
        """What the token adds to a text, or to an empty one; a special token its name, an id without a token nothing.

        They need not be whole characters.
        """
        if not 0 <= token_id < self.vocabulary_size:
            return b""
        return self._bytes.at_start(token_id) if at_start else self._bytes.in_text(token_id)

    def close(self) -> None:
        """End the threads. Texts on their way are still encoded."""
        self._threads.shutdown()

    def _encode_checked(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.library.encode(text, add_special_tokens=add_special_tokens).ids
