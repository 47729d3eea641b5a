"""Token by token, the text that came out. Works in bytes: a delta is what the new bytes let a UTF-8 decoder say.

The text of an answer, at once:

    what decoding prompt + answer shows beyond what decoding the prompt alone shows

that is `decode(prompt + answer)` without the beginning it has in common with `decode(prompt)`. So an answer that
follows a prompt keeps its leading space where an answer to nothing loses it; a character that the prompt began and the
answer completed belongs to the answer; and half a character that stays half is the prompt's U+FFFD, not shown again.

The deltas joined are that text, for every sequence of ids, because both read the same bytes: at most three bytes,
the beginning of a character that may yet be completed, are kept from one token to the next. Nothing is decoded twice,
so a token costs the same after a million others that gave no text.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer

UTF8_UNFINISHED_BYTES = 3
"""No unfinished character has more bytes; and a first byte is never taken for a later one, so no more need be read."""

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """One continuation's text. Push each token, send what comes back, finish once."""

    __slots__ = ("_bytes", "_decoder", "_hidden", "_is_at_start", "_is_mid_character")

    stop: str | None = None
    """The stop string that has ended it; only `AnswerText` looks for any."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._bytes = tokenizer.bytes
        self._hidden = tokenizer.special_token_ids - shown_token_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder(errors="replace")
        tail = self._last_bytes(prompt_ids)
        self._is_at_start = not tail
        """Nothing has been shown yet, not even by the prompt: the next token is the first of the text."""
        self._decoder.decode(tail)
        kept = self._decoder.getstate()[0].decode("utf-8", "replace")
        if len(kept) > 1:
            # Python keeps the first two bytes of an encoded surrogate too, though nothing can mend them.
            self._decoder.reset()
        self._is_mid_character = len(kept) == 1
        """The prompt ended inside a character, and it is not yet known whether the answer completes it."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often "", while a character is not whole."""
        if token_id in self._hidden:
            return ""
        piece = self._bytes.in_text[token_id]
        if not piece:
            return ""
        if self._is_at_start:
            piece = self._bytes.at_start[token_id]
            self._is_at_start = False
        return self._beyond_prompt(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest: U+FFFD if the answer ends inside a character, else ""."""
        return self._beyond_prompt(self._decoder.decode(b"", final=True))

    def _beyond_prompt(self, text: str) -> str:
        if self._is_mid_character and text:
            self._is_mid_character = False
            # The prompt's own text already ends with this U+FFFD.
            return text.removeprefix("\ufffd")
        return text

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, as many as can be an unfinished character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= UTF8_UNFINISHED_BYTES:
                break
            if token_id not in self._hidden:
                tail = self._bytes.in_text[token_id] + tail
        return tail[-UTF8_UNFINISHED_BYTES:]
