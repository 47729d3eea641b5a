"""Texts that are another at every request: dates, times, ids, numbers; found in a line and folded to what stays. Pure.

    Today is 18 November 2026, 09:41  ─►  Today is <date>, <time>

Two lines with the same folded form are one line of the client's, said twice. All patterns run over a bounded text, and
none of them tries one place in more than a few ways.
"""

import re
from dataclasses import dataclass
from typing import Literal

ChangingKind = Literal["dates", "times", "ids", "numbers"]
MAX_LINE_CHARS = 512
"""What of a line is looked at."""

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"(?:Mon(?:day)?|Tue(?:s(?:day)?)?|Wed(?:nesday)?|Thu(?:rs(?:day)?)?|Fri(?:day)?|Sat(?:urday)?|Sun(?:day)?)"
_NUMBER_OF_DAY = r"[0-9]{1,2}(?:st|nd|rd|th)?"
_CLOCK = r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
_ZONE = r"(?: ?(?:UTC|GMT|CES?T|EES?T|[ECMP][SD]T|BST|JST|IST|Z)?(?:[+-][0-9]{1,2}:?(?:[0-9]{2})?)?)(?![A-Za-z0-9])"
_ISO_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_MIXED = r"(?=[A-Za-z_-]{0,40}[0-9])(?=[0-9a-z_-]{0,40}[A-Z])(?=[0-9A-Z_-]{0,40}[a-z])"
_FORMS: tuple[tuple[str, ChangingKind, str], ...] = (
    ("uuid", "ids", r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Za-z])"),
    ("moment", "times", rf"(?<![0-9]){_ISO_DATE}[T_ ]{_CLOCK}{_ZONE}"),
    ("date", "dates", rf"(?<![0-9])(?:{_ISO_DATE}|[0-9]{{4}}[/.][0-9]{{1,2}}[/.][0-9]{{1,2}})(?![0-9])"),
    ("date", "dates", r"(?<![0-9./-])[0-9]{1,2}(?:/[0-9]{1,2}/|\.[0-9]{1,2}\.|-[0-9]{1,2}-)[0-9]{2,4}(?![0-9./-])"),
    ("date", "dates", rf"\b(?:{_DAY},? )?{_MONTH} {_NUMBER_OF_DAY}(?:,? [0-9]{{4}})?(?![0-9A-Za-z])"),
    ("date", "dates", rf"\b(?:{_DAY},? )?(?:the )?{_NUMBER_OF_DAY} (?:of )?{_MONTH}(?:,? [0-9]{{4}})?(?![0-9A-Za-z])"),
    ("date", "dates", rf"\b{_MONTH},? [0-9]{{4}}\b"),
    ("date", "dates", rf"\b{_DAY}\b"),
    ("time", "times", rf"(?<![0-9:]){_CLOCK}{_ZONE}"),
    ("time", "times", r"(?<![0-9A-Za-z.])1[0-9]{9}(?:[0-9]{3}){0,3}(?:\.[0-9]{1,9})?(?![0-9A-Za-z])"),
    ("id", "ids", r"(?<![0-9A-Za-z])(?=[a-f]{0,40}[0-9])[0-9a-f]{8,128}(?![0-9A-Za-z])"),
    ("id", "ids", r"(?<![0-9A-Za-z])(?=[A-F]{0,40}[0-9])[0-9A-F]{8,128}(?![0-9A-Za-z])"),
    ("id", "ids", rf"(?<![0-9A-Za-z_-]){_MIXED}[0-9A-Za-z_-]{{16,128}}={{0,2}}(?![0-9A-Za-z_-])"),
    ("id", "ids", r"(?<![0-9A-Za-z])(?=[A-Za-z]{0,40}[0-9])(?=[0-9]{0,40}[A-Za-z])[0-9A-Za-z]{10,128}(?![0-9A-Za-z])"),
    ("n", "numbers", r"[A-Za-z]{0,8}[0-9][0-9A-Za-z]{0,127}"),
)  # fmt: skip
_ANY = re.compile("|".join(f"(?P<f{at}>{form})" for at, (_, _, form) in enumerate(_FORMS)))


@dataclass(frozen=True, slots=True)
class ChangingText:
    """One text in a line that may be another the next time."""

    kind: ChangingKind
    text: str


@dataclass(frozen=True, slots=True)
class FoldedLine:
    """A line as a pattern, and what was folded in it."""

    pattern: str
    changes: tuple[ChangingText, ...]
    ends: tuple[int, ...]
    """Where in the pattern each of them ends."""

    def around(self, number: int) -> tuple[str, str]:
        """The pattern before the end of one of its changes, and behind it."""
        end = self.ends[number]
        return self.pattern[:end], self.pattern[end:]

    @property
    def kinds(self) -> frozenset[ChangingKind]:
        return frozenset(one.kind for one in self.changes)


def fold(line: str) -> FoldedLine:
    """The line's pattern: every changing text gives way to its name in angle brackets, runs of digits last of all."""
    pattern, changes, ends, end = "", list[ChangingText](), list[int](), 0
    line = line[:MAX_LINE_CHARS]
    for found in _ANY.finditer(line):
        name, kind, _ = _FORMS[int((found.lastgroup or "f0")[1:])]
        pattern += f"{line[end : found.start()]}<{name}>"
        changes.append(ChangingText(kind, found[0]))
        ends.append(len(pattern))
        end = found.end()
    return FoldedLine(pattern + line[end:], tuple(changes), tuple(ends))


def changed_kinds(one: FoldedLine, other: FoldedLine) -> list[ChangingKind]:
    """Of two lines of one pattern: the kinds of what differs, in its order."""
    pairs = zip(one.changes, other.changes, strict=False)
    return list(dict.fromkeys(ours.kind for ours, theirs in pairs if ours.text != theirs.text))


def first_change(one: FoldedLine, other: FoldedLine) -> int:
    """The number of the first changing text that two lines of one pattern differ in."""
    pairs = zip(one.changes, other.changes, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours.text != theirs.text), 0)
