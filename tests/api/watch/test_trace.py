"""`quire serve --trace`: what real workers write, killed or not, and what `quire replay` says of it."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import cli
from quire.cli.serve.model_traces import ModelTraces
from quire.client.engines.served import ServedModel
from quire.client.request.params import SamplingParams
from quire.config import ModelSettings, OnDemandModel, ServerSettings
from quire.errors import ConfigError, ReplayError
from quire.sim.replay.replay import replay
from tests.support.errors import raises_code
from tests.support.servers.served import served

TINY = ModelSettings(memory_bytes=40, block_size=4, max_step_tokens=32, max_running=8, max_sequence_tokens=120)


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(words))
    return result.exit_code, result.stdout, result.stderr


def traced(path: Path, *, kill: bool) -> None:
    """A worker answers many at once in a pool that is too small for them, and is killed in the middle."""
    traces = ModelTraces(ServerSettings(trace=path), [OnDemandModel("m", "m", is_kept=True)])

    async def ask(model: ServedModel, number: int) -> None:
        params = SamplingParams(
            max_tokens=20 + number, temperature=number % 2, seed=number, n=1 + number % 2, ignore_eos=True
        )
        await model.generate(f"{'once upon a time ' * (number % 3)}{number}", params)

    async def main() -> None:
        async with served(TINY, trace=traces.of("m"), step_s=0.002) as model:
            asking = [asyncio.create_task(ask(model, number)) for number in range(12)]
            if kill:
                async for piece in model.stream("tell me", SamplingParams(max_tokens=40, ignore_eos=True)):
                    worker = model.supervisor
                    if len(piece.token_ids) and worker.load.num_steps > 5 and not worker.num_restarts:
                        os.kill(model.supervisor.pid or 0, signal.SIGKILL)
                        break
            leaving = asyncio.create_task(ask(model, 30))
            await asyncio.gather(*asking)
            leaving.cancel()
            await model.generate("and then", SamplingParams(max_tokens=3))
            assert model.supervisor.num_restarts == kill

    asyncio.run(main())


@pytest.mark.parametrize("kill", [False, True])
def test_what_a_real_worker_did_is_planned_the_same_when_it_is_replayed(tmp_path: Path, kill: bool) -> None:
    path = tmp_path / "trace.jsonl"
    traced(path, kill=kill)
    report = replay(path)
    assert report.is_same, "\n".join(report.lines())
    assert len(report.sessions) == 1 + kill
    assert '"preempted"' in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_command_says_that_it_is_the_same_or_shows_what_is_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced(path, kill=False)
    code, out, _ = run("replay", str(path))
    assert (code, out.count("every plan is the same")) == (0, 1)
    code, out, _ = run("replay", str(path), "--json")
    assert (code, json.loads(out)["is_same"]) == (0, True)

    lines = path.read_text().splitlines()
    number = [at for at, line in enumerate(lines) if '"is":"plan"' in line][20]
    plan = json.loads(lines[number])
    plan["rows"][0][1] += 1
    lines[number] = json.dumps(plan)
    path.write_text("\n".join(lines) + "\n")
    code, out, _ = run("replay", str(path))
    assert code == 1
    assert f"different plan in step {plan['step']} (line {number + 1})" in out
    assert "recorded  sequence" in out
    assert "now       sequence" in out
    code, out, _ = run("replay", str(path), "--json")
    assert (code, json.loads(out)["sessions"][0]["difference"]["line"]) == (1, number + 1)


def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, text in (
        ("empty", ""),
        ("text", "hello\n"),
        ("other", '{"is":"clear"}\n'),
        ("later", '{"is":"header","quire_trace":9}\n'),
    ):
        path = tmp_path / name
        path.write_text(text)
        with raises_code(ReplayError, "invalid_trace"):
            CliRunner().invoke(cli.app, ["replay", str(path)], catch_exceptions=False)
    with raises_code(ReplayError, "file_not_readable"):
        CliRunner().invoke(cli.app, ["replay", str(tmp_path / "none")], catch_exceptions=False)


def test_each_model_has_a_file_of_its_own_made_when_it_is_needed(tmp_path: Path) -> None:
    models = [OnDemandModel("a", "a", is_kept=True), OnDemandModel("b", "b"), OnDemandModel("c", "c")]
    traces = ModelTraces(ServerSettings(trace=tmp_path / "trace.jsonl"), models)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
    first, again, other = traces.of("a"), traces.of("a"), traces.of("c")
    assert first is not None
    assert other is not None
    assert first == again
    assert first.key != other.key
    assert Path(other.path).name == "trace-3.jsonl"
    with raises_code(ConfigError, "trace_exists"):
        ModelTraces(ServerSettings(trace=tmp_path / "trace.jsonl"), models)


def test_without_the_setting_nothing_is_traced() -> None:
    assert ModelTraces(ServerSettings(), [OnDemandModel("a", "a", is_kept=True)]).of("a") is None


def test_replicas_are_not_traced_into_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    with raises_code(ConfigError, "trace_with_replicas"):
        CliRunner().invoke(cli.app, ["serve", "model", "--replicas", "2", "--trace", path], catch_exceptions=False)
