"""Texts that remember which of their characters a client wrote. Pure; knows no template and no token.

A template takes a client's texts apart and puts them together with its own. Afterwards it must be known who wrote what,
because a client that writes the name of a control token has written text and not that token. So a client's text is a
`MarkedText`: a `str`, equal to the plain one, with spans beside it. Everything is made of two verbs, cut and join:

    spans     (start, stop) of the client's characters, in order, never touching each other
    sources   (start, stop, label) where it is known which message or tool they come from
    the rest  the template's own

What is not understood (`center`, `translate`, `encode` ...) is left to `str` and gives a plain text; the caller
must mark that as the client's: see `marked_like`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, SupportsIndex, TypeVar

from jinja2 import Undefined

Spans = tuple[tuple[int, int], ...]
Sources = tuple[tuple[int, int, str], ...]
"""Of a client's characters, in order; where they touch, their labels differ."""

MarkedSpan = TypeVar("MarkedSpan", bound=tuple[int, int] | tuple[int, int, str])
SCALARS = frozenset({str, int, float, bool, type(None)})


class MarkedText(str):
    """A text with spans that a client wrote: all of it unless said otherwise."""

    __slots__ = ("client", "sources")
    client: Spans
    sources: Sources

    def __new__(cls, text: str, client: Spans | None = None, sources: Sources = ()) -> "MarkedText":
        made = super().__new__(cls, text)
        whole = ((0, len(text)),) if text else ()
        made.client = whole if client is None else client
        made.sources = sources
        return made

    @classmethod
    def labelled(cls, text: str, label: str | None) -> "MarkedText":
        """All of it a client's, and from there."""
        return cls(text, None, ((0, len(text), label),) if label is not None and text else ())

    # -- the two verbs -------------------------------------------------------------------------------------------------

    def cut(self, start: int, stop: int) -> "MarkedText":
        """The characters from start to stop, which must lie inside."""
        spans = _within(self.client, start, stop)
        sources = _within(self.sources, start, stop)
        return MarkedText(
            str.__getitem__(self, slice(start, stop)),
            tuple((max(left, start) - start, min(right, stop) - start) for left, right in spans),
            tuple((max(left, start) - start, min(right, stop) - start, label) for left, right, label in sources),
        )

    def join(self, parts: Iterable[str], /) -> str:
        joined: list[str] = []
        for part in parts:
            joined += [self, part] if joined else [part]
        return concat(joined)

    # -- what follows from them ----------------------------------------------------------------------------------------

    def __str__(self) -> "MarkedText":
        return self

    def __iter__(self) -> Iterator[str]:
        return (self.cut(index, index + 1) for index in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> "MarkedText":
        if not isinstance(key, slice):
            index = range(len(self))[key]
            return self.cut(index, index + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self.cut(start, max(start, stop))
        return MarkedText(str.__getitem__(self, key), None if self.client else ())

    def __add__(self, other: Any) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return concat([self] * times)

    __rmul__ = __mul__

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._parts(super().splitlines(keepends), None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(super().partition(sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(super().rpartition(sep))

    def strip(self, chars: str | None = None, /) -> "MarkedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self.cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self.cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> "MarkedText":
        return self.cut(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> "MarkedText":
        return self.cut(0, len(super().removesuffix(suffix)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As `str` does it; what was put in is whose it was."""
        if not old:
            return str(marked_like(super().replace(old, new, count), self, new))
        between = new if isinstance(new, MarkedText) else MarkedText(new, ())
        return between.join(self.split(old, count))

    def upper(self) -> "MarkedText":
        return self._recased(super().upper())

    def lower(self) -> "MarkedText":
        return self._recased(super().lower())

    def title(self) -> "MarkedText":
        return self._recased(super().title())

    def capitalize(self) -> "MarkedText":
        return self._recased(super().capitalize())

    def _recased(self, text: str) -> "MarkedText":
        """The same letters in another case: one for one, or else all are the client's if one was."""
        if len(text) == len(self):
            return MarkedText(text, self.client, self.sources)
        return MarkedText.labelled(text, label_of(self)) if self.client else MarkedText(text, ())

    def _parts(self, texts: Sequence[str], sep: str | None) -> list[str]:
        """Texts found in this one in their order: with `sep` between them, or with white space."""
        parts, place = list[str](), 0
        for text in texts:
            start = place if sep is not None else self.find(text, place)
            parts.append(self.cut(start, start + len(text)))
            place = start + len(text) + len(sep or "")
        return parts

    def _three(self, texts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(texts[0]), len(texts[0]) + len(texts[1])
        return self.cut(0, first), self.cut(first, second), self.cut(second, len(self))


def _within(spans: tuple[MarkedSpan, ...], start: int, stop: int) -> tuple[MarkedSpan, ...]:
    """Those that have a character from start to stop. Searched for: a text of many spans is cut into many parts."""
    first = bisect_right(spans, start, key=itemgetter(1))
    return spans[first : bisect_left(spans, stop, lo=first, key=itemgetter(0))] if start < stop else ()


def concat(parts: Iterable[str]) -> str:
    """All parts one after the other; plain if no part is marked."""
    pieces = list(parts)
    text = "".join(pieces)
    spans: list[tuple[int, int]] = []
    sources: list[tuple[int, int, str]] = []
    offset = 0
    for piece in pieces:
        if isinstance(piece, MarkedText):
            for start, stop in piece.client:
                is_next = bool(spans) and spans[-1][1] == offset + start
                first = spans.pop()[0] if is_next else offset + start
                spans.append((first, offset + stop))
            for start, stop, label in piece.sources:
                is_next = bool(sources) and sources[-1][1:] == (offset + start, label)
                first = sources.pop()[0] if is_next else offset + start
                sources.append((first, offset + stop, label))
        offset += len(piece)
    return MarkedText(text, tuple(spans), tuple(sources)) if spans else text


def written(value: Any) -> str:
    """A value as text. What is neither a text nor a number may hold a client's words somewhere inside."""
    if isinstance(value, str):
        return value
    is_simple = type(value) in SCALARS or isinstance(value, Undefined)
    return str(value) if is_simple else MarkedText.labelled(str(value), label_of(value))


def mark(value: Any, label: str | None = None) -> Any:
    """What a client sent, with all its texts marked: in lists and mappings too, names among them. `label` says where it
    comes from."""
    if isinstance(value, str):
        return MarkedText.labelled(value, label)
    if isinstance(value, dict):
        return {mark(name, label): mark(one, label) for name, one in value.items()}
    return [mark(one, label) for one in value] if isinstance(value, list) else value


def label_of(*values: Any) -> str | None:
    """Where all of a client's text in these values comes from, if it is one place."""
    found = set[str | None]()
    left: list[Any] = [*values]
    while left:
        value = left.pop()
        kind = type(value)
        if kind is MarkedText:
            _add_labels(value, found)
        elif kind is dict:
            left += value
            left += value.values()
        elif kind in (list, tuple):
            left += value
        elif kind not in SCALARS and not is_plain(value):
            found.add(None)
        if len(found) > 1:
            return None
    return next(iter(found), None)


def _add_labels(text: MarkedText, found: set[str | None]) -> None:
    """None stands for an unknown source."""
    sources = text.sources
    if len(sources) == 1 and sources[0][1] - sources[0][0] == len(text):
        found.add(sources[0][2])
        return
    found.update(label for _, _, label in sources)
    if sum(stop - start for start, stop, _ in sources) != sum(stop - start for start, stop in text.client):
        found.add(None)


def is_plain(value: Any) -> bool:
    """Whether nothing of a client's can be in it. What is not known is taken not to be plain."""
    kind = type(value)
    if kind is MarkedText:
        return not value.client
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return kind in SCALARS or isinstance(value, str | Undefined)


def marked_like(result: Any, *sources: Any) -> Any:
    """What was made of the sources by code that marks nothing: a text is the client's unless all are plain."""
    if not isinstance(result, str) or isinstance(result, MarkedText) or all(map(is_plain, sources)):
        return result
    return MarkedText.labelled(result, label_of(*sources))
