"""Strings that track which of their characters a client wrote. Pure; independent of templates and tokens.

A template splits a client's texts and joins them with its own. Afterwards the origin of each character must be known,
because a control token's name in a client's text must stay text. So a client's text is a `MarkedText`: a `str`, equal
to the plain string, with attributes for the origins. All other methods are built on two, `cut` and `join`:

    client_spans    (start, stop) of the client's characters, in order and not adjacent
    labeled_spans   (start, stop, label) of client characters whose message or tool is known: its label
    All other characters are the template's.

Methods that are not overridden (`center`, `translate`, `encode` ...) return plain strings, which the caller must mark
as the client's with `marked_like`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, SupportsIndex, TypeVar

from jinja2 import Undefined

Spans = tuple[tuple[int, int], ...]
Labels = tuple[tuple[int, int, str], ...]
"""(start, stop, label) of client characters, in order; adjacent spans have different labels."""

MarkedSpan = TypeVar("MarkedSpan", bound=tuple[int, int] | tuple[int, int, str])
SCALARS = frozenset({str, int, float, bool, type(None)})


class MarkedText(str):
    """A string with the spans that a client wrote; by default all of it."""

    __slots__ = ("client_spans", "labeled_spans")
    client_spans: Spans
    labeled_spans: Labels

    def __new__(cls, text: str, client: Spans | None = None, labels: Labels = ()) -> "MarkedText":
        marked = super().__new__(cls, text)
        full_span = ((0, len(text)),) if text else ()
        marked.client_spans = full_span if client is None else client
        marked.labeled_spans = labels
        return marked

    @classmethod
    def labelled(cls, text: str, label: str | None) -> "MarkedText":
        """Return a text that a client wrote entirely, with this source label."""
        return cls(text, None, ((0, len(text), label),) if label is not None and text else ())

    # -- the two operations --------------------------------------------------------------------------------------------

    def cut(self, start: int, stop: int) -> "MarkedText":
        """Return the characters from start to stop; both must be within the text."""
        spans = _within(self.client_spans, start, stop)
        labeled = _within(self.labeled_spans, start, stop)
        return MarkedText(
            str.__getitem__(self, slice(start, stop)),
            tuple((max(left, start) - start, min(right, stop) - start) for left, right in spans),
            tuple((max(left, start) - start, min(right, stop) - start, label) for left, right, label in labeled),
        )

    def join(self, parts: Iterable[str], /) -> str:
        joined: list[str] = []
        for part in parts:
            joined += [self, part] if joined else [part]
        return concat(joined)

    # -- string methods built on them ----------------------------------------------------------------------------------

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
        return MarkedText(str.__getitem__(self, key), None if self.client_spans else ())

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
        return self._triple(super().partition(sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._triple(super().rpartition(sep))

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
        """Like `str.replace`; the inserted text keeps its own marks."""
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
        """Return the text in another case. If its length differs, all of it is the client's if any character was."""
        if len(text) == len(self):
            return MarkedText(text, self.client_spans, self.labeled_spans)
        return MarkedText.labelled(text, label_of(self)) if self.client_spans else MarkedText(text, ())

    def _parts(self, texts: Sequence[str], sep: str | None) -> list[str]:
        """Cut out these texts, which follow one another with `sep` or white space between them."""
        parts, end = list[str](), 0
        for text in texts:
            start = end if sep is not None else self.find(text, end)
            parts.append(self.cut(start, start + len(text)))
            end = start + len(text) + len(sep or "")
        return parts

    def _triple(self, texts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(texts[0]), len(texts[0]) + len(texts[1])
        return self.cut(0, first), self.cut(first, second), self.cut(second, len(self))


def _within(spans: tuple[MarkedSpan, ...], start: int, stop: int) -> tuple[MarkedSpan, ...]:
    """Return the spans that overlap start to stop, by binary search, because texts with many spans are cut often."""
    first = bisect_right(spans, start, key=itemgetter(1))
    return spans[first : bisect_left(spans, stop, lo=first, key=itemgetter(0))] if start < stop else ()


def concat(parts: Iterable[str]) -> str:
    """Concatenate the parts; the result is a plain `str` if no part is marked."""
    pieces = list(parts)
    text = "".join(pieces)
    spans: list[tuple[int, int]] = []
    labeled: list[tuple[int, int, str]] = []
    offset = 0
    for piece in pieces:
        if isinstance(piece, MarkedText):
            for start, stop in piece.client_spans:
                is_adjacent = bool(spans) and spans[-1][1] == offset + start
                first = spans.pop()[0] if is_adjacent else offset + start
                spans.append((first, offset + stop))
            for start, stop, label in piece.labeled_spans:
                is_adjacent = bool(labeled) and labeled[-1][1:] == (offset + start, label)
                first = labeled.pop()[0] if is_adjacent else offset + start
                labeled.append((first, offset + stop, label))
        offset += len(piece)
    return MarkedText(text, tuple(spans), tuple(labeled)) if spans else text


def as_text(value: Any) -> str:
    """Return a value as text. Containers and other objects may include client text, so their text is the client's."""
    if isinstance(value, str):
        return value
    is_simple = type(value) in SCALARS or isinstance(value, Undefined)
    return str(value) if is_simple else MarkedText.labelled(str(value), label_of(value))


def mark(value: Any, label: str | None = None) -> Any:
    """Return a client's value with all strings marked, including those in lists and mappings and their keys. `label`
    identifies the message or tool."""
    if isinstance(value, str):
        return MarkedText.labelled(value, label)
    if isinstance(value, dict):
        return {mark(name, label): mark(item, label) for name, item in value.items()}
    return [mark(item, label) for item in value] if isinstance(value, list) else value


def label_of(*values: Any) -> str | None:
    """Return the label of all client text in these values, or None if there are several labels or text without one."""
    labels = set[str | None]()
    stack: list[Any] = [*values]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind is MarkedText:
            _add_labels(value, labels)
        elif kind is dict:
            stack += value
            stack += value.values()
        elif kind in (list, tuple):
            stack += value
        elif kind not in SCALARS and not is_plain(value):
            labels.add(None)
        if len(labels) > 1:
            return None
    return next(iter(labels), None)


def _add_labels(text: MarkedText, labels: set[str | None]) -> None:
    """Add a text's labels to `labels`, and None if some client characters have no label."""
    spans = text.labeled_spans
    if len(spans) == 1 and spans[0][1] - spans[0][0] == len(text):
        labels.add(spans[0][2])
        return
    labels.update(label for _, _, label in spans)
    if sum(stop - start for start, stop, _ in spans) != sum(stop - start for start, stop in text.client_spans):
        labels.add(None)


def is_plain(value: Any) -> bool:
    """Return whether a value certainly has no client text; False for unknown types."""
    kind = type(value)
    if kind is MarkedText:
        return not value.client_spans
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return kind in SCALARS or isinstance(value, str | Undefined)


def marked_like(result: Any, *inputs: Any) -> Any:
    """Mark the result of a function that drops marks: a string is the client's unless all `inputs` are plain."""
    if not isinstance(result, str) or isinstance(result, MarkedText) or all(map(is_plain, inputs)):
        return result
    return MarkedText.labelled(result, label_of(*inputs))
