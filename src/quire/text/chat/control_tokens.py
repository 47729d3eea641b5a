"""Encodes a rendered conversation to token ids. Only the template can write control tokens. May import `tokenizers`.

A control token is an added token that is `special`, or one with visible characters that occurs in the template's
source. If a client writes the name of a control token in a message, this name is encoded as ordinary text.

    fast path   the text is encoded directly; valid if the template wrote every control token in the result
    slow path   otherwise each control token that the template wrote is replaced by a secret alias, and a second
                tokenizer (the twin), which has these aliases instead of the public names, encodes the text. So the text
                is split exactly at the template's control tokens, by the library's own rules
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.errors import InvalidTextError
from quire.text.chat.prompt_parts import UNKNOWN_PARTS, PromptParts, prompt_parts
from quire.text.sandboxed.messages import Rendered
from quire.text.tokenizer import Tokenizer, encoded, twin_of

MAX_PASSES = 16
"""Maximum passes of the slow path, each of which corrects texts that were encoded as control tokens; one is typical."""

Edit = tuple[int, int, str]
"""(start, stop, text): replace these characters by the text."""


class ChatTokenizer:
    """Encodes conversations for one tokenizer and one template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template_text: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.library.get_added_tokens_decoder()
        self._control = {number: token.content for number, token in added.items() if is_control(token, template_text)}
        unknown = getattr(tokenizer.library.model, "unk_token", None)
        self._unknown_id = None if unknown is None else tokenizer.library.token_to_id(unknown)
        by_length = sorted(self._control.values(), key=len, reverse=True)
        self._name = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        nonce = secrets.token_hex(16)
        self._aliases = {name: f"\ue000{nonce}.{index}\ue001" for index, name in enumerate(by_length)}
        self._names = {alias: name for name, alias in self._aliases.items()}
        self._alias = re.compile(f"\ue000{nonce}\\.[0-9]+\ue001")
        self._break = f"\ue000{nonce}.break\ue001"
        self._twin = twin_of(tokenizer.library, self._aliases)
        self._twin.library.add_tokens([AddedToken(self._break, normalized=False)])
        self._break_id = self._twin.library.token_to_id(self._break)
        ids = ((self._twin.library.token_to_id(alias), alias) for alias in self._names)
        self._alias_ids = {token_id: alias for token_id, alias in ids if token_id is not None}
        twin_ids = self._alias_ids.keys() | self._twin.original_ids.keys()
        self._base_names = {token_id: name for token_id, name in self._control.items() if token_id not in twin_ids}
        """Control tokens whose public names are also in the base vocabulary, so that the twin still has them."""
        tokenizer.bound(self._twin.library)

    def encode_parts(
        self, rendered: Rendered, messages: Sequence[Mapping[str, Any]], tools: Sequence[str] = ()
    ) -> tuple[list[int], PromptParts]:
        """Return the conversation's token ids and the positions of the messages and tools that the template received;
        unknown positions on the slow path. Raises RequestTooLargeError, InvalidTextError."""
        encoding = self._tokenizer.encoding(rendered.text)
        ids = encoding.ids
        control_ranges = self._ranges(encoding, ids, rendered.text, self._control)
        if any(_overlaps(rendered.client_spans, *chars) for chars in control_ranges):
            return self.encode_apart(rendered), UNKNOWN_PARTS
        return ids, prompt_parts(rendered, len(ids), encoding.token_to_chars, messages, tools)

    def encode_apart(self, rendered: Rendered) -> list[int]:
        """Return the token ids by the slow path, which is correct for every text. Raises like `encode_parts`."""
        text = self._with_aliases(rendered)
        for _ in range(MAX_PASSES):
            encoding = encoded(self._twin.library, text)
            ids = self._tokenizer.check_num_tokens(encoding.ids)
            edits = [*self._unread_aliases(text, encoding, ids), *self._breaks(text, encoding, ids)]
            if not edits:
                originals = self._twin.original_ids
                return [originals.get(token_id, token_id) for token_id in ids if token_id != self._break_id]
            text = _apply_edits(text, edits)
        message = f"expected a chat without control tokens, found some after {MAX_PASSES} passes"
        raise InvalidTextError(f"{message}; leave out names of the model's control tokens", code="too_many_passes")

    def _with_aliases(self, rendered: Rendered) -> str:
        text, position, edits = rendered.text, 0, list[Edit]()
        for start, stop in (*rendered.client_spans, (len(rendered.text),) * 2):
            edits += [(*name.span(), self._aliases[name[0]]) for name in self._name.finditer(text, position, start)]
            position = stop
        return _apply_edits(text, edits)

    def _unread_aliases(self, text: str, encoding: tokenizers.Encoding, ids: list[int]) -> Iterator[Edit]:
        """Restore the names of aliases that the library did not read as tokens, for example within a word."""
        ranges = self._ranges(encoding, ids, text, self._alias_ids)
        starts = {match.start() for start, stop in ranges for match in self._alias.finditer(text, start, stop)}
        for match in self._alias.finditer(text):
            if match.start() not in starts:
                yield (*match.span(), self._names[match[0]])

    def _breaks(self, text: str, encoding: tokenizers.Encoding, ids: list[int]) -> Iterator[Edit]:
        """Split control-token names that the base vocabulary also has as ordinary tokens, so that they stay text."""
        for start, stop in self._ranges(encoding, ids, text, self._base_names):
            if stop - start < 2:
                raise InvalidTextError(f"unexpected control token {text[start:stop]!r} in a chat; leave it out")
            yield start + 1, start + 1, self._break

    def _ranges(
        self, encoding: tokenizers.Encoding, ids: list[int], text: str, names: dict[int, str]
    ) -> Iterator[tuple[int, int]]:
        """Yield the character ranges of tokens with these ids, without the white space that some tokens include."""
        for index, token_id in enumerate(ids):
            if token_id in names:
                start, stop = encoding.token_to_chars(index) or (0, len(text))
                shown = text[start:stop]
                if token_id != self._unknown_id or shown.strip() == names[token_id]:
                    yield start + len(shown) - len(shown.lstrip()), stop - len(shown) + len(shown.rstrip())


def _overlaps(spans: tuple[tuple[int, int], ...], start: int, stop: int) -> bool:
    """Return whether a span overlaps the characters from start to stop."""
    index = bisect_left(spans, stop, key=itemgetter(0)) - 1
    return index >= 0 and spans[index][1] > start


def is_control(token: AddedToken, template_text: str) -> bool:
    """Return whether a token is a control token for a template with this source text."""
    return bool(token.special or (token.content.strip() and token.content in template_text))


def _apply_edits(text: str, edits: list[Edit]) -> str:
    pieces, position = list[str](), 0
    for start, stop, new in sorted(edits):
        pieces += [text[position:start], new]
        position = stop
    return "".join([*pieces, text[position:]])
