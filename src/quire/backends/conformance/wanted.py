"""Conformance checks of outputs per position: scores, hidden states, drafts, masks, no output.

Common rule of all checks: outputs requested for several positions at once equal those requested one by one.
"""

from collections.abc import Iterable, Sequence

from quire.backends.conformance.harness import Desk, Job, MakeRunner, job_for, prompt_of, require
from quire.core.request import ResolvedSampling
from quire.core.step import NO_TOKEN_LEFT, RowResult, Scoring

BLOCKS = (1, 2, 3, 4)
NUM_PROMPT = 5
NUM_ALONE = 5
"""Tokens generated step by step, later used as drafts; all fit into the blocks above."""


def _mask(allowed: Iterable[int], vocabulary_size: int) -> bytes:
    bits = bytearray(-(-vocabulary_size // 8))
    for token_id in allowed:
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)


def _drawn(sequence_id: int = 1, **params: object) -> Job:
    options = {"frequency_penalty": 0.5, "logprobs": 1, **params}
    return Job(sequence_id, NUM_PROMPT, ResolvedSampling(**options), seed=3)  # type: ignore[arg-type]


def _step_by_step(make_runner: MakeRunner, job: Job) -> list[RowResult]:
    desk = Desk(make_runner)
    known, first = prompt_of(desk, NUM_PROMPT), 0
    rows: list[RowResult] = []
    while len(rows) < NUM_ALONE:
        rows.append(desk.run([job.item(known, BLOCKS, first, len(known))])[job.sequence_id])
        first = len(known)
        known += rows[-1].token_ids
    return rows


def _with_drafts(make_runner: MakeRunner, job: Job, drafts: Sequence[int]) -> RowResult:
    desk = Desk(make_runner)
    tokens = prompt_of(desk, NUM_PROMPT)
    return desk.run([job.item(tokens, BLOCKS, 0, NUM_PROMPT, drafts)])[job.sequence_id]


def several_wanted_positions_equal_one_by_one(make_runner: MakeRunner) -> None:
    """Scores and hidden states are equal for many positions in one item and for one position at a time."""

    def computed(ends: Sequence[int], wanted: Sequence[int]) -> tuple[list[object], list[bytes]]:
        desk = Desk(make_runner)
        tokens, first = prompt_of(desk, 9), 0
        scores: list[object] = []
        states: list[bytes] = []
        for end in ends:
            at = tuple(position for position in wanted if first <= position < end)
            item = job_for(1, tokens).item(tokens, BLOCKS, first, end)._replace(sampling=None, hidden_positions=at)
            if at:
                targets = tuple(tokens[(position + 1) % len(tokens)] for position in at)
                item = item._replace(scoring=Scoring(at[0] + 1, targets, 2))
            row = desk.run([item])[1]
            scores += row.scores
            states += row.hidden_states
            first = end
        return scores, states

    for wanted in (range(9), range(2, 6), (8,)):
        whole, one_by_one = computed([9], wanted), computed(range(1, 10), wanted)
        require(whole == one_by_one, f"positions {list(wanted)}: at once {whole}, one by one {one_by_one}")
        counts = [len(whole[0]), len(whole[1])]
        require(counts == [len(wanted)] * 2, f"expected {len(wanted)} scores and hidden states, got {counts}")


def right_drafts_come_back_with_one_more(make_runner: MakeRunner) -> None:
    """Right drafts return several tokens with log-probabilities, equal to those generated step by step."""
    rows = _step_by_step(make_runner, _drawn())
    tokens = tuple(row.token_ids[0] for row in rows)
    logprobs = tuple(row.logprobs[0] for row in rows)
    for count in range(1, NUM_ALONE):
        row = _with_drafts(make_runner, _drawn(), tokens[:count])
        require(row.token_ids == tokens[: count + 1], f"{count} right drafts of {tokens} came back as {row.token_ids}")
        require(row.logprobs == logprobs[: count + 1], f"step by step {logprobs}, after drafts {row.logprobs}")


def a_wrong_draft_ends_the_row(make_runner: MakeRunner) -> None:
    """A wrong draft makes its correct token the last of the row; continuing is as if there had been no draft."""
    tokens = [row.token_ids[0] for row in _step_by_step(make_runner, _drawn())]
    for wrong in range(3):
        desk = Desk(make_runner)
        drafts = tokens[:3]
        drafts[wrong] = (drafts[wrong] + 1) % desk.capacity.vocabulary_size
        known = prompt_of(desk, NUM_PROMPT)
        row = desk.run([_drawn().item(known, BLOCKS, 0, NUM_PROMPT, drafts)])[1]
        require(list(row.token_ids) == tokens[: wrong + 1], f"draft {wrong} of {drafts} is wrong: {row.token_ids}")
        known += row.token_ids
        again = desk.run([_drawn().item(known, BLOCKS, len(known) - 1, len(known))])[1]
        require(again.token_ids[0] == tokens[wrong + 1], f"after a wrong draft {again.token_ids}, not {tokens}")


def drafts_do_not_depend_on_company(make_runner: MakeRunner) -> None:
    """A row with drafts, a row without, and a row that samples nothing give equal results together and alone."""
    tokens = [row.token_ids[0] for row in _step_by_step(make_runner, _drawn())]
    desk = Desk(make_runner)
    prompt, other = prompt_of(desk, NUM_PROMPT), prompt_of(desk, 6, 5)
    items = [
        _drawn().item(prompt, BLOCKS, 0, NUM_PROMPT, tokens[:2]),
        job_for(2, other).item(other, (5, 6), 0, 6),
        job_for(3, other).item(other, (7, 8), 0, 3),
    ]
    together = desk.run(items)
    alone = [Desk(make_runner).run([item])[item.sequence_id] for item in items]
    require(list(together.values()) == alone, f"alone {alone}, together {together}")


def a_stop_among_drafts_is_a_token_like_any_other(make_runner: MakeRunner) -> None:
    """A stop token does not end a row: that is the core's decision. `min_tokens` applies at each position."""
    size = make_runner().capacity.vocabulary_size
    first_token = _step_by_step(make_runner, _drawn())[1].token_ids[0]
    for stops, num_early in ((frozenset({first_token}), 0), (frozenset(range(1, size)), 2)):
        job = _drawn(stop_token_ids=stops, min_tokens=num_early)
        tokens = tuple(row.token_ids[0] for row in _step_by_step(make_runner, job))
        require(not stops.intersection(tokens[:num_early]), f"{tokens}: a stop token among the first {num_early}")
        row = _with_drafts(make_runner, job, tokens[:3])
        require(row.token_ids == tokens[:4], f"step by step {tokens}, with a stop among the drafts {row.token_ids}")


def nothing_wanted_is_nothing_returned(make_runner: MakeRunner) -> None:
    """Tokens may be fed for their KV alone, without outputs; the sequence can continue from that KV."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 6)
    expected = Desk(make_runner).feed(tokens, BLOCKS, [6], job_for(1, tokens)).token_ids
    item = job_for(1, tokens).item(tokens[:5], BLOCKS, 0, 5)
    row = desk.run([item._replace(sampling=None)])[1]
    require(row == RowResult(), f"expected an empty result, got {row}")
    got = desk.run([job_for(1, tokens).item(tokens, BLOCKS, 5, 6)])[1].token_ids
    require(got == expected, f"expected {expected}, got {got} after a step without outputs")


def a_mask_narrows_each_choice(make_runner: MakeRunner) -> None:
    """Each position has its own mask. A mask that allows all tokens changes nothing, nor does a mask of another row.
    Log-probabilities are those of the raw logits."""
    desk = Desk(make_runner)
    size, prompt = desk.capacity.vocabulary_size, prompt_of(desk, NUM_PROMPT)
    free = _step_by_step(make_runner, _drawn())[0]
    for temperature, penalty in ((1.0, 0.5), (0.0, 0.5), (0.0, 0.0)):
        item = _drawn(temperature=temperature, frequency_penalty=penalty).item(prompt, BLOCKS, 0, NUM_PROMPT, (7,))
        item = item._replace(scoring=Scoring(NUM_PROMPT, (7, 9), 1))
        neighbour = _drawn(2).item(prompt, (5, 6, 7, 8), 0, NUM_PROMPT)
        rows = Desk(make_runner).run([item, neighbour], masks={1: (_mask((7,), size), _mask((9,), size))})
        require(rows[1].token_ids == (7, 9), f"expected the tokens 7 and 9, got {rows[1].token_ids}")
        require(rows[1].logprobs == rows[1].scores, f"masked {rows[1].logprobs}, of the raw logits {rows[1].scores}")
        require(rows[2] == free, f"without a mask {free}, beside a masked row {rows[2]}")
    row = desk.run([_drawn().item(prompt, BLOCKS, 0, NUM_PROMPT)], masks={1: (_mask(range(size), size),)})[1]
    require(row == free, f"without a mask {free}, with one that allows all {row}")


def a_mask_that_allows_nothing_fails_its_row_alone(make_runner: MakeRunner) -> None:
    """A mask without tokens fails its row alone; after a draft it only ends the row, keeping earlier tokens."""
    desk = Desk(make_runner)
    size, prompt = desk.capacity.vocabulary_size, prompt_of(desk, NUM_PROMPT)
    items = [_drawn().item(prompt, BLOCKS, 0, NUM_PROMPT), _drawn(2).item(prompt, (5, 6, 7, 8), 0, NUM_PROMPT)]
    rows = desk.try_run(items, masks={1: (_mask((), size),)})
    require(rows[1].error == NO_TOKEN_LEFT, f"no token was allowed, got {rows[1]}")
    require(rows[2].error is None, f"a neighbour's mask failed this row: {rows[2]}")
    item = _drawn().item(prompt, BLOCKS, 0, NUM_PROMPT, (7,))
    row = Desk(make_runner).run([item], masks={1: (_mask((7,), size), _mask((), size))})[1]
    require(row.token_ids == (7,), f"expected token 7 and no other, got {row.token_ids}")


CHECKS = (
    several_wanted_positions_equal_one_by_one,
    right_drafts_come_back_with_one_more,
    a_wrong_draft_ends_the_row,
    drafts_do_not_depend_on_company,
    a_stop_among_drafts_is_a_token_like_any_other,
    nothing_wanted_is_nothing_returned,
    a_mask_narrows_each_choice,
    a_mask_that_allows_nothing_fails_its_row_alone,
)
