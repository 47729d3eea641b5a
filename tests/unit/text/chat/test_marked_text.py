"""Texts that know who wrote them behave as texts, and their marks go where their characters go."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.chat.rendering.marked_text import MarkedText, as_text, concat, is_plain, mark, marked_like

PIECES = st.lists(st.tuples(st.text("ab \n<>ßİ", max_size=6), st.booleans()), max_size=6)

CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("split", ()), ("split", ("a",)), ("split", ("ab", 1)), ("split", (None, 1)), ("rsplit", ("b", 1)),
    ("rsplit", (None, 1)), ("splitlines", ()), ("splitlines", (True,)), ("partition", ("<",)), ("rpartition", ("a",)),
    ("strip", ()), ("strip", ("ab",)), ("lstrip", ()), ("rstrip", ("> ",)), ("removeprefix", ("a",)),
    ("removesuffix", ("b",)), ("replace", ("a", "xyz")), ("replace", ("b", "", 1)), ("replace", ("", "-")),
    ("upper", ()), ("lower", ()), ("title", ()), ("capitalize", ()), ("join", (["x", "y"],)), ("__mul__", (3,)),
    ("__getitem__", (slice(1, 4),)), ("__getitem__", (slice(-3, None),)), ("__getitem__", (slice(None, None, -1),)),
    ("__add__", ("z",)), ("__str__", ()), ("center", (9,)), ("__eq__", ("a",)), ("find", ("b",)),
]  # fmt: skip


def put_together(pieces: list[tuple[str, bool]]) -> str:
    return concat(MarkedText(text) if is_client else text for text, is_client in pieces)


def marks(text: str) -> str:
    """The client's characters, all others as dots."""
    spans = text.client_spans if isinstance(text, MarkedText) else ()
    shown = ["."] * len(text)
    for start, stop in spans:
        shown[start:stop] = text[start:stop]
    return "".join(shown)


@settings(deadline=None, max_examples=400)
@given(PIECES, st.sampled_from(CALLS))
def test_every_method_gives_what_a_plain_text_gives(
    pieces: list[tuple[str, bool]], call: tuple[str, tuple[Any, ...]]
) -> None:
    name, arguments = call
    text = put_together(pieces)
    plain = str.__str__(text)
    marked = text if isinstance(text, MarkedText) else MarkedText(text, ())
    assert getattr(marked, name)(*arguments) == getattr(plain, name)(*arguments)
    assert list(marked) == list(plain)
    assert hash(marked) == hash(plain)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(["a", " ", "\n", "A", " A", "a\nA"]), st.booleans()), max_size=8))
def test_marks_stay_with_their_characters(pieces: list[tuple[str, bool]]) -> None:
    """The client writes capitals here, the template small letters: so a mark in the wrong place can be seen."""
    text = concat(MarkedText(text.upper()) if is_client else text.lower() for text, is_client in pieces)
    marked = text if isinstance(text, MarkedText) else MarkedText(text, ())
    made = [
        marked.strip(), marked.lstrip("a"), marked.rstrip(), marked[1:], marked[:-1], *marked,
        *marked.split(), *marked.split("a"), *marked.split("\n", 1), *marked.rsplit(None, 1), *marked.splitlines(True),
        *marked.partition("A"), *marked.rpartition(" "), marked.replace("a", "b"), marked.replace(" ", MarkedText("C")),
        marked + "x", "x" + marked, marked * 2, ", ".join(marked.split()), MarkedText(", ", ()).join(marked.split()),
    ]  # fmt: skip
    for one in made:
        if isinstance(one, MarkedText):
            assert "".join(filter(str.isalpha, marks(one))) == "".join(filter(str.isupper, one)), (marked, one)


def test_what_str_makes_of_a_marked_text_by_itself_is_seen_and_marked() -> None:
    made = MarkedText("x").center(5)
    assert type(made) is str
    assert marks(marked_like(made, MarkedText("x"))) == "  x  "
    assert type(marked_like("abc", "a", 5, ["b", ("c", None)])) is str
    assert marks(marked_like("abc", [{"k": MarkedText("b")}])) == "abc"


@pytest.mark.parametrize(
    "value", [object(), range(3), iter("ab"), b"x", {1, 2}, MarkedText("x"), {"a": [MarkedText("b")]}]
)
def test_what_is_not_known_is_not_plain(value: object) -> None:
    assert not is_plain(value)


def test_values_are_written_as_ever_and_lists_are_the_clients() -> None:
    assert [as_text(one) for one in (None, True, 1, 1.5, "x", ["a"])] == ["None", "True", "1", "1.5", "x", "['a']"]
    assert type(as_text(5)) is str
    assert marks(as_text(["a"])) == "['a']"


def test_all_texts_of_what_a_client_sent_are_marked_names_too() -> None:
    given = {"a": ["b", {"c": 1}], "d": None}
    marked = mark(given)
    assert marked == given
    assert all(isinstance(name, MarkedText) for name in (*marked, *marked["a"][1], marked["a"][0]))
    assert marked["d"] is None


def test_an_empty_text_is_nobodys() -> None:
    assert MarkedText("").client_spans == ()
    assert is_plain(MarkedText(""))


def test_neighbours_become_one_span() -> None:
    joined = concat([MarkedText("a"), MarkedText("b"), "c", MarkedText("d")])
    assert isinstance(joined, MarkedText)
    assert joined.client_spans == ((0, 2), (3, 4))


def test_a_number_is_not_added_to_a_text() -> None:
    call: Callable[[], Any] = lambda: MarkedText("a") + 1  # noqa: E731
    with pytest.raises(TypeError):
        call()
