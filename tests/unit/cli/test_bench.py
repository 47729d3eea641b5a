"""What a person sees of the benchmark."""

import json
import sys
import threading
from asyncio import AbstractEventLoop, Event, new_event_loop
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.null_server import Manner, null_server
from quire import cli, verdicts
from quire.cli.bench import commands as bench
from quire.cli.bench import progress as bench_progress
from quire.cli.bench.progress import Tally
from quire.errors import ConfigError, QuireError
from tests.support.servers.talkers import talker
from tests.unit.bench.outcomes import outcome

QUICK = ("--requests", "4", "--output-tokens", "3", "--prompt-tokens", "4", "--concurrency", "2")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that thinks nothing, on a thread of its own: commands have an event loop of their own."""
    found: list[str] = []
    ready, loop = threading.Event(), new_event_loop()
    over = Event()

    async def main() -> None:
        async with null_server(Manner(first_s=0.001, gap_s=0.0005)) as address:
            found.append(address)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=_run, args=(loop, main()))
    thread.start()
    ready.wait(60)
    yield found[0]
    loop.call_soon_threadsafe(over.set)
    thread.join()


def _run(loop: AbstractEventLoop, work: Any) -> None:
    loop.run_until_complete(work)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["bench", *words])
    if isinstance(result.exception, QuireError):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_serve_prints_a_table_for_people_and_one_object_for_programs(url: str, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "r.json", tmp_path / "t.png"
    words = ("--save", str(saved), "--save-detailed", "--plot", str(drawn), "--goodput", "ttft:60000")
    code, out, err = run("serve", "--url", url, *QUICK, *words)
    record = json.loads(out)
    assert (code, record["completed"], record["total_output_tokens"]) == (0, 4, 12)
    assert record["request_goodput"] == pytest.approx(record["request_throughput"])
    for words_told in ("output tokens/s", "time to first token", "goodput (requests/s)"):
        assert words_told in err
    assert len(json.loads(saved.read_text())["ttfts"]) == 4
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_classes_of_a_mixed_workload_have_a_table_of_their_own(url: str) -> None:
    code, out, err = run(
        "serve",
        "--url",
        url,
        "--seed",
        "3",
        *["--workload", "mixed", "--prompts", "chat", "--requests", "40", "--output-tokens", "2"],
    )
    assert (code, set(json.loads(out)["by_kind"])) == (0, {"person", "agent", "job"})
    assert all(kind in err for kind in ("person", "agent", "job"))


def test_sweep_prints_a_row_for_each_number_of_clients(url: str, tmp_path: Path) -> None:
    words = ("--clients", "1,2", "--save", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png"))
    code, out, err = run("sweep", "--url", url, *QUICK, *words)
    assert (code, [point["max_concurrency"] for point in json.loads(out)["points"]]) == (0, [1, 2])
    assert err.startswith("clients")
    assert (tmp_path / "s.png").exists()
    assert json.loads((tmp_path / "s.json").read_text())["sweep"] == "concurrency"


def test_ab_writes_both_sides_and_compare_reads_them(url: str, tmp_path: Path) -> None:
    code, out, _ = run("ab", "--a", url, "--b", url, *QUICK, "--rounds", "7", "--save", str(tmp_path / "x.json"))
    first = json.loads(out)
    again_code, again, err = run("compare", str(tmp_path / "x.a.json"), str(tmp_path / "x.b.json"))
    assert json.loads(again) == first
    assert code == again_code == (1 if first["verdict"] == "slower" else 0)
    assert err.strip().endswith(first["verdict"])
    assert "noise" in err


def test_a_slower_b_ends_with_1_and_files_of_two_runs_with_3(tmp_path: Path) -> None:
    def side(rate: float, run_id: str = "r") -> dict[str, Any]:
        rounds = [{"output_throughput": rate, "failed": 0}] * 8
        return {"run_id": run_id, "machine": {}, "load": {}, "rounds": rounds}

    for name, content in (("a", side(100.0)), ("b", side(80.0)), ("c", side(80.0, "other"))):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert run("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))[0] == 1
    assert run("compare", str(tmp_path / "b.json"), str(tmp_path / "a.json"))[0] == 0
    code, out, _ = run("compare", str(tmp_path / "a.json"), str(tmp_path / "c.json"))
    assert (code, json.loads(out)["verdict"]) == (3, "not comparable")


def test_the_engine_is_measured_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.bench.engine.open_model", lambda *_, **__: talker())
    words = ("--prompt-tokens", "8", "--output-tokens", "4", "--prefix-tokens", "16", "--rounds", "1", "--no-roof")
    files = ("--save", str(tmp_path / "e.json"), "--plot", str(tmp_path / "e.png"))
    code, out, err = run("engine", "oracle", "--batches", "1,4", *words, *files)
    assert (code, [one["batch"] for one in json.loads(out)["batches"]]) == (0, [1, 4])
    assert "times sooner" in err
    assert json.loads((tmp_path / "e.json").read_text())["model"] == "oracle"
    assert (tmp_path / "e.png").exists()


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("serve", "--url", "nowhere"), "url"),
        (("serve", "--url", "http://x", "--workload", "odd"), "workload"),
        (("serve", "--url", "http://x", "--extra-body", "[1]"), "--extra-body"),
        (("serve", "--url", "http://x", "--header", "odd"), "--header"),
        (("serve", "--url", "http://x", "--goodput", "fast"), "goodput"),
        (("sweep", "--url", "http://x", "--clients", "1,two"), "--clients"),
        (("engine", "m", "--batches", "0"), "--batches"),
    ],
)
def test_what_cannot_be_is_refused_by_its_flag(words: tuple[str, ...], flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(*words)
    assert refused.value.settings == (flag,)


def test_nothing_answered_is_an_error(url: str) -> None:
    code, out, err = run("serve", "--url", url, *QUICK, "--timeout", "0.0000001", "--warmups", "0")
    assert (code, json.loads(out)["failed"]) == (1, 4)
    assert "no request succeeded" in err


def test_elsewhere_than_on_a_terminal_a_line_comes_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter(range(1000))

    def clock() -> float:
        return float(next(moments))

    with bench_progress._lines(Tally(clock), clock) as told:
        told.on_run_start("round 1", 20)
        for _ in range(20):
            told.on_outcome(outcome(0.0, [0.5]))
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) < 10
    assert lines[0].startswith("round 1: ")
    assert "tokens/s" in lines[0]


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with bench_progress.show_run() as told:
        told.on_run_start("a", 2)
        told.on_outcome(outcome(0.0, [0.5]))
        told.on_run_start("b", 1)
        told.on_outcome(outcome(0.0, [], error="timeout"))
    assert "1 failed" in capsys.readouterr().err


def test_the_threshold_told_in_the_help_is_the_one_that_is_used() -> None:
    import inspect  # noqa: PLC0415

    assert inspect.signature(bench.compare).parameters["threshold"].default == verdicts.THRESHOLD
