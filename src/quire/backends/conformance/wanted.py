"""Conformance checks of a row's outputs: scores (prompt log-probabilities), hidden states, drafts, masks, no output.

In all checks, outputs requested for several positions at once must equal outputs requested one by one.
"""

from collections.abc import Iterable, Sequence

from quire.backends.conformance.harness import Job, MakeRunner, StubCore, job_for, prompt_of, require
from quire.core.request import ResolvedSampling
from quire.core.step import NO_TOKEN_LEFT, RowResult, Scoring

BLOCKS = (1, 2, 3, 4)
NUM_PROMPT = 5
NUM_GENERATED = 5
"""Tokens generated one per step, later used as drafts; all fit into the blocks above."""


def _mask(allowed: Iterable[int], vocabulary_size: int) -> bytes:
    bits = bytearray(-(-vocabulary_size // 8))
    for token_id in allowed:
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)


def _job(sequence_id: int = 1, **params: object) -> Job:
    options = {"frequency_penalty": 0.5, "logprobs": 1, **params}
    return Job(sequence_id, NUM_PROMPT, ResolvedSampling(**options), seed=3)  # type: ignore[arg-type]


def _generate_rows(make_runner: MakeRunner, job: Job) -> list[RowResult]:
    core = StubCore(make_runner)
    tokens, first = prompt_of(core, NUM_PROMPT), 0
    rows: list[RowResult] = []
    while len(rows) < NUM_GENERATED:
        rows.append(core.run([job.item(tokens, BLOCKS, first, len(tokens))])[job.sequence_id])
        first = len(tokens)
        tokens += rows[-1].token_ids
    return rows


def _run_drafts(make_runner: MakeRunner, job: Job, drafts: Sequence[int]) -> RowResult:
    core = StubCore(make_runner)
    return core.run([job.item(prompt_of(core, NUM_PROMPT), BLOCKS, 0, NUM_PROMPT, drafts)])[job.sequence_id]


def many_positions_equal_one_at_a_time(make_runner: MakeRunner) -> None:
    """Scores and hidden states are equal for many positions in one item and for one position at a time."""

    def outputs_at(ends: Sequence[int], requested: Sequence[int]) -> tuple[list[object], list[bytes]]:
        core = StubCore(make_runner)
        tokens, first = prompt_of(core, 9), 0
        scores: list[object] = []
        states: list[bytes] = []
        for end in ends:
            positions = tuple(position for position in requested if first <= position < end)
            item = job_for(1, tokens).item(tokens, BLOCKS, first, end)
            item = item._replace(sampling=None, hidden_positions=positions)
            if positions:
                targets = tuple(tokens[(position + 1) % len(tokens)] for position in positions)
                item = item._replace(scoring=Scoring(positions[0] + 1, targets, 2))
            row = core.run([item])[1]
            scores += row.scores
            states += row.hidden_states
            first = end
        return scores, states

    for requested in (range(9), range(2, 6), (8,)):
        together, one_by_one = outputs_at([9], requested), outputs_at(range(1, 10), requested)
        require(together == one_by_one, f"{list(requested)}: expected {one_by_one} as one by one, got {together}")
        counts = [len(together[0]), len(together[1])]
        require(counts == [len(requested)] * 2, f"expected {len(requested)} scores and hidden states, got {counts}")


def right_drafts_are_accepted_with_one_more_token(make_runner: MakeRunner) -> None:
    """A row with right drafts returns them and one more token, all as generated step by step."""
    rows = _generate_rows(make_runner, _job())
    tokens = tuple(row.token_ids[0] for row in rows)
    logprobs = tuple(row.logprobs[0] for row in rows)
    for count in range(1, NUM_GENERATED):
        row = _run_drafts(make_runner, _job(), tokens[:count])
        require(row.token_ids == tokens[: count + 1], f"expected {tokens[: count + 1]}, got {row.token_ids}")
        require(row.logprobs == logprobs[: count + 1], f"expected {logprobs}, got {row.logprobs} with drafts")


def a_wrong_draft_ends_the_row(make_runner: MakeRunner) -> None:
    """A row ends with the correct token in place of its first wrong draft; the sequence continues as without drafts."""
    tokens = [row.token_ids[0] for row in _generate_rows(make_runner, _job())]
    for index in range(3):
        core = StubCore(make_runner)
        drafts = tokens[:3]
        drafts[index] = (drafts[index] + 1) % core.capacity.vocabulary_size
        sequence = prompt_of(core, NUM_PROMPT)
        row = core.run([_job().item(sequence, BLOCKS, 0, NUM_PROMPT, drafts)])[1]
        require(list(row.token_ids) == tokens[: index + 1], f"expected {tokens[: index + 1]}, got {row.token_ids}")
        sequence += row.token_ids
        next_row = core.run([_job().item(sequence, BLOCKS, len(sequence) - 1, len(sequence))])[1]
        require(next_row.token_ids[0] == tokens[index + 1], f"expected {tokens}, then got {next_row.token_ids}")


def drafts_do_not_depend_on_the_batch(make_runner: MakeRunner) -> None:
    """Rows with drafts, without drafts and without sampling give equal results in a batch and alone."""
    tokens = [row.token_ids[0] for row in _generate_rows(make_runner, _job())]
    core = StubCore(make_runner)
    prompt, neighbour = prompt_of(core, NUM_PROMPT), prompt_of(core, 6, 5)
    items = [
        _job().item(prompt, BLOCKS, 0, NUM_PROMPT, tokens[:2]),
        job_for(2, neighbour).item(neighbour, (5, 6), 0, 6),
        job_for(3, neighbour).item(neighbour, (7, 8), 0, 3),
    ]
    batched = core.run(items)
    alone = [StubCore(make_runner).run([item])[item.sequence_id] for item in items]
    require(list(batched.values()) == alone, f"expected {alone} as alone, got {batched}")


def a_stop_token_among_drafts_does_not_end_the_row(make_runner: MakeRunner) -> None:
    """A stop token among drafts does not end a row: the core handles stops. `min_tokens` applies per position."""
    size = make_runner().capacity.vocabulary_size
    first_token = _generate_rows(make_runner, _job())[1].token_ids[0]
    for stops, num_early in ((frozenset({first_token}), 0), (frozenset(range(1, size)), 2)):
        job = _job(stop_token_ids=stops, min_tokens=num_early)
        tokens = tuple(row.token_ids[0] for row in _generate_rows(make_runner, job))
        require(not stops.intersection(tokens[:num_early]), f"expected no stop so early: {tokens}")
        row = _run_drafts(make_runner, job, tokens[:3])
        require(row.token_ids == tokens[:4], f"expected {tokens[:4]}, got {row.token_ids}")


def an_item_without_outputs_returns_none(make_runner: MakeRunner) -> None:
    """An item may only write KV and return nothing; the sequence can continue from that KV."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 6)
    expected = StubCore(make_runner).feed(tokens, BLOCKS, [6], job_for(1, tokens)).token_ids
    item = job_for(1, tokens).item(tokens[:5], BLOCKS, 0, 5)
    row = core.run([item._replace(sampling=None)])[1]
    require(row == RowResult(), f"expected an empty result, got {row}")
    got = core.run([job_for(1, tokens).item(tokens, BLOCKS, 5, 6)])[1].token_ids
    require(got == expected, f"expected {expected}, got {got} after a step without outputs")


def a_mask_restricts_each_position(make_runner: MakeRunner) -> None:
    """Each position has its own mask. A mask that allows all tokens has no effect, nor has the mask of another row.
    Log-probabilities are those of the unmasked logits."""
    core = StubCore(make_runner)
    size, prompt = core.capacity.vocabulary_size, prompt_of(core, NUM_PROMPT)
    unmasked = _generate_rows(make_runner, _job())[0]
    for temperature, penalty in ((1.0, 0.5), (0.0, 0.5), (0.0, 0.0)):
        item = _job(temperature=temperature, frequency_penalty=penalty).item(prompt, BLOCKS, 0, NUM_PROMPT, (7,))
        item = item._replace(scoring=Scoring(NUM_PROMPT, (7, 9), 1))
        neighbour = _job(2).item(prompt, (5, 6, 7, 8), 0, NUM_PROMPT)
        rows = StubCore(make_runner).run([item, neighbour], masks={1: (_mask((7,), size), _mask((9,), size))})
        require(rows[1].token_ids == (7, 9), f"expected the tokens 7 and 9, got {rows[1].token_ids}")
        require(rows[1].logprobs == rows[1].scores, f"expected {rows[1].scores} as unmasked, got {rows[1].logprobs}")
        require(rows[2] == unmasked, f"expected {unmasked}, got {rows[2]} in a batch with a masked row")
    row = core.run([_job().item(prompt, BLOCKS, 0, NUM_PROMPT)], masks={1: (_mask(range(size), size),)})[1]
    require(row == unmasked, f"expected {unmasked}, got {row} with a mask that allows all tokens")


def an_empty_mask_fails_only_its_row(make_runner: MakeRunner) -> None:
    """A mask that allows no token fails only its row; after a draft it ends the row but keeps the earlier tokens."""
    core = StubCore(make_runner)
    size, prompt = core.capacity.vocabulary_size, prompt_of(core, NUM_PROMPT)
    items = [_job().item(prompt, BLOCKS, 0, NUM_PROMPT), _job(2).item(prompt, (5, 6, 7, 8), 0, NUM_PROMPT)]
    rows = core.try_run(items, masks={1: (_mask((), size),)})
    require(rows[1].error == NO_TOKEN_LEFT, f"expected {NO_TOKEN_LEFT}, got {rows[1]}")
    require(rows[2].error is None, f"expected no error from the mask of another row, got {rows[2]}")
    item = _job().item(prompt, BLOCKS, 0, NUM_PROMPT, (7,))
    row = StubCore(make_runner).run([item], masks={1: (_mask((7,), size), _mask((), size))})[1]
    require(row.token_ids == (7,), f"expected token 7 and no other, got {row.token_ids}")


CHECKS = (
    many_positions_equal_one_at_a_time,
    right_drafts_are_accepted_with_one_more_token,
    a_wrong_draft_ends_the_row,
    drafts_do_not_depend_on_the_batch,
    a_stop_token_among_drafts_does_not_end_the_row,
    an_item_without_outputs_returns_none,
    a_mask_restricts_each_position,
    an_empty_mask_fails_only_its_row,
)
