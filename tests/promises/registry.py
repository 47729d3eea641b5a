"""Which sentences are promises, and which tests reach them: `docs/promises.toml` beside the pages themselves.

A promise is a bullet, a row of a table or a bold sentence of the README or of a page in `docs/concepts`. The registry
gives each an id, its words or how they begin, and tests that go through `quire serve`, the command line, or the public
Python API where it is about Python.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "docs" / "promises.toml"
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "concepts").glob("*.md")))
RULE = re.compile(r"\|[\s:|-]+\|")
"""The line between a table's header and its rows."""


@dataclass(frozen=True)
class Promise:
    """Something a page says that a user can hold it to."""

    page: str
    text: str
    """On one line."""


@dataclass(frozen=True)
class Entry:
    """A promise as the registry knows it."""

    id: str
    page: str
    text: str
    """How the promise begins."""
    tests: tuple[str, ...]
    """Node ids: a file of this repository and a function in it."""

    def is_of(self, promise: Promise) -> bool:
        """Whether this is that promise's entry."""
        return promise.page == self.page and promise.text.startswith(self.text)


def entries() -> list[Entry]:
    """All of the registry."""
    listed = tomllib.loads(REGISTRY.read_text())["promise"]
    return [Entry(one["id"], one["page"], one["text"], tuple(one["tests"])) for one in listed]


def promises(page: str) -> list[Promise]:
    """All promises of a page, in their order."""
    return [Promise(page, " ".join(text.split())) for text in promises_in((ROOT / page).read_text())]


def promises_in(markdown: str) -> Iterator[str]:
    """Bullets and rows as they are, and bold sentences of everything else. Code is no promise."""
    plain = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n", plain):
        lines = part.strip().splitlines()
        if any(line.startswith("|") for line in lines):
            yield from _rows(lines)
        elif any(_is_bullet(line) for line in lines):
            yield from _bullets(lines)
        else:
            yield from _bold_sentences(" ".join(lines))


def _rows(lines: list[str]) -> Iterator[str]:
    """Lines of a table below its rule."""
    rules = [at for at, line in enumerate(lines) if RULE.fullmatch(line.strip())]
    yield from (line for line in lines[(rules or [-1])[0] + 1 :] if line.startswith("|"))


def _is_bullet(line: str) -> bool:
    return bool(re.match(r"\s*([-*]|\d+\.)\s", line))


def _bullets(lines: list[str]) -> Iterator[str]:
    """Each with the lines that continue it; what stands before the first is a sentence like any other."""
    starts = [at for at, line in enumerate(lines) if _is_bullet(line)]
    yield from _bold_sentences(" ".join(lines[: starts[0]]))
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield " ".join(lines[start:end])


def _bold_sentences(text: str) -> Iterator[str]:
    """From a bold word on, to the next one or to the paragraph's end."""
    starts = [found.start() for found in re.finditer(r"\*\*[^*]+\*\*", text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=False):
        yield text[start:end].strip()


def missing_test(node_id: str) -> str:
    """What is wrong with a node id; nothing if there is such a test."""
    path, _, name = node_id.partition("::")
    file = ROOT / path
    if not file.is_file():
        return f"{path} is no file"
    function = name.partition("[")[0]
    found = re.search(rf"^def {re.escape(function)}\(", file.read_text(), re.MULTILINE)
    return "" if function.startswith("test_") and found else f"{path} has no test {function}"


def untested(promise: Promise, known: list[Entry]) -> str:
    """Why this promise has no test; nothing if it has one."""
    own = [entry for entry in known if entry.is_of(promise)]
    if len(own) != 1:
        return f"{promise.page}: {len(own)} entries for {promise.text[:80]!r}"
    if not own[0].tests:
        return f"{own[0].id} has no test"
    return "; ".join(filter(None, map(missing_test, own[0].tests)))
