"""Pieces of an answer: characters and the part they belong to, however they are joined."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from quire.client.reply.outputs import (
    LOGPROB_BYTES,
    PIECE_BYTES,
    TEXT,
    Part,
    Piece,
    ReasoningPart,
    ToolCallPart,
    merge_pieces,
)
from quire.core.step import TokenLogprobs

PARTS: tuple[Part, ...] = (TEXT, ReasoningPart(), ToolCallPart(0, "call_a", "look"), ToolCallPart(1, "call_b", "look"))


@st.composite
def several(draw: st.DrawFn) -> list[Piece]:
    """Pieces of two answers in any order; an answer's last may say why it ended."""
    pieces = [
        Piece(
            draw(st.integers(0, 1)),
            draw(st.text("ab", max_size=2)),
            tuple(draw(st.lists(st.integers(0, 1), max_size=2))),
            draw(st.sampled_from([(), (TokenLogprobs(0, -0.5, 1, ((0, -0.5), (1, -1.0))),)])),
            part=draw(st.sampled_from(PARTS)),
        )
        for _ in range(draw(st.integers(0, 12)))
    ]
    return [*pieces, *(Piece(index, "", finish_reason="stop") for index in draw(st.sets(st.integers(0, 1))))]


def parts(pieces: list[Piece], index: int) -> list[tuple[Part, str]]:
    """An answer as a row of parts."""
    own = [piece for piece in pieces if piece.index == index]
    return [(part, "".join(one.delta for one in run)) for part, run in groupby(own, key=lambda piece: piece.part)]


@given(several())
def test_joining_keeps_every_part_of_every_answer_in_its_order(pieces: list[Piece]) -> None:
    whole = merge_pieces(pieces)
    for index in (0, 1):
        before, after = ([one for one in row if one.index == index] for row in (pieces, whole))
        assert [(one.part, one.delta) for one in after] == parts(pieces, index)
        for name in ("token_ids", "logprobs"):
            assert [x for one in after for x in getattr(one, name)] == [x for one in before for x in getattr(one, name)]
        assert [one.finish_reason for one in after[-1:]] == [one.finish_reason for one in before[-1:]]
    assert [index for index, _ in groupby(whole, key=lambda piece: piece.index)] == list(
        dict.fromkeys(piece.index for piece in pieces)
    )


@given(several(), several())
def test_it_does_not_matter_how_often_pieces_are_joined(first: list[Piece], second: list[Piece]) -> None:
    assert merge_pieces([*merge_pieces(first), *second]) == merge_pieces([*first, *second])


@given(several())
def test_pieces_count_the_same_alone_and_joined(pieces: list[Piece]) -> None:
    assert sum(one.num_bytes for one in merge_pieces(pieces)) == sum(one.num_bytes for one in pieces)


def test_only_what_an_answer_says_is_its_text() -> None:
    assert [Piece(0, "a", part=part).text for part in PARTS] == ["a", "", "", ""]


def test_a_piece_counts_its_characters_its_tokens_and_every_alternative() -> None:
    entry = TokenLogprobs(0, -0.5, 1, ((0, -0.5), (1, -1.0)))
    assert Piece(0, "ab", (0,), (entry,)).num_bytes == 2 * 2 + PIECE_BYTES + 3 * LOGPROB_BYTES
