"""The conformance tests for runners: they verify the contract of `protocol` on a runner, with hand-made block tables.

Each check receives a factory of new runners and raises `ConformanceError` with the observed values. A backend's test
suite calls `check_all`. The checks know nothing about models, only that a row's tokens depend on that row alone. The
runners need at least 48 blocks of at least 4 tokens.
"""

from collections.abc import Callable, Sequence
from random import Random

from quire.backends.conformance import wanted as conformance_wanted
from quire.backends.conformance.harness import (
    ConformanceError,
    Desk,
    Job,
    MakeRunner,
    blocks_of,
    cut,
    job_for,
    prompt_of,
    require,
)
from quire.core.request import ResolvedSampling
from quire.core.step import BlockCopy, Scoring, WorkItem


def check_all(make_runner: MakeRunner) -> list[str]:
    """Run every check and return the names. Raises ConformanceError at the first failure."""
    for check in CHECKS:
        try:
            check(make_runner)
        except ConformanceError as error:
            raise ConformanceError(f"{check.__name__}: {error}", code=error.code) from error
    return [check.__name__ for check in CHECKS]


def samples_exactly_where_wanted(make_runner: MakeRunner) -> None:
    """A row returns one token after its last known token and none earlier; the token is in the vocabulary."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 3)
    job = Job(1, len(tokens), ResolvedSampling())
    first = desk.run([job.item(tokens, [1, 2, 3], 0, 1)])[1]
    require(first.token_ids == (), f"expected no tokens, got {first.token_ids}")
    last = desk.run([job.item(tokens, [1, 2, 3], 1, len(tokens))])[1]
    require(len(last.token_ids) == 1, f"expected one token, got {len(last.token_ids)}")
    require(0 <= last.token_ids[0] < desk.capacity.vocabulary_size, f"token {last.token_ids[0]} is out of vocabulary")


def a_row_does_not_depend_on_its_company(make_runner: MakeRunner) -> None:
    """A row returns the same tokens alone, in a batch, and in the reversed batch."""
    prompts = [prompt_of(Desk(make_runner), length, salt) for salt, length in enumerate((1, 2, 7, 13, 30))]
    alone = []
    for at, prompt in enumerate(prompts):
        desk = Desk(make_runner)
        alone.append(desk.feed(prompt, blocks_of(desk, at, len(prompt)), [len(prompt)], job_for(at, prompt)).token_ids)
    for turned in (1, -1):
        desk = Desk(make_runner)
        items = [job_for(at, p).item(p, blocks_of(desk, at, len(p)), 0, len(p)) for at, p in enumerate(prompts)]
        rows = desk.run(items[::turned])
        together = [rows[at].token_ids for at in range(len(prompts))]
        require(together == alone, f"alone {alone}, together {together}")


def a_prompt_may_come_in_any_chunks(make_runner: MakeRunner) -> None:
    """A prompt gives the same tokens whole, in blocks, token by token, or in irregular chunks."""
    answers = {}
    size = make_runner().capacity.block_size
    for sizes in ([99], [size] * 9, [1] * 99, [2, 1, 5, 99], [size, 1, 99]):
        desk = Desk(make_runner)
        tokens = prompt_of(desk, 3 * size + 2)
        pieces = cut(sizes, len(tokens))
        answers[tuple(pieces)] = desk.feed(
            tokens, blocks_of(desk, 0, len(tokens)), pieces, job_for(1, tokens)
        ).token_ids
    require(len(set(answers.values())) == 1, f"chunks change the result: {answers}")


def any_blocks_will_do(make_runner: MakeRunner) -> None:
    """Only the order of blocks in a sequence's table matters, not their ids."""
    answers = []
    for seed in range(4):
        desk = Desk(make_runner)
        tokens = prompt_of(desk, 2 * desk.capacity.block_size + 1)
        blocks = Random(seed).sample(range(1, 48), 4)  # noqa: S311 - the same blocks every time
        answers.append(desk.generate(tokens, blocks, 3, job_for(1, tokens)))
    require(all(answer == answers[0] for answer in answers), f"other blocks change the result: {answers}")


def a_prefix_computed_by_another_serves_as_well(make_runner: MakeRunner) -> None:
    """Blocks written for one sequence give another sequence with the same prefix the same tokens."""
    desk = Desk(make_runner)
    size = desk.capacity.block_size
    tokens = prompt_of(desk, 2 * size + 3)
    cold = desk.feed(tokens, [1, 2, 3], [len(tokens)], job_for(1, tokens)).token_ids
    warm = desk.run([job_for(2, tokens).item(tokens, [1, 2, 4], 2 * size, len(tokens))])[2].token_ids
    require(cold == warm, f"cold {cold}, with a shared prefix {warm}")


def a_copied_block_is_its_own(make_runner: MakeRunner) -> None:
    """After a block copy, both sequences continue independently, each as if it ran alone."""
    desk = Desk(make_runner)
    size = desk.capacity.block_size
    tokens = prompt_of(desk, size + 1)
    one, two = [*tokens, *prompt_of(desk, 2, 1)], [*tokens, *prompt_of(desk, 2, 2)]
    alone = [
        Desk(make_runner).feed(known, [1, 2, 3], [len(known)], job_for(1, tokens)).token_ids for known in (one, two)
    ]
    desk.feed(tokens, [1, 2], [len(tokens)], job_for(1, tokens))
    first = len(tokens)
    rows = desk.run(
        [
            job_for(1, tokens).item(one, [1, 2, 4], first, len(one)),
            job_for(2, tokens).item(two, [1, 3, 5], first, len(two)),
        ],
        [BlockCopy(2, 3)],
    )
    got = [rows[1].token_ids, rows[2].token_ids]
    require(got == alone, f"alone {alone}, after a copy {got}")


def copies_come_before_writes_and_in_their_order(make_runner: MakeRunner) -> None:
    """A step may copy a block and write to the original, and copy a copy."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 2)
    known = [*tokens, *prompt_of(desk, 1, 3)]
    expected = Desk(make_runner).feed(known, [1], [len(known)], job_for(1, tokens)).token_ids
    desk.feed(tokens, [1], [len(tokens)], job_for(1, tokens))
    other = prompt_of(desk, 2, 4)
    rows = desk.run(
        [
            job_for(1, tokens).item(known, [3], len(tokens), len(known)),
            job_for(2, other).item(other, [1], 0, len(other)),
        ],
        [BlockCopy(1, 2), BlockCopy(2, 3)],
    )
    require(rows[1].token_ids == expected, f"expected {expected}, got {rows[1].token_ids}")


def nothing_beyond_a_sequence_is_read(make_runner: MakeRunner) -> None:
    """The content of unused slots in the last block, and of later blocks, changes nothing."""
    answers = []
    for salt in range(3):
        desk = Desk(make_runner)
        size = desk.capacity.block_size
        junk = prompt_of(desk, 2 * size, 10 + salt)
        if salt:
            desk.feed(junk, [1, 2], [len(junk)], job_for(9, junk))
        tokens = prompt_of(desk, 1)
        answers.append(desk.feed(tokens, [1, 2], [1], job_for(1, tokens)).token_ids)
    require(len(set(answers)) == 1, f"data beyond the sequence changes the result: {answers}")


def blocks_can_be_carried_away_and_back(make_runner: MakeRunner) -> None:
    """Bytes read from blocks give the same results when written to other blocks, also of another runner."""
    desk = Desk(make_runner)
    size = desk.capacity.block_size
    tokens = prompt_of(desk, 2 * size + 1)
    expected = desk.feed(tokens, [1, 2, 3], [len(tokens)], job_for(1, tokens)).token_ids
    data = desk.runner.read_blocks([1, 2])
    require([len(content) for content in data] == [desk.capacity.num_kv_bytes] * 2, "a block has the wrong size")
    fresh = Desk(make_runner)
    fresh.runner.write_blocks([5, 4], data)
    got = fresh.run([job_for(1, tokens).item(tokens, [5, 4, 6], 2 * size, len(tokens))])[1].token_ids
    require(got == expected, f"expected {expected}, from carried blocks {got}")


def the_seed_decides(make_runner: MakeRunner) -> None:
    """Equal seeds give equal tokens, different seeds differ; at temperature 0 the seed has no effect."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 5)

    def answer(seed: int, temperature: float) -> tuple[int, ...]:
        params = ResolvedSampling(temperature=temperature)
        return tuple(Desk(make_runner).generate(tokens, [1, 2, 3, 4], 4, Job(1, len(tokens), params, seed)))

    require(answer(1, 1.0) == answer(1, 1.0), "the same seed gave two results")
    require(len({answer(seed, 1.0) for seed in range(8)}) > 1, "eight seeds gave one result")
    require(len({answer(seed, 0.0) for seed in range(3)}) == 1, "the seed changes the result at temperature 0")


def stop_tokens_wait_for_min_tokens(make_runner: MakeRunner) -> None:
    """A stop token is not chosen before `min_tokens`, however likely it is."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 3)
    stops = frozenset(range(1, desk.capacity.vocabulary_size))
    params = ResolvedSampling(stop_token_ids=stops, min_tokens=3, max_tokens=9)
    got = desk.generate(tokens, [1, 2, 3, 4, 5, 6], 3, Job(1, len(tokens), params))
    require(got == [0, 0, 0], f"{got}: a stop token among the first three")


def continuations_draw_differently(make_runner: MakeRunner) -> None:
    """Seed, continuation and position determine the random number: another continuation gives other tokens."""

    def answer(index: int) -> tuple[int, ...]:
        desk = Desk(make_runner)
        tokens = prompt_of(desk, 5)
        job = Job(1, len(tokens), ResolvedSampling(), index=index)
        return tuple(desk.generate(tokens, [1, 2, 3, 4], 4, job))

    require(answer(3) == answer(3), "the same continuation gave two results")
    require(len({answer(index) for index in range(8)}) > 1, "eight continuations gave one result")


def choices_can_be_narrowed(make_runner: MakeRunner) -> None:
    """A single allowed token is chosen, a banned token never is, and top-k 1 equals temperature 0."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 5)

    def answer(params: ResolvedSampling) -> list[int]:
        return Desk(make_runner).generate(tokens, [1, 2, 3, 4], 4, Job(1, len(tokens), params))

    require(answer(ResolvedSampling(allowed_token_ids=(7,))) == [7] * 4, "got a token that was not allowed")
    greedy = answer(ResolvedSampling(temperature=0.0))
    banned = answer(ResolvedSampling(temperature=0.0, banned_token_ids=tuple(set(greedy))))
    require(not set(greedy) & set(banned), f"banned {greedy}, got {banned}")
    require(answer(ResolvedSampling(top_k=1)) == greedy, "top_k 1 differs from temperature 0")


def the_largest_step_runs(make_runner: MakeRunner) -> None:
    """A step with the maximum number of tokens, in many rows, gives each row the result it has alone."""
    desk = Desk(make_runner)
    capacity = desk.capacity
    rows = min(16, capacity.num_blocks // 2)
    length = min(capacity.max_step_tokens // rows, capacity.num_blocks // rows * capacity.block_size)
    span = desk.num_blocks_for(length)
    prompts = [prompt_of(desk, length, salt) for salt in range(rows)]
    tables = [list(range(1 + at * span, 1 + (at + 1) * span)) for at in range(rows)]
    items = [job_for(at, prompt).item(prompt, tables[at], 0, length) for at, prompt in enumerate(prompts)]
    together = desk.run(items)
    for at in (0, rows - 1):
        alone = Desk(make_runner).run([items[at]])[at]
        require(alone == together[at], f"row {at} of {rows}: alone {alone}, in the largest step {together[at]}")


def a_step_leaves_other_blocks_alone(make_runner: MakeRunner) -> None:
    """Blocks that no row writes and no copy targets stay unchanged."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 3)
    others = [block for block in range(1, desk.capacity.num_blocks + 1) if block not in (5, 6)]
    desk.feed(prompt_of(desk, 9, 1), [1, 2, 3], [9], job_for(9, tokens))
    before = desk.runner.read_blocks(others)
    desk.feed(tokens, [5], [1, 2], job_for(1, tokens))
    desk.run([], [BlockCopy(5, 6)])
    require(desk.runner.read_blocks(others) == before, "a block changed that no row wrote")


def logprobs_do_not_depend_on_company(make_runner: MakeRunner) -> None:
    """Log-probabilities of chosen and prompt tokens are the same alone, in a batch, and in chunks."""

    def items(desk: Desk, ends: Sequence[int]) -> list[WorkItem]:
        tokens, made, first = prompt_of(desk, 9), [], 0
        job = Job(1, len(tokens), ResolvedSampling(logprobs=2))
        for end in ends:
            item = job.item(tokens, [1, 2, 3], first, end)
            targets = tuple(tokens[first + 1 : end + 1])
            made.append(item._replace(scoring=Scoring(first + 1, targets, 1) if targets else None))
            first = end
        return made

    desk = Desk(make_runner)
    whole = desk.run(items(desk, [9]))[1]
    desk = Desk(make_runner)
    other = prompt_of(desk, 6, 5)
    company = desk.run([*items(desk, [9]), job_for(2, other).item(other, [4, 5], 0, 6)])[1]
    require(company == whole, f"alone {whole}, in a batch {company}")
    desk = Desk(make_runner)
    parts = [desk.run([item])[1] for item in items(desk, [4, 8, 9])]
    joined = tuple(entry for part in parts for entry in part.scores)
    require(joined == whole.scores, f"whole {whole.scores}, in chunks {joined}")
    require(parts[-1].logprobs == whole.logprobs, f"whole {whole.logprobs}, in chunks {parts[-1].logprobs}")


def a_sequence_leaves_nothing_behind(make_runner: MakeRunner) -> None:
    """A sequence id may be reused by another sequence."""
    desk = Desk(make_runner)
    first, second = prompt_of(desk, 6, 1), prompt_of(desk, 7, 2)
    expected = Desk(make_runner).feed(second, [3, 4], [7], job_for(1, second)).token_ids
    desk.feed(first, [1, 2], [6], job_for(1, first))
    row = desk.run([job_for(1, second).item(second, [3, 4], 0, 7)])[1]
    require(row.token_ids == expected, f"expected {expected}, got {row.token_ids} after another of the same id")


def logprobs_match_the_request(make_runner: MakeRunner) -> None:
    """Log-probabilities cover the chosen token and prompt tokens, with the requested alternatives; none exceeds 0."""
    desk = Desk(make_runner)
    tokens = prompt_of(desk, 5)
    item = Job(1, len(tokens), ResolvedSampling(logprobs=2)).item(tokens, [1, 2, 3, 4, 5], 0, len(tokens))
    row = desk.run([item._replace(scoring=Scoring(1, tuple(tokens[1:]), 1))])[1]
    require(len(row.logprobs) == 1, f"expected one logprob for one token, got {len(row.logprobs)}")
    require(row.logprobs[0].token_id == row.token_ids[0], "the logprob is of another token")
    require(len(row.logprobs[0].alternatives) == 2, f"expected 2 alternatives, got {len(row.logprobs[0].alternatives)}")
    targets = [entry.token_id for entry in row.scores]
    require(targets == list(tokens[1:]), f"expected scores of {tokens[1:]}, got {targets}")
    values = [entry.logprob for entry in (*row.logprobs, *row.scores)]
    require(all(value <= 0.0 for value in values), f"a log-probability above 0: {values}")


def closing_twice_does_nothing(make_runner: MakeRunner) -> None:
    """A second `close` has no effect, and the capacity stays the same."""
    runner = make_runner()
    before = runner.capacity
    runner.close()
    runner.close()
    require(runner.capacity == before, "the capacity changed")


CHECKS: tuple[Callable[[MakeRunner], None], ...] = (
    samples_exactly_where_wanted,
    a_row_does_not_depend_on_its_company,
    a_prompt_may_come_in_any_chunks,
    any_blocks_will_do,
    a_prefix_computed_by_another_serves_as_well,
    a_copied_block_is_its_own,
    copies_come_before_writes_and_in_their_order,
    nothing_beyond_a_sequence_is_read,
    blocks_can_be_carried_away_and_back,
    the_seed_decides,
    continuations_draw_differently,
    choices_can_be_narrowed,
    the_largest_step_runs,
    a_step_leaves_other_blocks_alone,
    logprobs_do_not_depend_on_company,
    a_sequence_leaves_nothing_behind,
    stop_tokens_wait_for_min_tokens,
    logprobs_match_the_request,
    closing_twice_does_nothing,
    *conformance_wanted.CHECKS,
)
