"""The same prompt sent again while the first request still computes it is computed once, whether or not the first
client stays (DESIGN, idea 4)."""

from hypothesis import given
from hypothesis import strategies as st

from quire.core.events import Admitted, FirstToken, PromptProgress
from tests.support.servers.server import VOCABULARY, Server

BLOCK = 4
STEP_TOKENS = 16
lengths = st.integers(1, 150)
steps = st.integers(0, 12)


def prompt_of(length: int) -> list[int]:
    return [at * at % VOCABULARY for at in range(length)]


@given(lengths, st.lists(st.tuples(steps, steps), min_size=1, max_size=4), st.integers(0, 12))
def test_requests_with_the_same_prompt_compute_it_once_between_them_though_some_leave(
    length: int, visits: list[tuple[int, int]], first_leaves: int
) -> None:
    """Each visit is the step before which the prompt is sent again, and the number of steps until its client leaves;
    the last one stays."""
    server = Server(128, BLOCK, max_step_tokens=STEP_TOKENS)
    arrivals = {0: first_leaves, **dict(visits)}
    last = max(arrivals)
    leaves: dict[str, int] = {}
    for step in range(40):
        if step in arrivals:
            name = server.ask(prompt_of(length), max_tokens=1)
            if step != last:
                leaves[name] = step + arrivals[step]
        for name in [name for name, when in leaves.items() if when == step]:
            server.cancel(name)
        server.step()
    server.run()
    # Each request computes what a hit leaves: the tokens after the last full block, at least one.
    num_left = length - (length - 1) // BLOCK * BLOCK
    assert server.scheduler.stats.num_computed_tokens <= length + num_left * (len(arrivals) - 1)


@given(lengths, st.integers(0, 6))
def test_progress_counts_what_is_computed_and_what_is_found_up_to_the_whole_prompt(length: int, later: int) -> None:
    server = Server(128, BLOCK, max_step_tokens=STEP_TOKENS)
    names = [server.ask(prompt_of(length), max_tokens=1, reports_progress=True)]
    silent = server.ask(prompt_of(length + 1), max_tokens=1)
    for _ in range(later):
        server.step()
    names.append(server.ask(prompt_of(length), max_tokens=1, reports_progress=True))
    server.run()
    for name in names:
        events = [event for event in server.log if event.request_id == name]
        admitted = next(event for event in events if isinstance(event, Admitted))
        first = next(event for event in events if isinstance(event, FirstToken))
        reported = [event for event in events if isinstance(event, PromptProgress)]
        counts = [admitted.num_cached_tokens, *(event.num_computed_tokens for event in reported)]
        assert counts == sorted(set(counts))
        assert counts[-1] == length
        assert reported[-1].num_cached_tokens == first.num_cached_tokens
        assert events.index(admitted) < events.index(reported[0])
        assert events.index(reported[-1]) < events.index(first)
    assert not any(isinstance(event, PromptProgress) and event.request_id == silent for event in server.log)
