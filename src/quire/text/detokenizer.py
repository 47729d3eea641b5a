"""Incremental detokenization: each token's bytes go to an incremental UTF-8 decoder, whose output is the delta.

The text of a whole answer is defined as

    decode(prompt + answer) without the prefix that it shares with decode(prompt)

- An answer after a prompt keeps its leading space. Without a prompt, some tokenizers drop that space.
- A character that starts in the prompt and is completed by the answer belongs to the answer.
- A character that the answer does not complete is a U+FFFD at the end of the prompt's text, not of the answer.

For every sequence of ids, the joined deltas equal that text, because both are decoded from the same bytes. Between
tokens, at most three bytes are kept: the start of an incomplete character. No byte is decoded twice, so the cost per
token is constant, even after a million tokens that produced no text.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from quire.text.stop_strings import Delta, StopStrings
from quire.text.tokenizer import Tokenizer

UTF8_UNFINISHED_BYTES = 3
"""Maximum bytes of an incomplete UTF-8 character, so at most this many bytes of the prompt are needed."""

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence. Call `push` for each token and `finish` once; send the texts that they return."""

    __slots__ = ("_bytes", "_decoder", "_hidden", "_is_at_start", "_is_inside_character")

    stop: str | None = None
    """The stop string that ended the text; only `AnswerText` sets it."""

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
        """Neither the prompt nor the answer has produced text yet, so the next token is the first of the text."""
        self._decoder.decode(tail)
        incomplete = self._decoder.getstate()[0].decode("utf-8", "replace")
        if len(incomplete) > 1:
            # Python also keeps the first two bytes of an encoded surrogate, although no later byte makes them valid.
            self._decoder.reset()
        self._is_inside_character = len(incomplete) == 1
        """The prompt ended inside a character that the answer may still complete."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        piece = self._bytes.in_text[token_id]
        if not piece:
            return ""
        if self._is_at_start:
            piece = self._bytes.at_start[token_id]
            self._is_at_start = False
        return self._answer_part(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return the remaining text: U+FFFD if the answer ends inside a character, else ""."""
        return self._answer_part(self._decoder.decode(b"", final=True))

    def _answer_part(self, text: str) -> str:
        if self._is_inside_character and text:
            self._is_inside_character = False
            # The prompt's text already ends with this U+FFFD.
            return text.removeprefix("\ufffd")
        return text

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, at most `UTF8_UNFINISHED_BYTES`."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= UTF8_UNFINISHED_BYTES:
                break
            if token_id not in self._hidden:
                tail = self._bytes.in_text[token_id] + tail
        return tail[-UTF8_UNFINISHED_BYTES:]


class AnswerText(Detokenizer):
    """The text of a sequence with stop strings: it ends at the first stop string.

    The token that completes a stop string counts as generated; text of this token after the stop string is dropped.
    """

    __slots__ = ("_include_stop", "_stops", "stop")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(tokenizer, prompt_ids, skip_special_tokens, shown_token_ids)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop
        self.stop = None

    def push(self, token_id: int) -> str:
        return self._until_stop(self._stops.push(super().push(token_id)))

    def finish(self) -> str:
        """Return all text still held back, at the end of generation. The last text may complete a stop string."""
        text = self._until_stop(self._stops.push(super().finish()))
        return text + self._stops.flush()

    def _until_stop(self, delta: Delta) -> str:
        if delta.stop is None:
            return delta.text
        self.stop = delta.stop
        return delta.text + delta.stop if self._include_stop else delta.text
