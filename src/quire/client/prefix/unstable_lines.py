"""Classify the differences between two similar prompts by their texts, gap by gap. Pure.

    numbers, dates, times, ids   the same line with a different number, date, time or id
    order                        the same words in a different order: tools, keys of JSON
    text                         a line of the system text or of a tool with different words
    history                      the same conversation continues, with earlier messages rewritten

Any other gap means that the prompts are different requests, which is not a problem.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Literal

from quire.client.prefix.kept_prompts import KeptPrompt
from quire.client.prefix.prompt_alignment import MIN_RUN, WIDTH, Gap
from quire.text.chat.changing_text import MAX_LINE_CHARS, LinePattern, changed_kinds, first_change, line_pattern

UnstableKind = Literal["dates", "times", "ids", "numbers", "order", "text", "history"]
Place = Literal["system", "tool", "message", "text"]
"""The part of the prompt that contains a gap: system text, tools, other messages, or `text` (plain or template)."""
PROMPT_PLACES: frozenset[Place] = frozenset({"system", "tool"})

CONTEXT_TOKENS = 96
"""Tokens decoded on either side of a gap, to complete its lines."""
MAX_GAP_TOKENS = 4096
"""Only this many tokens of a gap are decoded."""
MAX_LINES = 12
MAX_TEXT_TOKENS = 256
"""Longer gaps with different words count as different texts, not as a changed line."""
MAX_PATTERN_CHARS = 120
CHARS_BEFORE, CHARS_AFTER, CHARS_OF_MESSAGE = 40, 24, 16
"""Characters of a long line before and after its change (in messages: after) that form its pattern."""
MIN_SHARE = 0.05
"""Minimum fraction of the prompt that is equal after a gap; smaller losses are ignored."""
MIN_WORDS, MANY_WORDS, MAX_UNMATCHED = 4, 40, 0.07
MAX_FAILED_SEARCHES = 3
"""Maximum failed searches for a reordering per prompt, because each may read the whole rest of the prompt."""
WORD = re.compile(r"\w+")
LAST_WORD, FIRST_WORD = re.compile(r"\w{1,40}$"), re.compile(r"^\w{1,40}")
EVIDENCE_TOKENS, MIN_EVIDENCE = 16, 6
"""Tokens at the end of an answer by which a prompt that continues it is recognized, and their minimum number."""
TAIL_TOKENS = 12
GAP_TOKENS, SMALL_SIDE = 8, 24
"""In a rewritten history, the gap has at least GAP_TOKENS tokens in one prompt and at most SMALL_SIDE in the other."""


@dataclass(frozen=True, slots=True)
class Instability:
    """A gap that prevents cache hits, and its cost for one request."""

    kind: UnstableKind
    line: str
    """The line in the client's prompt."""
    pattern: str
    """The constant part of the line, by which instabilities are grouped."""
    value: bytes
    """Hash of the text in the gap."""
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class ComparedPrompts:
    """A prompt (`ours`), an earlier prompt of the same tenant (`theirs`), and their differences."""

    ours: bytes
    theirs: KeptPrompt
    gaps: Sequence[Gap]
    text_of: Callable[[Sequence[int]], str]
    place_of: Callable[[Gap], Place]
    around: Callable[[Gap, int], tuple[int, int]] = lambda gap, size: (gap.start - size, gap.stop + size)
    """Returns the token range around a gap of our prompt, within its prompt part and at most `size` on either side."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """The texts of a gap in both prompts, and the common text on the same lines before (`head`) and after (`tail`)."""

    head: str
    ours: str
    theirs: str
    tail: str

    @property
    def lines(self) -> list[str]:
        return f"{self.head}{self.ours}{self.tail}".split("\n")

    @property
    def their_lines(self) -> list[str]:
        return f"{self.head}{self.theirs}{self.tail}".split("\n")

    def whole_words(self, text: str) -> str:
        """Extend a text of the gap to whole words at both ends."""
        word_start, word_end = LAST_WORD.search(self.head), FIRST_WORD.match(self.tail)
        return (word_start[0] if word_start else "") + text + (word_end[0] if word_end else "")

    @property
    def first_line(self) -> str:
        """The first line of our prompt that differs."""
        pairs = zip(self.lines, self.their_lines, strict=False)
        return next((line for line, their_line in pairs if line != their_line), self.lines[-1])


def instabilities(compared: ComparedPrompts) -> list[Instability]:
    """Return the instabilities of a prompt in order of position."""
    results, index, num_failed = list[Instability](), 0, 0
    sides_at = cache(lambda gap_index: _sides(compared, compared.gaps[gap_index]))
    while index < len(compared.gaps):
        gap = compared.gaps[index]
        sides = sides_at(index)
        place = compared.place_of(gap)
        instability, num_gaps = _changed_line(compared, gap, sides, place), 1
        if instability is None and place != "message" and num_failed < MAX_FAILED_SEARCHES:
            instability, num_gaps = _reordered(compared, index, sides_at)
            num_failed += instability is None
        if instability is None:
            instability = _changed_words(compared, gap, sides, place) or _rewritten_history(compared, gap, sides, place)
        if instability is not None:
            results.append(instability)
        index += num_gaps
    return results


def _changed_line(compared: ComparedPrompts, gap: Gap, sides: _Sides, place: Place) -> Instability | None:
    """Detect equal lines with different dates, times, ids or numbers."""
    lines, their_lines = sides.lines, sides.their_lines
    if not _is_costly(compared, gap) or len(lines) != len(their_lines) or len(lines) > MAX_LINES:
        return None
    if max(map(len, lines)) > MAX_LINE_CHARS or max(map(len, their_lines)) > MAX_LINE_CHARS:
        return None
    patterns = [(line, line_pattern(line), line_pattern(other)) for line, other in zip(lines, their_lines, strict=True)]
    if any(ours.pattern != theirs.pattern for _, ours, theirs in patterns):
        return None
    # Numbers in user messages vary naturally; they count only in system text, tools or earlier messages.
    do_numbers_count = place in PROMPT_PLACES or _is_continued(compared)
    for line, ours, theirs in patterns:
        kinds = [kind for kind in changed_kinds(ours, theirs) if kind != "numbers" or do_numbers_count]
        if kinds:
            return Instability(kinds[0], line.strip(), _pattern(ours, theirs, place), _value(sides.ours), gap.num_alike)
    return None


def _pattern(ours: LinePattern, theirs: LinePattern, place: Place) -> str:
    """Return the pattern of a line; for long lines and messages, only the text around the first change."""
    if len(ours.pattern) <= MAX_PATTERN_CHARS and place != "message":
        return ours.pattern.strip()
    before, after = ours.split_after(first_change(ours, theirs))
    return before[-CHARS_BEFORE:].lstrip() + after[: CHARS_OF_MESSAGE if place == "message" else CHARS_AFTER].rstrip()


def _reordered(compared: ComparedPrompts, i: int, sides_at: Callable[[int], _Sides]) -> tuple[Instability | None, int]:
    """Detect equal words in a different order over one or more gaps; also return the number of gaps."""
    first, words, ours = compared.gaps[i], WordBalance(), list[str]()
    for num_gaps, last in enumerate(compared.gaps[i:], start=1):
        gap_sides = sides_at(i + num_gaps - 1)
        ours.append(gap_sides.whole_words(gap_sides.ours))
        words.add(ours[-1], gap_sides.whole_words(gap_sides.theirs))
        size = min(last.stop - first.start, last.other_stop - first.other_start)
        if words.is_reordered and size + last.num_alike >= MIN_RUN:
            num_lost = size + last.num_alike
            return Instability(
                "order", sides_at(i).first_line.strip(), "order", _value("\n".join(ours)), num_lost
            ), num_gaps
    return None, 1


class WordBalance:
    """Compares the words of two growing texts, regardless of their order."""

    def __init__(self) -> None:
        self._balance = Counter[str]()
        """Word -> count in our text minus count in the other text."""
        self._num_unmatched = self._num_ours = self._num_theirs = 0
        self._is_moved = False

    def add(self, our_text: str, their_text: str) -> None:
        """Extend both texts."""
        ours, theirs = WORD.findall(our_text), WORD.findall(their_text)
        self._is_moved = self._is_moved or ours != theirs
        self._num_ours, self._num_theirs = self._num_ours + len(ours), self._num_theirs + len(theirs)
        for words, step in ((ours, 1), (theirs, -1)):
            for word in words:
                balance = self._balance[word]
                self._balance[word] = balance + step
                self._num_unmatched += abs(balance + step) - abs(balance)

    @property
    def is_reordered(self) -> bool:
        """Whether both texts have the same words in a different order; long texts may differ in a few words."""
        max_words = max(self._num_ours, self._num_theirs)
        if not self._is_moved or max_words < MIN_WORDS:
            return False
        max_unmatched = MAX_UNMATCHED * max_words if max_words >= MANY_WORDS else 0
        return abs(self._num_ours - self._num_theirs) <= max_unmatched and self._num_unmatched <= 2 * max_unmatched


def _changed_words(compared: ComparedPrompts, gap: Gap, sides: _Sides, place: Place) -> Instability | None:
    """Detect a line of system text or tools with different words, followed by a longer equal text."""
    size = max(gap.stop - gap.start, gap.other_stop - gap.other_start)
    if place not in PROMPT_PLACES or size > min(MAX_TEXT_TOKENS, gap.num_alike) or not _is_costly(compared, gap):
        return None
    if len(sides.lines) > MAX_LINES or len(sides.their_lines) > MAX_LINES:
        return None
    before = line_pattern(LAST_WORD.sub("", sides.head)).pattern[-CHARS_BEFORE:].strip()
    after = line_pattern(FIRST_WORD.sub("", sides.tail, count=1)).pattern[:CHARS_AFTER].strip()
    return Instability("text", sides.first_line.strip(), f"{before}…{after}", _value(sides.ours), gap.num_alike)


def _rewritten_history(compared: ComparedPrompts, gap: Gap, sides: _Sides, place: Place) -> Instability | None:
    """Detect earlier messages of a continued conversation that were removed, added or shortened."""
    sizes = (gap.stop - gap.start, gap.other_stop - gap.other_start)
    is_uneven = min(sizes) <= SMALL_SIDE and max(sizes) >= max(GAP_TOKENS, 2 * min(sizes))
    if place == "system" or not is_uneven or gap.num_alike < MIN_RUN or not _is_continued(compared):
        return None
    text, pattern = (sides.ours, "longer") if sizes[0] > sizes[1] else (sides.theirs, "shorter")
    line = next((line for line in text.split("\n") if line.strip()), "")
    return Instability("history", line.strip(), pattern, _value(text), gap.num_alike)


def _is_continued(compared: ComparedPrompts) -> bool:
    """Return whether our prompt contains the end of their answer or, if the answer is short, of their prompt."""
    theirs, ours = compared.theirs, compared.ours
    answer = theirs.tokens[theirs.num_prompt_tokens * WIDTH : -WIDTH]
    if len(answer) >= MIN_EVIDENCE * WIDTH:
        return _contains(ours, answer[-EVIDENCE_TOKENS * WIDTH :])
    prompt = theirs.tokens[: theirs.num_prompt_tokens * WIDTH]
    return len(prompt) >= TAIL_TOKENS * WIDTH and _contains(ours[:-WIDTH], prompt[-TAIL_TOKENS * WIDTH :])


def _contains(tokens: bytes, part: bytes) -> bool:
    position = tokens.find(part)
    while position >= 0 and position % WIDTH:
        position = tokens.find(part, position + 1)
    return position >= 0


def _is_costly(compared: ComparedPrompts, gap: Gap) -> bool:
    return gap.num_alike >= max(MIN_RUN, MIN_SHARE * len(compared.ours) / WIDTH)


def _sides(compared: ComparedPrompts, gap: Gap) -> _Sides:
    ours = compared.ours
    first, after = compared.around(gap, CONTEXT_TOKENS)
    head = _text(compared, ours, max(0, first), gap.start)
    tail = _text(compared, ours, gap.stop, min(after, gap.stop + gap.num_alike))
    return _Sides(
        head.rpartition("\n")[2],
        _text(compared, ours, gap.start, gap.stop),
        _text(compared, compared.theirs.tokens, gap.other_start, gap.other_stop),
        tail.partition("\n")[0],
    )


def _text(compared: ComparedPrompts, tokens: bytes, start: int, stop: int) -> str:
    stop = min(stop, start + MAX_GAP_TOKENS)
    return compared.text_of(memoryview(tokens[start * WIDTH : stop * WIDTH]).cast("I").tolist())


def _value(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
