"""Where a text ends. The rule against a plain search is in `property/test_text.py`; here are its corners."""

from quire.errors import InvalidTextError
from quire.text.stop_strings import Delta, StopStrings
from tests.support.errors import raises_code


def run(stops: list[str], *pieces: str) -> tuple[list[Delta], str]:
    search = StopStrings(stops)
    return [search.push(piece) for piece in pieces], search.flush()


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], "ab", "", "c") == ([Delta("ab"), Delta(""), Delta("c")], "")


def test_a_stop_string_is_found_across_pieces_and_nothing_follows_it() -> None:
    assert run(["END"], "abcE", "N", "Dxyz", "more") == ([Delta("abc"), Delta(""), Delta("", "END"), Delta("")], "")


def test_what_turns_out_to_be_no_stop_is_released() -> None:
    assert run(["aab"], "aaa", "c", "aa") == ([Delta("a"), Delta("aac"), Delta("")], "aa")


def test_the_first_to_be_complete_wins_over_one_that_began_earlier() -> None:
    assert run(["abcd", "bc"], "xabcd") == ([Delta("xa", "bc")], "")


def test_of_two_complete_at_once_the_longer_wins() -> None:
    assert run(["bc", "abc"], "xab", "c") == ([Delta("x"), Delta("", "abc")], "")


def test_a_stop_that_begins_another_wins_by_being_shorter() -> None:
    assert run(["\n\n", "\n"], "a\n\n") == ([Delta("a", "\n")], "")


def test_an_empty_stop_string_is_refused() -> None:
    with raises_code(InvalidTextError, "invalid_text"):
        StopStrings(["a", ""])


def test_a_long_text_that_nearly_matches_throughout_is_searched_once() -> None:
    stop = "a" * 200 + "b"
    search = StopStrings([stop])
    released = "".join(search.push("aaaa").text for _ in range(20_000))
    assert len(released) == 80_000 - 200
    assert search.push("b") == Delta("", stop)
