"""Lists of tokens made once, counts that grow: and that neither changes what is chosen."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.backends.host.sampler import choose
from quire.backends.host.token_lists import RowLists, TokenCounts, TokenListCache, TokenLists
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, WorkItem
from tests.support.changed import changed
from tests.support.models.plain_sampler import random_sampling

SIZE = 6


def struck(*, is_early: bool = False, **given: Any) -> list[int] | None:
    mask = TokenLists(ResolvedSampling(**given), SIZE).excluded(is_early=is_early)
    return None if mask is None else mask.nonzero()[0].tolist()


def item(sequence_id: int, params: ResolvedSampling | None) -> WorkItem:
    sampling = None if params is None else Sampling(params, 0, 0, 1, 1, None)
    return WorkItem(sequence_id, (0,), 0, (1,), sampling)


def test_without_lists_nothing_is_struck_out() -> None:
    assert struck() is None
    assert struck(is_early=True) is None
    assert struck(stop_token_ids=frozenset({2})) is None


def test_what_is_not_allowed_or_banned_or_stops_too_early_is_struck_out() -> None:
    assert struck(allowed_token_ids=(1, 4, 4)) == [0, 2, 3, 5]
    assert struck(allowed_token_ids=()) == [0, 1, 2, 3, 4, 5]
    assert struck(allowed_token_ids=(1, 4), banned_token_ids=(4, 0)) == [0, 2, 3, 4, 5]
    assert struck(banned_token_ids=(5, 5), stop_token_ids=frozenset({2})) == [5]
    assert struck(banned_token_ids=(5, 5), stop_token_ids=frozenset({2}), is_early=True) == [2, 5]


def test_counts_are_those_of_the_tokens_asked_about_however_they_follow_each_other() -> None:
    random, counts = Random(3), TokenCounts()
    tokens: tuple[int, ...] = ()
    for _ in range(300):
        way = random.randrange(6)
        if way == 0:
            tokens = tokens[: random.randint(0, len(tokens))]
        elif way == 1 and tokens:
            at = random.randrange(len(tokens))
            tokens = (*tokens[:at], random.randrange(SIZE), *tokens[at + 1 :])
        else:
            tokens = (*tokens, *(random.randrange(SIZE) for _ in range(random.randint(0, 3))))
        ids, numbers = counts.counts_of(tokens)
        assert dict(zip(ids.tolist(), numbers.tolist(), strict=True)) == Counter(tokens)


def test_a_sequence_keeps_its_lists_and_continuations_of_a_request_share_them() -> None:
    kept, one, other = TokenListCache(SIZE), ResolvedSampling(), ResolvedSampling()
    first = kept.lists_of([item(1, one), item(2, one), item(3, other), item(4, None)])
    assert [row.lists.params for row in first] == [one, one, other]
    assert first[0].lists is first[1].lists
    assert first[0].lists is not first[2].lists
    assert kept.lists_of([item(3, other), item(1, one)]) == [first[2], first[0]]
    assert kept.lists_of([item(2, one)])[0].lists is first[0].lists


def test_a_mask_allows_what_a_list_of_allowed_tokens_would() -> None:
    random = Random(5)
    for size in (2, 8, 17, 60):
        logits = np.random.default_rng(size).standard_normal((20, size), np.float32)
        rows = [random_sampling(random, size) for _ in range(20)]
        rows = [changed(row, params=replace(row.params, allowed_token_ids=None)) for row in rows]
        counts = [random.choice((random.randint(0, size), size - random.randint(0, size // 10))) for _ in rows]
        allowed = [tuple(sorted(random.sample(range(size), count))) for count in counts]
        masks = [bytes(sum(1 << at for at in range(8) if 8 * byte + at in one) for byte in range(-(-size // 8)))
                 for one in allowed]  # fmt: skip
        listed = [
            changed(row, params=replace(row.params, allowed_token_ids=one))
            for row, one in zip(rows, allowed, strict=True)
        ]
        assert choose(logits, rows, masks=masks) == choose(logits, listed)
        assert choose(logits, rows, masks=[None] * len(rows)) == choose(logits, rows)


def test_another_mask_or_other_stop_tokens_give_other_allowed_tokens() -> None:
    lists = TokenLists(ResolvedSampling(banned_token_ids=(5,), stop_token_ids=frozenset({2})), SIZE)
    for _ in range(2):
        assert lists.allowed(b"\x3f", is_early=False).ids.tolist() == [0, 1, 2, 3, 4]
        assert lists.allowed(b"\x3f", is_early=True).excluded_ids.tolist() == [2, 5]
        assert lists.allowed(b"\x03", is_early=True).ids.tolist() == [0, 1]


def test_what_was_not_sampled_in_the_last_step_and_equal_parameters_of_another_are_made_anew() -> None:
    kept, params = TokenListCache(SIZE), ResolvedSampling()
    (first,) = kept.lists_of([item(1, params)])
    kept.lists_of([item(2, ResolvedSampling())])
    (second,) = kept.lists_of([item(1, params)])
    assert second.lists is not first.lists
    (third,) = kept.lists_of([item(1, ResolvedSampling())])
    assert third.lists is not second.lists


def test_tokens_are_the_same_with_what_was_kept_of_other_steps_as_without() -> None:
    random = Random(11)
    for size in (2, 17, 60):
        rows = [random_sampling(random, size) for _ in range(20)]
        kept = [RowLists(TokenLists(row.params, size)) for row in rows]
        for step in range(6):
            logits = np.random.default_rng(100 * size + step).standard_normal((len(rows), size), np.float32)
            assert choose(logits, rows, kept) == choose(logits, rows)
            rows = [_next(random, row, size) for row in rows]


def _next(random: Random, row: Sampling, size: int) -> Sampling:
    """One token further; now and then with another past, as no engine would."""
    known = None if row.known_tokens is None else (*row.known_tokens, random.randrange(size))
    if known is not None and random.random() < 0.2:
        known = (*known[1:], known[0])
    return changed(row, position=row.position + 1, known_tokens=known)
