"""A rendered conversation to token ids: control tokens are those the template wrote. May touch `tokenizers`.

A control token is an added token that is `special`, or one with visible characters that stands in the template's own
text. A client may write the name of one anywhere; it then says the name and does not use the token.

    as ever   the text is encoded in one go; if every control token found lies where the template wrote, that is it
    apart     else each control token the template wrote is replaced by a secret name, and a twin of the tokenizer,
              which knows those names instead of the public ones, encodes the text: so it is cut where the template
              wrote control tokens and nowhere else, by the library's own rules
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator

import tokenizers
from tokenizers import AddedToken

from quire.errors import InvalidTextError
from quire.text.chat.prompt_parts import UNKNOWN_PARTS, PromptParts, TemplateParts, prompt_parts
from quire.text.sandboxed.template_messages import Rendered
from quire.text.tokenizer import Tokenizer, encoded
from quire.text.tokenizer_twin import twin_of

MAX_PASSES = 16
"""How often a text is mended that the vocabulary itself would read as a control token; once is enough for most."""

Edit = tuple[int, int, str]
"""Characters from start to stop are replaced by a text."""


class ChatTokenizer:
    """Encodes conversations for one tokenizer and one template. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, own_text: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.library.get_added_tokens_decoder()
        self._control = {number: one.content for number, one in added.items() if is_control(one, own_text)}
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
        taken = self._alias_ids.keys() | self._twin.original_ids.keys()
        self._words = {token_id: name for token_id, name in self._control.items() if token_id not in taken}
        """Control tokens that the vocabulary itself has as words, and that no twin can be without."""
        tokenizer.bound(self._twin.library)

    def encode(self, rendered: Rendered) -> list[int]:
        """The conversation's token ids. Raises RequestTooLargeError and InvalidTextError."""
        return self.encode_parts(rendered, None)[0]

    def encode_parts(self, rendered: Rendered, table: TemplateParts | None) -> tuple[list[int], PromptParts]:
        """The same, and where the parts of `table` lie. None of a text that is encoded apart: unknown."""
        encoding = self._tokenizer.encoding(rendered.text)
        ids = encoding.ids
        spans = Touching(rendered)
        found = self._found(encoding, ids, rendered.text, self._control)
        if any(spans.touches(*place) for place in found):
            return self.encode_apart(rendered), UNKNOWN_PARTS
        if table is None:
            return ids, UNKNOWN_PARTS
        return ids, prompt_parts(rendered, len(ids), encoding.token_to_chars, table)

    def encode_apart(self, rendered: Rendered) -> list[int]:
        """The same in the slow way, which is right for every text."""
        text = self._with_aliases(rendered)
        for _ in range(MAX_PASSES):
            encoding = encoded(self._twin.library, text)
            ids = self._tokenizer.not_too_many(encoding.ids)
            edits = [*self._unread_aliases(text, encoding, ids), *self._breaks(text, encoding, ids)]
            if not edits:
                originals = self._twin.original_ids
                return [originals.get(one, one) for one in ids if one != self._break_id]
            text = _edited(text, edits)
        sentence = f"expected a chat without control tokens, found some after {MAX_PASSES} passes"
        raise InvalidTextError(f"{sentence}; leave out names of the model's control tokens", code="too_many_passes")

    def _with_aliases(self, rendered: Rendered) -> str:
        text, place, edits = rendered.text, 0, list[Edit]()
        for start, stop in (*rendered.client, (len(rendered.text),) * 2):
            edits += [(*one.span(), self._aliases[one[0]]) for one in self._name.finditer(text, place, start)]
            place = stop
        return _edited(text, edits)

    def _unread_aliases(self, text: str, encoding: tokenizers.Encoding, ids: list[int]) -> Iterator[Edit]:
        """Tokens that the library would not have taken where they stand, such as half a word: they are text."""
        places = self._found(encoding, ids, text, self._alias_ids)
        read = {one.start() for start, stop in places for one in self._alias.finditer(text, start, stop)}
        for one in self._alias.finditer(text):
            if one.start() not in read:
                yield (*one.span(), self._names[one[0]])

    def _breaks(self, text: str, encoding: tokenizers.Encoding, ids: list[int]) -> Iterator[Edit]:
        """Some vocabularies have the names of control tokens as words too: such a word is read in two halves."""
        for start, stop in self._found(encoding, ids, text, self._words):
            if stop - start < 2:
                raise InvalidTextError(f"unexpected control token {text[start:stop]!r} in a chat; leave it out")
            yield start + 1, start + 1, self._break

    def _found(
        self, encoding: tokenizers.Encoding, ids: list[int], text: str, wanted: dict[int, str]
    ) -> Iterator[tuple[int, int]]:
        """Where tokens of these ids were read, without the white space that some take with them."""
        for index, token_id in enumerate(ids):
            if token_id in wanted:
                start, stop = encoding.token_to_chars(index) or (0, len(text))
                shown = text[start:stop]
                if token_id != self._unknown_id or shown.strip() == wanted[token_id]:
                    yield start + len(shown) - len(shown.lstrip()), stop - len(shown) + len(shown.rstrip())


class Touching:
    """Whether a client wrote any of some characters."""

    def __init__(self, rendered: Rendered) -> None:
        self._starts = [start for start, _ in rendered.client]
        self._stops = [stop for _, stop in rendered.client]

    def touches(self, start: int, stop: int) -> bool:
        """Whether a span has one of the characters from start to stop."""
        index = bisect_left(self._starts, stop) - 1
        return index >= 0 and self._stops[index] > start


def is_control(token: AddedToken, own_text: str) -> bool:
    """Whether a token has a meaning beyond its text, for a template that has this text of its own."""
    return bool(token.special or (token.content.strip() and token.content in own_text))


def _edited(text: str, edits: list[Edit]) -> str:
    pieces, place = list[str](), 0
    for start, stop, new in sorted(edits):
        pieces += [text[place:start], new]
        place = stop
    return "".join([*pieces, text[place:]])
