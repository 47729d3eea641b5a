"""The bytes that each token adds to a text. All knowledge of tokenizer decoders is here; other modules only join bytes.

A token's bytes do not depend on adjacent tokens, with one exception: some tokenizers drop the leading space of the
first token of a text. So a token has two values, `in_text` and `at_start`, and a text is

    at_start(first token) + in_text(second) + in_text(third) + ...      decoded as UTF-8, invalid bytes as U+FFFD

Two ways to find the bytes:

    byte level     GPT-2, Llama 3, Qwen, SmolLM, newer Mistral models: each character of a token stands for one byte
    DecodedBytes   all others, such as Llama 2, Mistral 7B and Gemma: the library decodes the token, once after
                   another token and once alone; `<0xNN>` is the byte NN

A tokenizer whose text is not such a sum (for example, if its decoder reads the next token) is rejected when the model
is loaded. May import `tokenizers`; does not depend on requests.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tokenizers

from quire.errors import CheckpointError

SAMPLE = "Hello, world! It isn't 3.14 (or 2).\n\n\tdéjà vu  你好 שלום 👍🏽 {'a': [1]}"
"""Encoded and decoded once when a model is loaded, to check that its text is the sum of its tokens' bytes."""

MAX_ID = (1 << 32) - 1
"""Largest token id that the library accepts."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(slots=True)
class TokenBytes:
    """The bytes that each token adds to a text, by token id. Ids without a token add no bytes."""

    in_text: Mapping[int, bytes]
    """A token's bytes after another token."""
    at_start: Mapping[int, bytes]
    """A token's bytes as the first token of a text."""


class TokenTable(dict[int, bytes]):
    """Bytes by token id, computed on first use and then cached."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[int], bytes]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id <= MAX_ID:
            return b""
        value = self[token_id] = self._find(token_id)
        return value


def token_bytes_for(library: tokenizers.Tokenizer) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens, found in the way that suits its decoder. Raises CheckpointError."""
    kinds = _decoder_kinds(json.loads(library.to_str())["decoder"])
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return _byte_level(library)
    decoded = DecodedBytes(library, has_byte_tokens="ByteFallback" in kinds)
    _check_decoder(library, decoded, kinds)
    return decoded


def join_bytes(source: TokenBytes, token_ids: list[int]) -> bytes:
    """Return the bytes of a whole text."""
    pieces: list[bytes] = []
    for token_id in token_ids:
        piece = source.in_text[token_id]
        if piece:
            pieces.append(piece if pieces else source.at_start[token_id])
    return b"".join(pieces)


def _byte_level(library: tokenizers.Tokenizer) -> TokenBytes:
    """Convert tokens in GPT-2's alphabet of 256 printable characters, one per byte. All tokens are converted at once,
    which takes a tenth of the time of loading the tokenizer."""
    contents = {token_id: content for content, token_id in library.get_vocab(with_added_tokens=True).items()}
    contents |= {token_id: token.content for token_id, token in library.get_added_tokens_decoder().items()}
    table = defaultdict(bytes, {token_id: _bytes_of(content) for token_id, content in contents.items()})
    return TokenBytes(table, table)  # one table: these tokenizers drop nothing at the start


class DecodedBytes(TokenBytes):
    """Tokens that the library decodes on first use: after another token, and alone."""

    __slots__ = ("_anchor_id", "_anchor_text", "_has_byte_tokens", "_library")

    def __init__(self, library: tokenizers.Tokenizer, *, has_byte_tokens: bool) -> None:
        self._library = library
        self._has_byte_tokens = has_byte_tokens
        self._anchor_id, self._anchor_text = self._choose_anchor()
        super().__init__(TokenTable(self._after_anchor), TokenTable(self._without_context))

    def _after_anchor(self, token_id: int) -> bytes:
        """The bytes that the token adds after the anchor, an ordinary token."""
        byte = self._byte(token_id)
        text = self._decode([self._anchor_id, token_id])
        return byte if byte is not None else text.removeprefix(self._anchor_text).encode()

    def _without_context(self, token_id: int) -> bytes:
        """The bytes of the token alone. A byte token keeps its byte, because part of a character has no text."""
        byte, text = self._byte(token_id), self._decode([token_id])
        return byte if byte is not None and text else text.encode()

    def _byte(self, token_id: int) -> bytes | None:
        match = BYTE_TOKEN.fullmatch(self._library.id_to_token(token_id) or "") if self._has_byte_tokens else None
        return bytes.fromhex(match[1]) if match else None

    def _decode(self, token_ids: list[int]) -> str:
        return self._library.decode(token_ids, skip_special_tokens=False)

    def _choose_anchor(self) -> tuple[int, str]:
        """Return the first token that decodes to letters or digits, and to the same text before another token."""
        for token_id in sorted(self._library.get_vocab().values()):
            text = self._decode([token_id])
            is_plain = self._byte(token_id) is None and text.isalnum()
            if is_plain and self._decode([token_id, token_id]).startswith(text):
                return token_id, text
        message = "expected a tokenizer with a plain token of letters or digits, found none; choose another model"
        raise CheckpointError(message, code="plain_token_missing")


def _bytes_of(content: str) -> bytes:
    """Return a byte per character. A token with a character outside the alphabet is literal text, encoded as UTF-8.

    A literal added token with only characters of the alphabet, such as `été`, is decoded wrongly, as by the library.
    """
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in content])
    except KeyError:
        return content.encode()


def _decoder_kinds(decoder: dict[str, object] | None) -> list[str]:
    """Return the types of a decoder's steps, in order."""
    if decoder is None:
        return ["none"]
    steps = decoder.get("decoders")
    if isinstance(steps, list):
        return [kind for step in steps for kind in _decoder_kinds(step)]
    return [str(decoder["type"])]


def _check_decoder(library: tokenizers.Tokenizer, decoded: DecodedBytes, kinds: list[str]) -> None:
    token_ids = library.encode(SAMPLE, add_special_tokens=False).ids
    joined_text = join_bytes(decoded, token_ids).decode("utf-8", "replace")
    if joined_text != library.decode(token_ids, skip_special_tokens=False):
        message = "expected a tokenizer whose text is the sum of its tokens, as streaming needs"
        hint = "choose a model with a byte-level or SentencePiece tokenizer"
        raise CheckpointError(f"{message}, got decoder {'+'.join(kinds)}; {hint}", code="unsupported_decoder")


def _byte_alphabet() -> dict[str, int]:
    """Printable bytes map to the same code point; the others, in order, to the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
