"""Every promise of the front page and of the concepts is registered with a test, and every entry is still a promise."""

import pytest

from tests.promises.registry import (
    PAGES,
    ROOT,
    Entry,
    Promise,
    entries,
    missing_test,
    promises,
    promises_in,
    untested,
)


@pytest.mark.parametrize("page", PAGES)
def test_every_bullet_row_and_bold_sentence_has_an_entry_with_a_test(page: str) -> None:
    known = entries()
    assert [why for promise in promises(page) if (why := untested(promise, known))] == []


def test_every_entry_is_one_promise_of_its_page_and_has_an_id_of_its_own() -> None:
    listed = entries()
    ids = [entry.id for entry in listed]
    assert len(set(ids)) == len(ids)
    for entry in listed:
        assert entry.page in PAGES, entry
        page = " ".join((ROOT / entry.page).read_text().split())
        assert entry.text in page, f"{entry.id}: the page does not say this any more"
        assert sum(entry.is_of(promise) for promise in promises(entry.page)) == 1, entry.id


def test_only_tests_that_reach_a_server_the_commands_or_the_public_api_count() -> None:
    """They live in rooms where nothing else does."""
    rooms = ("tests/promises/", "tests/api/", "tests/e2e/")
    strange = [entry.id for entry in entries() for node in entry.tests if not node.startswith(rooms)]
    assert strange == []


PAGE = """\
# Title

Words, and **a bold word**, and more. **Another one.** Its sentence.

| a | b |
|---|---|
| one | row |

Before
- first **bold** bullet
  goes on
- second

```
- no bullet
```
"""


def test_bullets_rows_and_bold_sentences_are_promises_and_nothing_else() -> None:
    found = [" ".join(text.split()) for text in promises_in(PAGE)]
    assert found == [
        "**a bold word**, and more.",
        "**Another one.** Its sentence.",
        "| one | row |",
        "- first **bold** bullet goes on",
        "- second",
    ]


def test_a_promise_without_an_entry_or_with_a_test_that_is_gone_is_noticed() -> None:
    here = "tests/promises/test_registry.py::test_bullets_rows_and_bold_sentences_are_promises_and_nothing_else"
    promise = Promise("README.md", "- second thing")
    assert untested(promise, []) == "README.md: 0 entries for '- second thing'"
    assert untested(promise, [Entry("a", "README.md", "- second", ())]) == "a has no test"
    assert untested(promise, [Entry("a", "README.md", "- second", (here,))]) == ""
    assert missing_test("tests/promises/test_registry.py::test_gone") != ""
    assert missing_test("tests/gone.py::test_gone") != ""
