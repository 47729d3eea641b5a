"""Finds text that changes with every request (dates, times, ids, numbers) in a line, and replaces it by placeholders.

    Today is 18 November 2026, 09:41  ─►  Today is <date>, <time>

Two lines with the same pattern are treated as versions of the same line. Pure. Regular expressions run on text of
bounded length and have bounded backtracking.
"""

import re
from dataclasses import dataclass
from typing import Literal

ChangingKind = Literal["dates", "times", "ids", "numbers"]
MAX_LINE_CHARS = 512
"""Only this many characters of a line are examined."""

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"(?:Mon(?:day)?|Tue(?:s(?:day)?)?|Wed(?:nesday)?|Thu(?:rs(?:day)?)?|Fri(?:day)?|Sat(?:urday)?|Sun(?:day)?)"
_DAY_NUMBER = r"[0-9]{1,2}(?:st|nd|rd|th)?"
_CLOCK = r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
_ZONE = r"(?: ?(?:UTC|GMT|CES?T|EES?T|[ECMP][SD]T|BST|JST|IST|Z)?(?:[+-][0-9]{1,2}:?(?:[0-9]{2})?)?)(?![A-Za-z0-9])"
_ISO_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_MIXED_CHARACTERS = r"(?=[A-Za-z_-]{0,40}[0-9])(?=[0-9a-z_-]{0,40}[A-Z])(?=[0-9A-Z_-]{0,40}[a-z])"
_PATTERNS: tuple[tuple[str, ChangingKind, str], ...] = (
    ("uuid", "ids", r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Za-z])"),
    ("moment", "times", rf"(?<![0-9]){_ISO_DATE}[T_ ]{_CLOCK}{_ZONE}"),
    ("date", "dates", rf"(?<![0-9])(?:{_ISO_DATE}|[0-9]{{4}}[/.][0-9]{{1,2}}[/.][0-9]{{1,2}})(?![0-9])"),
    ("date", "dates", r"(?<![0-9./-])[0-9]{1,2}(?:/[0-9]{1,2}/|\.[0-9]{1,2}\.|-[0-9]{1,2}-)[0-9]{2,4}(?![0-9./-])"),
    ("date", "dates", rf"\b(?:{_DAY},? )?{_MONTH} {_DAY_NUMBER}(?:,? [0-9]{{4}})?(?![0-9A-Za-z])"),
    ("date", "dates", rf"\b(?:{_DAY},? )?(?:the )?{_DAY_NUMBER} (?:of )?{_MONTH}(?:,? [0-9]{{4}})?(?![0-9A-Za-z])"),
    ("date", "dates", rf"\b{_MONTH},? [0-9]{{4}}\b"),
    ("date", "dates", rf"\b{_DAY}\b"),
    ("time", "times", rf"(?<![0-9:]){_CLOCK}{_ZONE}"),
    ("time", "times", r"(?<![0-9A-Za-z.])1[0-9]{9}(?:[0-9]{3}){0,3}(?:\.[0-9]{1,9})?(?![0-9A-Za-z])"),
    ("id", "ids", r"(?<![0-9A-Za-z])(?=[a-f]{0,40}[0-9])[0-9a-f]{8,128}(?![0-9A-Za-z])"),
    ("id", "ids", r"(?<![0-9A-Za-z])(?=[A-F]{0,40}[0-9])[0-9A-F]{8,128}(?![0-9A-Za-z])"),
    ("id", "ids", rf"(?<![0-9A-Za-z_-]){_MIXED_CHARACTERS}[0-9A-Za-z_-]{{16,128}}={{0,2}}(?![0-9A-Za-z_-])"),
    ("id", "ids", r"(?<![0-9A-Za-z])(?=[A-Za-z]{0,40}[0-9])(?=[0-9]{0,40}[A-Za-z])[0-9A-Za-z]{10,128}(?![0-9A-Za-z])"),
    ("n", "numbers", r"[A-Za-z]{0,8}[0-9][0-9A-Za-z]{0,127}"),
)  # fmt: skip
_ANY_PATTERN = re.compile("|".join(f"(?P<f{index}>{regex})" for index, (_, _, regex) in enumerate(_PATTERNS)))


@dataclass(frozen=True, slots=True)
class ChangingText:
    """A piece of a line that may differ in the next request."""

    kind: ChangingKind
    text: str


@dataclass(frozen=True, slots=True)
class LinePattern:
    """A line as a pattern with placeholders, and the texts that the placeholders replaced."""

    pattern: str
    changes: tuple[ChangingText, ...]
    ends: tuple[int, ...]
    """The end of each placeholder in the pattern, in the order of `changes`."""

    def split_after(self, index: int) -> tuple[str, str]:
        """Split the pattern after the placeholder of this index."""
        end = self.ends[index]
        return self.pattern[:end], self.pattern[end:]

    @property
    def kinds(self) -> frozenset[ChangingKind]:
        return frozenset(change.kind for change in self.changes)


def line_pattern(line: str) -> LinePattern:
    """Replace each changing text by a placeholder such as `<date>`. Plain numbers have the lowest precedence."""
    pattern, changes, ends, end = "", list[ChangingText](), list[int](), 0
    line = line[:MAX_LINE_CHARS]
    for match in _ANY_PATTERN.finditer(line):
        name, kind, _ = _PATTERNS[int((match.lastgroup or "f0")[1:])]
        pattern += f"{line[end : match.start()]}<{name}>"
        changes.append(ChangingText(kind, match[0]))
        ends.append(len(pattern))
        end = match.end()
    return LinePattern(pattern + line[end:], tuple(changes), tuple(ends))


def changed_kinds(old: LinePattern, new: LinePattern) -> list[ChangingKind]:
    """Return the kinds of the texts that differ between two lines with one pattern, in order, each kind once."""
    pairs = zip(old.changes, new.changes, strict=False)
    return list(dict.fromkeys(a.kind for a, b in pairs if a.text != b.text))


def first_change(old: LinePattern, new: LinePattern) -> int:
    """Return the index of the first text that differs between two lines of one pattern; 0 if none differs."""
    pairs = zip(old.changes, new.changes, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a.text != b.text), 0)
