"""The conformance tests for runners: they verify the contract of `protocol` with hand-made block tables.

Each check receives a factory of new runners and raises `ConformanceError` with the observed values. A backend's test
suite calls `check_all`. The checks compare a runner only with itself and need no reference output, because a row's
tokens depend on that row alone. The runners need at least 48 blocks of at least 4 tokens.
"""

from collections.abc import Callable, Sequence
from random import Random

from quire.backends.conformance import wanted as output_checks
from quire.backends.conformance.harness import (
    ConformanceError,
    Job,
    MakeRunner,
    StubCore,
    blocks_of,
    chunk_sizes,
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


def rows_sample_only_after_the_last_known_token(make_runner: MakeRunner) -> None:
    """A row returns one token after its last known token and none earlier; the token is in the vocabulary."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 3)
    job = Job(1, len(tokens), ResolvedSampling())
    first = core.run([job.item(tokens, [1, 2, 3], 0, 1)])[1]
    require(first.token_ids == (), f"expected no tokens, got {first.token_ids}")
    last = core.run([job.item(tokens, [1, 2, 3], 1, len(tokens))])[1]
    require(len(last.token_ids) == 1, f"expected one token, got {len(last.token_ids)}")
    require(0 <= last.token_ids[0] < core.capacity.vocabulary_size, f"token {last.token_ids[0]} is no vocabulary id")


def a_row_does_not_depend_on_its_batch(make_runner: MakeRunner) -> None:
    """A row returns the same tokens alone, in a batch, and in the reversed batch."""
    prompts = [prompt_of(StubCore(make_runner), length, salt) for salt, length in enumerate((1, 2, 7, 13, 30))]
    alone = []
    for row, prompt in enumerate(prompts):
        core, job = StubCore(make_runner), job_for(row, prompt)
        alone.append(core.feed(prompt, blocks_of(core, row, len(prompt)), [len(prompt)], job).token_ids)
    for direction in (1, -1):
        core = StubCore(make_runner)
        items = [
            job_for(row, prompt).item(prompt, blocks_of(core, row, len(prompt)), 0, len(prompt))
            for row, prompt in enumerate(prompts)
        ]
        rows = core.run(items[::direction])
        batched = [rows[row].token_ids for row in range(len(prompts))]
        require(batched == alone, f"expected {alone} as alone, got {batched}")


def chunk_sizes_do_not_change_the_result(make_runner: MakeRunner) -> None:
    """A prompt gives the same tokens in one chunk, in blocks, token by token, or in irregular chunks."""
    results = {}
    size = make_runner().capacity.block_size
    for sizes in ([99], [size] * 9, [1] * 99, [2, 1, 5, 99], [size, 1, 99]):
        core = StubCore(make_runner)
        tokens = prompt_of(core, 3 * size + 2)
        chunks = chunk_sizes(sizes, len(tokens))
        row = core.feed(tokens, blocks_of(core, 0, len(tokens)), chunks, job_for(1, tokens))
        results[tuple(chunks)] = row.token_ids
    require(len(set(results.values())) == 1, f"expected equal results for all chunk sizes, got {results}")


def block_ids_do_not_change_the_result(make_runner: MakeRunner) -> None:
    """Only the order of blocks in a sequence's table matters, not their ids."""
    results = []
    for seed in range(4):
        core = StubCore(make_runner)
        tokens = prompt_of(core, 2 * core.capacity.block_size + 1)
        blocks = Random(seed).sample(range(1, 48), 4)  # noqa: S311 - the same blocks every time
        results.append(core.generate(tokens, blocks, 3, job_for(1, tokens)))
    require(all(result == results[0] for result in results), f"expected equal results in all blocks, got {results}")


def a_shared_prefix_gives_the_same_result(make_runner: MakeRunner) -> None:
    """A sequence that reads its prefix from another sequence's blocks gets the same tokens."""
    core = StubCore(make_runner)
    size = core.capacity.block_size
    tokens = prompt_of(core, 2 * size + 3)
    cold = core.feed(tokens, [1, 2, 3], [len(tokens)], job_for(1, tokens)).token_ids
    warm = core.run([job_for(2, tokens).item(tokens, [1, 2, 4], 2 * size, len(tokens))])[2].token_ids
    require(cold == warm, f"expected {cold} as without a cache, got {warm}")


def a_copied_block_is_independent(make_runner: MakeRunner) -> None:
    """After a block copy, both sequences continue independently, each as if it ran alone."""
    core = StubCore(make_runner)
    size = core.capacity.block_size
    tokens = prompt_of(core, size + 1)
    a, b = [*tokens, *prompt_of(core, 2, salt=1)], [*tokens, *prompt_of(core, 2, salt=2)]
    alone = [StubCore(make_runner).feed(ids, [1, 2, 3], [len(ids)], job_for(1, tokens)).token_ids for ids in (a, b)]
    core.feed(tokens, [1, 2], [len(tokens)], job_for(1, tokens))
    first = len(tokens)
    rows = core.run(
        [job_for(1, tokens).item(a, [1, 2, 4], first, len(a)), job_for(2, tokens).item(b, [1, 3, 5], first, len(b))],
        [BlockCopy(2, 3)],
    )
    got = [rows[1].token_ids, rows[2].token_ids]
    require(got == alone, f"expected {alone} as alone, got {got} after a copy")


def copies_run_in_order_and_before_writes(make_runner: MakeRunner) -> None:
    """A step may copy a block and write to the original, and may copy the copy."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 2)
    continued = [*tokens, *prompt_of(core, 1, salt=3)]
    expected = StubCore(make_runner).feed(continued, [1], [len(continued)], job_for(1, tokens)).token_ids
    core.feed(tokens, [1], [len(tokens)], job_for(1, tokens))
    neighbour = prompt_of(core, 2, salt=4)
    rows = core.run(
        [
            job_for(1, tokens).item(continued, [3], len(tokens), len(continued)),
            job_for(2, neighbour).item(neighbour, [1], 0, len(neighbour)),
        ],
        [BlockCopy(1, 2), BlockCopy(2, 3)],
    )
    require(rows[1].token_ids == expected, f"expected {expected}, got {rows[1].token_ids}")


def data_after_a_sequence_is_not_read(make_runner: MakeRunner) -> None:
    """The content of unused slots in the last block, and of later blocks, does not affect the tokens."""
    results = []
    for salt in range(3):
        core = StubCore(make_runner)
        size = core.capacity.block_size
        old_tokens = prompt_of(core, 2 * size, 10 + salt)
        if salt:
            core.feed(old_tokens, [1, 2], [len(old_tokens)], job_for(9, old_tokens))
        tokens = prompt_of(core, 1)
        results.append(core.feed(tokens, [1, 2], [1], job_for(1, tokens)).token_ids)
    require(len(set(results)) == 1, f"expected equal results with any data after the sequence, got {results}")


def blocks_can_be_read_and_written_back(make_runner: MakeRunner) -> None:
    """Bytes read from blocks give the same results after they are written to other blocks of another runner."""
    core = StubCore(make_runner)
    size = core.capacity.block_size
    tokens = prompt_of(core, 2 * size + 1)
    expected = core.feed(tokens, [1, 2, 3], [len(tokens)], job_for(1, tokens)).token_ids
    data = core.runner.read_blocks([1, 2])
    require([len(content) for content in data] == [core.capacity.num_kv_bytes] * 2, "a block has the wrong size")
    target = StubCore(make_runner)
    target.runner.write_blocks([5, 4], data)
    got = target.run([job_for(1, tokens).item(tokens, [5, 4, 6], 2 * size, len(tokens))])[1].token_ids
    require(got == expected, f"expected {expected}, got {got} from blocks of another runner")


def the_seed_determines_sampled_tokens(make_runner: MakeRunner) -> None:
    """Equal seeds give equal tokens and different seeds different ones; at temperature 0 the seed has no effect."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 5)

    def output(seed: int, temperature: float) -> tuple[int, ...]:
        params = ResolvedSampling(temperature=temperature)
        return tuple(StubCore(make_runner).generate(tokens, [1, 2, 3, 4], 4, Job(1, len(tokens), params, seed)))

    require(output(1, 1.0) == output(1, 1.0), "the same seed gave two results")
    require(len({output(seed, 1.0) for seed in range(8)}) > 1, "eight seeds gave one result")
    require(len({output(seed, 0.0) for seed in range(3)}) == 1, "the seed changes the result at temperature 0")


def stop_tokens_are_excluded_before_min_tokens(make_runner: MakeRunner) -> None:
    """A stop token is not chosen before `min_tokens` tokens, however likely it is."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 3)
    stops = frozenset(range(1, core.capacity.vocabulary_size))
    params = ResolvedSampling(stop_token_ids=stops, min_tokens=3, max_tokens=9)
    got = core.generate(tokens, [1, 2, 3, 4, 5, 6], 3, Job(1, len(tokens), params))
    require(got == [0, 0, 0], f"expected no stop token among the first three tokens, got {got}")


def continuations_sample_differently(make_runner: MakeRunner) -> None:
    """Seed, continuation and position determine the random number, so continuations of one prompt differ."""

    def output(index: int) -> tuple[int, ...]:
        core = StubCore(make_runner)
        tokens = prompt_of(core, 5)
        job = Job(1, len(tokens), ResolvedSampling(), index=index)
        return tuple(core.generate(tokens, [1, 2, 3, 4], 4, job))

    require(output(3) == output(3), "the same continuation gave two results")
    require(len({output(index) for index in range(8)}) > 1, "eight continuations gave one result")


def sampling_parameters_restrict_tokens(make_runner: MakeRunner) -> None:
    """The only allowed token is chosen, a banned token never is, and top-k 1 equals temperature 0."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 5)

    def output(params: ResolvedSampling) -> list[int]:
        return StubCore(make_runner).generate(tokens, [1, 2, 3, 4], 4, Job(1, len(tokens), params))

    require(output(ResolvedSampling(allowed_token_ids=(7,))) == [7] * 4, "got a token that was not allowed")
    greedy = output(ResolvedSampling(temperature=0.0))
    unbanned = output(ResolvedSampling(temperature=0.0, banned_token_ids=tuple(set(greedy))))
    require(not set(greedy) & set(unbanned), f"expected none of the banned tokens {greedy}, got {unbanned}")
    require(output(ResolvedSampling(top_k=1)) == greedy, "top_k 1 differs from temperature 0")


def the_largest_step_gives_the_same_results(make_runner: MakeRunner) -> None:
    """A step with the maximum number of tokens, in many rows, gives each row the same result as alone."""
    core = StubCore(make_runner)
    capacity = core.capacity
    num_rows = min(16, capacity.num_blocks // 2)
    length = min(capacity.max_step_tokens // num_rows, capacity.num_blocks // num_rows * capacity.block_size)
    num_blocks = core.num_blocks_for(length)
    prompts = [prompt_of(core, length, salt) for salt in range(num_rows)]
    tables = [list(range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)) for row in range(num_rows)]
    items = [job_for(row, prompt).item(prompt, tables[row], 0, length) for row, prompt in enumerate(prompts)]
    results = core.run(items)
    for row in (0, num_rows - 1):
        alone = StubCore(make_runner).run([items[row]])[row]
        require(alone == results[row], f"row {row}: expected {alone} as alone, got {results[row]} in the largest step")


def a_step_does_not_change_other_blocks(make_runner: MakeRunner) -> None:
    """Blocks that are neither written by a row nor the target of a copy stay unchanged."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 3)
    other_blocks = [block for block in range(1, core.capacity.num_blocks + 1) if block not in (5, 6)]
    core.feed(prompt_of(core, 9, salt=1), [1, 2, 3], [9], job_for(9, tokens))
    data = core.runner.read_blocks(other_blocks)
    core.feed(tokens, [5], [1, 2], job_for(1, tokens))
    core.run([], [BlockCopy(5, 6)])
    require(core.runner.read_blocks(other_blocks) == data, "a block changed although no row and no copy wrote it")


def logprobs_do_not_depend_on_the_batch(make_runner: MakeRunner) -> None:
    """Log-probabilities of chosen and of prompt tokens are the same alone, in a batch, and in chunks."""

    def items(core: StubCore, ends: Sequence[int]) -> list[WorkItem]:
        tokens, chunks, first = prompt_of(core, 9), [], 0
        job = Job(1, len(tokens), ResolvedSampling(logprobs=2))
        for end in ends:
            item = job.item(tokens, [1, 2, 3], first, end)
            targets = tuple(tokens[first + 1 : end + 1])
            chunks.append(item._replace(scoring=Scoring(first + 1, targets, 1) if targets else None))
            first = end
        return chunks

    core = StubCore(make_runner)
    alone = core.run(items(core, [9]))[1]
    core = StubCore(make_runner)
    neighbour = prompt_of(core, 6, salt=5)
    batched = core.run([*items(core, [9]), job_for(2, neighbour).item(neighbour, [4, 5], 0, 6)])[1]
    require(batched == alone, f"expected {alone} as alone, got {batched} in a batch")
    core = StubCore(make_runner)
    parts = [core.run([item])[1] for item in items(core, [4, 8, 9])]
    scores = tuple(entry for part in parts for entry in part.scores)
    require(scores == alone.scores, f"expected {alone.scores} as in one chunk, got {scores}")
    logprobs = parts[-1].logprobs
    require(logprobs == alone.logprobs, f"expected {alone.logprobs} as in one chunk, got {logprobs}")


def a_sequence_id_can_be_reused(make_runner: MakeRunner) -> None:
    """A new sequence may reuse the id of an earlier sequence."""
    core = StubCore(make_runner)
    first, second = prompt_of(core, 6, salt=1), prompt_of(core, 7, salt=2)
    expected = StubCore(make_runner).feed(second, [3, 4], [7], job_for(1, second)).token_ids
    core.feed(first, [1, 2], [6], job_for(1, first))
    row = core.run([job_for(1, second).item(second, [3, 4], 0, 7)])[1]
    require(row.token_ids == expected, f"expected {expected}, got {row.token_ids} after a sequence with the same id")


def logprobs_match_the_request(make_runner: MakeRunner) -> None:
    """Chosen and prompt tokens have log-probabilities of at most 0, with as many alternatives as requested."""
    core = StubCore(make_runner)
    tokens = prompt_of(core, 5)
    item = Job(1, len(tokens), ResolvedSampling(logprobs=2)).item(tokens, [1, 2, 3, 4, 5], 0, len(tokens))
    row = core.run([item._replace(scoring=Scoring(1, tuple(tokens[1:]), 1))])[1]
    require(len(row.logprobs) == 1, f"expected one logprob for one token, got {len(row.logprobs)}")
    require(row.logprobs[0].token_id == row.token_ids[0], "expected the logprob of the chosen token")
    require(len(row.logprobs[0].alternatives) == 2, f"expected 2 alternatives, got {len(row.logprobs[0].alternatives)}")
    targets = [entry.token_id for entry in row.scores]
    require(targets == list(tokens[1:]), f"expected scores of {tokens[1:]}, got {targets}")
    values = [entry.logprob for entry in (*row.logprobs, *row.scores)]
    require(all(value <= 0.0 for value in values), f"expected log-probabilities of at most 0, got {values}")


def closing_twice_has_no_effect(make_runner: MakeRunner) -> None:
    """A second `close` has no effect, and the capacity stays the same."""
    runner = make_runner()
    capacity = runner.capacity
    runner.close()
    runner.close()
    require(runner.capacity == capacity, "the capacity changed")


CHECKS: tuple[Callable[[MakeRunner], None], ...] = (
    rows_sample_only_after_the_last_known_token,
    a_row_does_not_depend_on_its_batch,
    chunk_sizes_do_not_change_the_result,
    block_ids_do_not_change_the_result,
    a_shared_prefix_gives_the_same_result,
    a_copied_block_is_independent,
    copies_run_in_order_and_before_writes,
    data_after_a_sequence_is_not_read,
    blocks_can_be_read_and_written_back,
    the_seed_determines_sampled_tokens,
    continuations_sample_differently,
    sampling_parameters_restrict_tokens,
    the_largest_step_gives_the_same_results,
    a_step_does_not_change_other_blocks,
    logprobs_do_not_depend_on_the_batch,
    a_sequence_id_can_be_reused,
    stop_tokens_are_excluded_before_min_tokens,
    logprobs_match_the_request,
    closing_twice_has_no_effect,
    *output_checks.CHECKS,
)
