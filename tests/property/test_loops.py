"""A loop is found at exactly the token at which its definition is met, and nothing else is a loop."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.client.reply.loops import KEPT_TOKENS, MAX_PERIOD, SEARCH_TOKENS, LoopDetector, min_loop_tokens


@dataclass
class Definition:
    """The definition, with all periods at once."""

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.num_chosen = [0]
        self.firsts = dict.fromkeys(range(1, MAX_PERIOD + 1), 0)
        """By period: where the longest end with this period begins."""

    def push(self, token_id: int, *, is_forced: bool) -> bool:
        at = len(self.tokens)
        self.tokens.append(token_id)
        self.num_chosen.append(self.num_chosen[-1] + (not is_forced))
        for period in self.firsts:
            if at >= period and self.tokens[at - period] != token_id:
                self.firsts[period] = at - period + 1
            first = self.firsts[period]
            if at - first >= period and self.num_chosen[-1] - self.num_chosen[first] >= min_loop_tokens(period):
                return True
        return False


def position(detector: Definition | LoopDetector, tokens: Sequence[tuple[int, bool]]) -> int | None:
    return next((at for at, (token, forced) in enumerate(tokens) if detector.push(token, is_forced=forced)), None)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, bool]]:
    """A few runs; each is a pattern of chosen and forced tokens, repeated."""

    def tokens() -> Iterator[tuple[int, bool]]:
        for _ in range(draw(st.integers(1, 5))):
            period = draw(st.one_of(st.integers(1, 6), st.integers(1, 140)))
            vocabulary = draw(st.sampled_from([2, 3, 200]))
            letters = draw(st.lists(st.integers(0, vocabulary - 1), min_size=period, max_size=period))
            is_free = draw(st.booleans())
            flags = [False] * period if is_free else draw(st.lists(st.booleans(), min_size=period, max_size=period))
            length = draw(st.one_of(st.integers(1, 300), st.integers(240, 1200)))
            yield from islice(cycle(zip(letters, flags, strict=True)), length)

    return list(tokens())


@settings(max_examples=150)
@given(runs())
def test_the_detector_ends_an_answer_at_the_token_where_the_definition_does(tokens: list[tuple[int, bool]]) -> None:
    assert position(LoopDetector(), tokens) == position(Definition(), tokens)


def test_each_period_is_found_at_its_shortest_loop_after_any_beginning() -> None:
    for period in range(1, MAX_PERIOD + 1):
        one_too_short = -(MAX_PERIOD + period - 1) % (2 * SEARCH_TOKENS)  # at a search
        for num_before in (0, 37, period, one_too_short):
            before, loop = range(1000, 1000 + num_before), islice(cycle(range(period)), min_loop_tokens(period))
            tokens = [(token, False) for token in chain(before, loop)]
            assert position(LoopDetector(), tokens) == num_before + min_loop_tokens(period) - 1


def test_a_longer_period_is_no_loop() -> None:
    tokens = [(token, False) for token in islice(cycle(range(MAX_PERIOD + 1)), 20_000)]
    assert position(LoopDetector(), tokens) is None


def test_tokens_that_a_grammar_forces_are_no_loop_and_hide_none() -> None:
    assert position(LoopDetector(), [(0, True)] * 5000) is None
    numbered = [token for number in range(2000) for token in ((number, True), (7, False))]
    assert position(LoopDetector(), numbered) is None
    half = [(1, True), (2, False)] * 2000
    assert position(LoopDetector(), half) == 2 * min_loop_tokens(2) - 1


def test_a_long_answer_keeps_few_tokens() -> None:
    detector = LoopDetector()
    for token in islice(cycle(range(MAX_PERIOD + 1)), 5000):
        detector.push(token, is_forced=False)
    assert len(detector._tokens) < 2 * KEPT_TOKENS
