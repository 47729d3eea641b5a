"""The bytes that one token adds to a text. Everything about decoders is here, so that all else can add up bytes.

A token's bytes do not depend on its neighbours, with one exception: some tokenizers drop the space that the first
token of a text begins with. So a token has two values, `in_text` and `at_start`, and a text is

    at_start(first token) + in_text(second) + in_text(third) + ...      read as UTF-8, U+FFFD for what is not

Two ways to know the bytes:

    ByteLevelBytes   GPT-2, Llama 3, Qwen, SmolLM, Mistral's newer models: each character of a token stands for one byte
    DecodedBytes     all others, Llama 2, Mistral 7B and Gemma among them: the library returns what a token looks like
                     after another token, and alone; `<0xNN>` is the byte NN

A decoder that is not such a sum (one that looks at the token after, say) is refused when the model is loaded.
May touch `tokenizers`; knows no request.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol

import tokenizers

from quire.errors import CheckpointError

SAMPLE = "Hello, world! It isn't 3.14 (or 2).\n\n\tdéjà vu  你好 שלום 👍🏽 {'a': [1]}"
"""Encoded and decoded once at load, to see whether a decoder is a sum of its tokens."""

LARGEST_ID = (1 << 32) - 1
"""That the library can be asked for."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Protocol):
    """What a token adds to a text, by its id. Ids that have no token add nothing."""

    @property
    def in_text(self) -> Mapping[int, bytes]:
        """Its bytes after some other token."""

    @property
    def at_start(self) -> Mapping[int, bytes]:
        """Its bytes as the first token of a text."""


class TokenTable(dict[int, bytes]):
    """Bytes by token id. A token is looked up when it is first wanted, and then known."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[int], bytes], known: Mapping[int, bytes] | None = None) -> None:
        super().__init__(known or {})
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id <= LARGEST_ID:
            return b""
        found = self[token_id] = self._find(token_id)
        return found


def token_bytes_for(library: tokenizers.Tokenizer) -> TokenBytes:
    """The way that fits this tokenizer's decoder."""
    kinds = _decoder_kinds(json.loads(library.to_str())["decoder"])
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return ByteLevelBytes(library)
    decoded = DecodedBytes(library, has_byte_tokens="ByteFallback" in kinds)
    _check_is_a_sum(library, decoded, kinds)
    return decoded


def join_bytes(source: TokenBytes, token_ids: list[int]) -> bytes:
    """The bytes of a whole text."""
    pieces: list[bytes] = []
    for token_id in token_ids:
        piece = source.in_text[token_id]
        if piece:
            pieces.append(piece if pieces else source.at_start[token_id])
    return b"".join(pieces)


class ByteLevelBytes:
    """Tokens written in GPT-2's alphabet of 256 printable characters, one for each byte. All of them are known from the
    start: that takes a tenth of what reading the tokenizer does."""

    __slots__ = ("at_start", "in_text")

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        contents = {token_id: content for content, token_id in library.get_vocab(with_added_tokens=True).items()}
        contents |= {token_id: token.content for token_id, token in library.get_added_tokens_decoder().items()}
        known = {token_id: _read(content) for token_id, content in contents.items()}
        # One table: these tokenizers drop nothing at the start.
        self.in_text = self.at_start = TokenTable(lambda _: b"", known)


class DecodedBytes:
    """Tokens whose bytes the library is asked for, once each: after another token, and alone."""

    __slots__ = ("_anchor_id", "_anchor_text", "_has_byte_tokens", "_library", "at_start", "in_text")

    def __init__(self, library: tokenizers.Tokenizer, *, has_byte_tokens: bool) -> None:
        self._library = library
        self._has_byte_tokens = has_byte_tokens
        self._anchor_id, self._anchor_text = self._find_anchor()
        self.in_text = TokenTable(self._after_anchor)
        self.at_start = TokenTable(self._alone)

    def _after_anchor(self, token_id: int) -> bytes:
        """What the token adds after the anchor, an ordinary token."""
        byte = self._byte(token_id)
        both = self._decode([self._anchor_id, token_id])
        return byte if byte is not None else both.removeprefix(self._anchor_text).encode()

    def _alone(self, token_id: int) -> bytes:
        """What the token is alone. A byte that is half a character has no text of its own, and stays that byte."""
        byte, alone = self._byte(token_id), self._decode([token_id])
        return byte if byte is not None and alone else alone.encode()

    def _byte(self, token_id: int) -> bytes | None:
        found = BYTE_TOKEN.fullmatch(self._library.id_to_token(token_id) or "") if self._has_byte_tokens else None
        return bytes.fromhex(found[1]) if found else None

    def _decode(self, token_ids: list[int]) -> str:
        return self._library.decode(token_ids, skip_special_tokens=False)

    def _find_anchor(self) -> tuple[int, str]:
        """Any token that is text by itself, and still the same text when another follows."""
        for token_id in sorted(self._library.get_vocab().values()):
            text = self._decode([token_id])
            is_plain = self._byte(token_id) is None and text.isalnum()
            if is_plain and self._decode([token_id, token_id]).startswith(text):
                return token_id, text
        missing = "expected a tokenizer with a plain token of letters or digits, found none; choose another"
        raise CheckpointError(missing, code="plain_token_missing")


def _read(content: str) -> bytes:
    """One byte for each character. A token with a character outside the alphabet is meant literally.

    An added token such as `été`, literal but all within the alphabet, is misread; the library misreads it too.
    """
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in content])
    except KeyError:
        return content.encode()


def _decoder_kinds(decoder: dict[str, object] | None) -> list[str]:
    """The names of a decoder's steps, in order."""
    if decoder is None:
        return ["none"]
    steps = decoder.get("decoders")
    if isinstance(steps, list):
        return [kind for step in steps for kind in _decoder_kinds(step)]
    return [str(decoder["type"])]


def _check_is_a_sum(library: tokenizers.Tokenizer, decoded: DecodedBytes, kinds: list[str]) -> None:
    token_ids = library.encode(SAMPLE, add_special_tokens=False).ids
    summed = join_bytes(decoded, token_ids).decode("utf-8", "replace")
    if summed != library.decode(token_ids, skip_special_tokens=False):
        rule = "expected a tokenizer whose text is the sum of its tokens, as streaming needs"
        way_out = "choose a model with a byte-level or SentencePiece tokenizer"
        raise CheckpointError(f"{rule}, got decoder {'+'.join(kinds)}; {way_out}", code="unsupported_decoder")


def _byte_alphabet() -> dict[str, int]:
    """Bytes that print stand for themselves; the others, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
