"""Whole measurements, of a server that thinks nothing."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.null_server import Manner, NullServer, null_server
from quire.bench import records as report
from quire.bench import runs
from quire.bench.outcome import Run
from quire.bench.records import Record
from quire.bench.runs import BenchOptions, RunListener, measure_interleaved, run_load, seeded, sweep_clients
from quire.bench.setup import LoadSetup
from quire.errors import ConfigError
from quire.http_client import ServerAddress
from tests.support.errors import raises_code
from tests.support.servers.scripted_server import scripted
from tests.unit.bench.outcomes import outcome

QUICK = Manner(first_s=0.001, gap_s=0.0005)
SETUP = LoadSetup(workload="chat", prompts="chat", requests=6, output_tokens=3, turns=2, concurrency=2, seed="7")


def served(setup: LoadSetup) -> tuple[Record, Run]:
    async def main() -> tuple[Record, Run]:
        async with null_server(QUICK) as url:
            return await run_load(ServerAddress.parse(url), setup, BenchOptions(metadata={"build": "x"}), RunListener())

    return asyncio.run(main())


def test_a_run_is_recorded_with_its_setup_and_its_figures() -> None:
    record, run = served(SETUP)
    assert (record["completed"], record["failed"], record["total_output_tokens"]) == (6, 0, 18)
    assert (record["model_id"], record["max_concurrency"], record["request_rate"]) == ("null", 2, "inf")
    assert (record["build"], record["load"]["seed"], record["endpoint_type"]) == ("x", "7", "openai-chat")
    assert [one.finish_reason for one in run.outcomes] == ["length"] * 6
    assert json.loads(json.dumps(record)) == record


def test_a_detailed_result_has_every_request_under_the_fields_names() -> None:
    _, run = served(SETUP)
    detail = report.per_request_data(run)
    assert set(detail) == {
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "start_times",
        "generated_texts",
        "errors",
    }
    assert all(len(one) == 6 for one in detail.values())
    assert [len(gaps) for gaps in detail["itls"]] == [2] * 6


def test_tables_have_a_row_for_everything_a_person_asks() -> None:
    record, _ = served(SETUP)
    assert [row[0] for row in report.rows(record)][:3] == ["requests", "requests/s", "output tokens/s"]
    assert len(report.latency_rows(record)) == 4
    assert report.point_rows([record])[0][0] == "2"


def test_a_sweep_measures_each_number_of_clients() -> None:
    async def main() -> list[Record]:
        async with null_server(QUICK) as url:
            setup = LoadSetup(requests=4, concurrency=2, output_tokens=3, prompt_tokens=4, seed="1")
            return await sweep_clients(ServerAddress.parse(url), setup, (1, 2, 4), BenchOptions(), RunListener())

    points = asyncio.run(main())
    assert [point["max_concurrency"] for point in points] == [1, 2, 4]
    assert [point["completed"] for point in points] == [2, 4, 8]
    assert len({point["run_id"] for point in points}) == 1


def test_two_servers_take_turns_and_get_the_same_prompts() -> None:
    began: list[str] = []

    async def main() -> tuple[Record, Record]:
        async with null_server(QUICK) as one, null_server(QUICK) as other:
            setup = LoadSetup(requests=2, output_tokens=3, prompt_tokens=4, seed="1")
            servers = ServerAddress.parse(one), ServerAddress.parse(other)
            listener = RunListener(lambda title, _count: began.append(title))
            return await measure_interleaved(servers, setup, 3, BenchOptions(), listener)

    a, b = asyncio.run(main())
    assert [title[-1] for title in began] == ["A", "B", "B", "A", "A", "B"]
    assert (a["run_id"], a["load"]) == (b["run_id"], b["load"])
    assert (a["side"], len(a["rounds"]), a["completed"], a["total_output_tokens"]) == ("A", 3, 6, 18)
    assert a["duration"] == pytest.approx(sum(one["duration"] for one in a["rounds"]))


def test_a_server_that_refuses_the_first_request_is_told_before_the_load() -> None:
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(models), models)

    async def main() -> None:
        async with scripted([answer]) as url:
            await run_load(ServerAddress.parse(url), SETUP, BenchOptions(), RunListener())

    with raises_code(ConfigError, "first_request_failed"):
        asyncio.run(main())


def test_a_server_that_is_still_loading_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RETRY_INTERVAL_S", 0.0)
    answers: list[int] = []

    class Loading(NullServer):
        async def _stream(self, writer: asyncio.StreamWriter, body: Mapping[str, Any], *, is_chat: bool) -> None:
            answers.append(200 if len(answers) >= 2 else 503)
            if answers[-1] == 200:
                await super()._stream(writer, body, is_chat=is_chat)
            else:
                writer.write(b"HTTP/1.1 503 Loading\r\nContent-Length: 0\r\n\r\n")

    async def main() -> Record:
        server = await asyncio.start_server(Loading(QUICK).serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return (await run_load(ServerAddress.parse(url), SETUP, BenchOptions(), RunListener()))[0]

    assert asyncio.run(main())["failed"] == 0
    assert answers[:3] == [503, 503, 200]


def test_a_fresh_seed_is_drawn_where_none_was_given() -> None:
    assert seeded(LoadSetup()).seed != seeded(LoadSetup()).seed
    assert seeded(LoadSetup(seed="4")).seed == "4"


def test_a_record_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    report.save(path, {"a": 1})
    assert report.read_record(path) == {"a": 1}
    assert [one.name for one in path.parent.iterdir()] == ["result.json"]


def test_what_is_no_result_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name, content, code in (("list.json", "[]", "invalid_config"), ("odd.json", "{", "cannot_read_result")):
        (tmp_path / name).write_text(content)
        with raises_code(ConfigError, code):
            report.read_record(tmp_path / name)
    with raises_code(ConfigError, "cannot_read_result"):
        report.read_record(tmp_path / "none.json")
    (tmp_path / "file").touch()
    with raises_code(ConfigError, "invalid_config"):
        report.save(tmp_path / "file" / "below.json", {})


def test_a_failed_request_has_its_story_in_the_detail() -> None:
    bad = outcome(0.0, [], error="http 503", detail="full")
    assert report.per_request_data(Run(0.0, 1.0, (bad,)))["errors"] == ["http 503: full"]
