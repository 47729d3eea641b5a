"""What a server has written of itself is a load: the requests that were let in, and how long their answers were."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from quire import cli
from quire.core.events import Queued, SequenceFinished
from quire.core.request import Continuation, Request, ResolvedSampling
from quire.workload.traces import TraceError, read_trace
from tests.support.workers.traced_engines import RandomLife, traced_engine, write_life


class ToldLife(RandomLife):
    """Remembers what was let in, and what clients were told."""

    def remember(self) -> "ToldLife":
        self.entered: dict[str, Request] = {}
        self.counts: Counter[tuple[str, int]] = Counter()
        return self

    def submit(self) -> None:
        request = self._request()
        if isinstance(self.engine.submit(request), Queued):
            self.entered[request.request_id] = request

    def step(self) -> None:
        for event in self.engine.step(self._clock):
            if isinstance(event, SequenceFinished):
                self.counts[event.request_id, event.sequence_index] = event.num_output_tokens


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_that_was_let_in_is_a_request_with_its_prompt_and_its_length(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "trace.jsonl"
    life = ToldLife(traced_engine(path, Random(seed), own_tokens=True), Random(seed)).remember()
    life.live(150)
    life.finish()
    known = life.entered.values()
    expected = Counter(
        (request.prompt, life.counts[request.request_id, one.index], request.tenant, request.priority.value)
        for request in known
        for one in request.continuations
    )
    extra = Counter((row.token_ids, row.output_tokens, row.tenant, row.priority) for row in read_trace(path).rows)
    assert expected
    assert not expected - extra


def test_an_answer_that_had_not_ended_when_the_trace_did_counts_as_far_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = traced_engine(path, Random(1), own_tokens=True)
    space = engine.info.namespace("a")
    params = ResolvedSampling(max_tokens=12, temperature=0.0)
    both = (Continuation(0), Continuation(1))
    engine.submit(Request("r", (1, 0, 1), space, 5.0, params, continuations=both))
    for moment in range(6):
        engine.step(lambda moment=moment: 6.0 + moment)  # type: ignore[misc]
    counts = [one.num_output_tokens for one in engine.scheduler.live["r"].sequences]
    engine.close()
    assert [row.output_tokens for row in read_trace(path).rows] == counts
    assert min(counts) > 0


def test_a_request_that_a_second_worker_went_on_with_is_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    produced: tuple[int, ...] = ()
    for num_steps in (3, 20):
        engine = traced_engine(path, Random(3), own_tokens=True)
        enter = engine.restore if produced else engine.submit
        params, space = ResolvedSampling(max_tokens=9), engine.info.namespace("a")
        enter(Request("r", (1, 0, 1), space, 5.0, params, continuations=(Continuation(0, produced),)))
        for moment in range(num_steps):
            engine.step(lambda moment=moment: 6.0 + moment)  # type: ignore[misc]
        if not produced:
            (sequence,) = engine.scheduler.live["r"].sequences
            produced = tuple(sequence.tokens[3:])
        engine.close()
    (row,) = read_trace(path).rows
    assert (row.token_ids, row.output_tokens) == ((1, 0, 1), 9)


@pytest.mark.parametrize("share", [0.3, 0.55, 0.8, 0.99])
def test_a_trace_that_was_cut_off_is_a_load_as_far_as_it_goes(tmp_path: Path, share: float) -> None:
    path = tmp_path / "trace.jsonl"
    write_life(path, 5)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    before = len(read_trace(path).rows)
    write_life(path, 6)
    assert len(read_trace(path).rows) > before > 0


@pytest.mark.parametrize(
    "line", ['{"is":"plan"}', '{"is":"submit"}', "[]", '{"is":"events","events":[[]]}', "no JSON", '{"is":"result"}']
)
def test_what_is_damaged_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_life(path, 5, 20)
    with path.open("a") as file:
        file.write(f'{line}\n{{"is":"clear"}}\n')
    with pytest.raises(TraceError, match="damaged"):
        read_trace(path)


def test_the_simulator_answers_what_a_server_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_life(path, 7)
    result = CliRunner().invoke(cli.app, ["sim", str(path), "--block-size", "2", "--pool", "50", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_requests"] == len(read_trace(path).rows)
