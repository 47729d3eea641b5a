"""The stream for those who run the server: what is in it, who may read it, and what becomes of readers that leave."""

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.keys import add_key
from quire.api.http.limits import MAX_WATCHERS
from quire.api.http.request_record import RequestRecord
from quire.api.watch.watch_routes import WatchResponse
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import paced_talker, talker

PATH = "/v1/admin/watch"
BODY = {"model": "oracle", "prompt": "the same beginning and then", "max_tokens": 40, "ignore_eos": True}


class Reader:
    """One who watches."""

    def __init__(self, here: LiveServer, path: str = PATH, key: str = "") -> None:
        self.connection: HTTPConnection = here.connection()
        self.connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        self.response: HTTPResponse = self.connection.getresponse()
        self._deadline_s = time.monotonic() + PATIENCE_S

    def event(self) -> dict[str, Any]:
        """The next one."""
        assert time.monotonic() < self._deadline_s, "there is always a next one: what was waited for never came"
        assert self.response.readline() == b"event: snapshot\n"
        line = self.response.readline()
        assert line.startswith(b"data: ")
        assert self.response.readline() == b"\n"
        found: dict[str, Any] = json.loads(line[6:])
        return found

    def leave(self) -> None:
        self.response.close()
        self.connection.close()


@pytest.fixture
def here() -> Iterator[LiveServer]:
    """One that nobody else has asked anything: what is shown is all that there was."""
    with house(models={"oracle": talker(num_blocks=512), "other": talker()}) as here:
        yield here


@pytest.fixture
def reader(here: LiveServer) -> Iterator[Reader]:
    one = Reader(here)
    yield one
    one.leave()
    here.wait_until(lambda: not here.admission.watchers.num_subscribers)


def event_with_pool(reader: Reader) -> dict[str, Any]:
    """The first snapshot may come a moment after the first event."""
    while True:
        event = reader.event()
        if event["pool"]["cells"]:
            return event


def test_an_event_says_what_the_pool_holds_and_what_was_asked(here: LiveServer, reader: Reader) -> None:
    asked = here.post("/v1/completions", BODY)
    event = reader.event()
    while not event["totals"]["num_requests"] or not event["tree"]["nodes"]:
        event = reader.event()
    cells = base64.b64decode(event["pool"]["cells"])
    assert len(cells) == event["pool"]["num_blocks"] == sum(event["pool"]["counts"].values()) == 512
    assert event["pool"]["counts"]["cached"] == sum(cell & 7 == 1 for cell in cells) > 0
    assert event["models"] == [
        {"name": "oracle", "state": "ready", "is_watched": True},
        {"name": "other", "state": "ready", "is_watched": False},
    ]
    assert event["tree"]["num_tokens"] == event["pool"]["counts"]["cached"] * event["pool"]["block_size"]
    line = event["requests"][-1]
    assert line["request_id"] == asked.headers["x-request-id"]
    assert (line["tenant"], line["class"], line["model"], line["state"]) == ("default", "normal", "oracle", "done")
    phases = [(phase, start_s, end_s) for phase, start_s, end_s in line["segments"]]
    assert [phase for phase, _, _ in phases] == ["waiting", "prompt", "answering"]
    assert all(before[2] == after[1] for before, after in itertools.pairwise(phases))


def test_a_block_tells_its_chain_and_whose_it_is_and_nothing_of_what_is_in_it(here: LiveServer, reader: Reader) -> None:
    here.post("/v1/completions", BODY)
    event = event_with_pool(reader)
    while not event["tree"]["nodes"]:
        event = reader.event()
    block = event["tree"]["nodes"][0]["id"]
    facts = here.get(f"/v1/admin/blocks/{block}").json
    assert facts["chain"] == [block]
    child = here.get(f"/v1/admin/blocks/{facts['children'][0]}").json
    assert child["chain"] == [block, child["block_id"]]
    assert (facts["state"], facts["tenant"], facts["cache_group"]) == ("cached", "default", "tenant:default")
    assert set(facts) == {
        "block_id", "state", "ref_count", "pin_count", "digest", "cache_group", "tenant", "age_s", "num_tokens",
        "chain", "children", "requests",
    }  # fmt: skip
    assert here.get("/v1/admin/blocks/0").status == 404
    assert here.get("/v1/admin/blocks/513").status == 404
    assert here.get("/v1/admin/blocks/one").status == 400


def test_who_holds_a_block_and_what_runs_have_the_names_of_the_answers() -> None:
    opened, runner = paced_talker()
    with house(models={"oracle": opened}) as here:
        reader = Reader(here)
        connection = here.connection()
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"x-request-id": "mine"})
        event = reader.event()
        while not event["running"]:
            runner.allow(1)
            event = reader.event()
        row = event["running"][0]
        assert (row["request_id"], row["tenant"], row["class"]) == ("mine", "default", "normal")
        assert row["phase"] in ("prompt", "answer")
        states = [cell & 7 for cell in base64.b64decode(event["pool"]["cells"])]
        block = 1 + next(at for at, state in enumerate(states) if state)
        runner.let_go()
        facts = here.get(f"/v1/admin/blocks/{block}").json
        assert facts["requests"] in (["mine"], [])
        assert connection.getresponse().read()
        connection.close()
        reader.leave()


def test_nothing_is_made_while_nobody_looks(here: LiveServer) -> None:
    engine = here.opened["oracle"].engine
    before = engine.num_snapshots
    here.post("/v1/completions", BODY)
    assert engine.num_snapshots == before
    one = Reader(here)
    event_with_pool(one)
    one.leave()
    here.wait_until(lambda: engine.watch is None)
    after = engine.num_snapshots
    assert after > before
    here.post("/v1/completions", BODY)
    assert engine.num_snapshots == after


def test_there_may_be_so_many_readers_and_one_look_serves_them_all(here: LiveServer) -> None:
    engine = here.opened["oracle"].engine
    readers = [Reader(here) for _ in range(MAX_WATCHERS)]
    event_with_pool(readers[0])
    refused = here.get(PATH)
    assert (refused.status, refused.code) == (503, "too_many_watchers")
    assert "retry-after" in {name.lower() for name in refused.headers}
    look = engine.watch
    assert look is not None
    for one in readers:
        event_with_pool(one)
    assert engine.watch is look
    for one in readers:
        one.leave()
    here.wait_until(lambda: not here.admission.watchers.num_subscribers)
    again = Reader(here)
    assert again.response.status == 200
    again.leave()
    here.wait_until(lambda: engine.watch is None)


def test_a_model_is_chosen_by_its_name(here: LiveServer) -> None:
    one = Reader(here, f"{PATH}?model=other")
    assert event_with_pool(one)["model"] == "other"
    one.leave()
    assert here.get(f"{PATH}?model=strange").status == 404
    here.wait_until(lambda: not here.admission.watchers.num_subscribers)


def test_no_key_but_an_admins_sees_any_of_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    alice, boss = add_key(path, "alice"), add_key(path, "boss", admin=True)
    with house(models={"oracle": talker()}, keys_file=path) as here:
        for where in (PATH, "/v1/admin/blocks/1"):
            assert here.get(where).status == 401
            assert here.get(where, authorization="Bearer wrong").status == 401
            refused = here.get(where, authorization=f"Bearer {alice}")
            assert (refused.status, refused.code) == (403, "admin_key_needed")
            assert "oracle" not in refused.data.decode()
        one = Reader(here, key=boss)
        assert event_with_pool(one)["model"] == "oracle"
        one.leave()


def test_a_reader_that_takes_nothing_costs_the_others_nothing_and_then_finds_the_newest(here: LiveServer) -> None:
    admission = here.admission
    model = next(iter(admission.models))

    async def main() -> None:
        sent: asyncio.Queue[bytes] = asyncio.Queue()
        is_read = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                sent.put_nowait(message["body"])
                await is_read.wait()

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        scope = {"quire.record": RequestRecord("req", "GET", PATH)}
        slow = asyncio.ensure_future(
            WatchResponse(admission.watchers, model, lambda: False, includes_lines=False)(scope, receive, send)
        )
        await sent.get()
        with admission.watchers.subscription(model) as watch:
            await watch.wait_for_newer(watch.number + 4)
            assert sent.empty()
            newest, _ = watch.newest_event(0)
            is_read.set()
            taken = json.loads((await sent.get()).removeprefix(b"event: snapshot\ndata: "))
            assert taken["at_s"] >= json.loads(newest)["at_s"]
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert not admission.watchers.num_subscribers

    here.run(main)


def test_the_history_comes_once_and_then_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.watch.activity.ROW_S", 2 * PATIENCE_S)  # rows end when this test says so
    with house(models={"oracle": talker()}) as here:
        activity = here.admission.activity

        async def end_row() -> None:
            oracle = activity.of("oracle")
            oracle.end_row(activity.open_of("oracle"), 1000.0 + oracle.num_rows, 10.0)

        here.post("/v1/completions", BODY)
        here.post("/v1/completions", BODY)
        here.run(end_row)
        one = Reader(here)
        (row,) = one.event()["history"]
        assert row["output_tokens_per_s"] > 0
        assert 0 < row["hit_rate"] < 1
        assert row["ttft_p50_s"] > 0
        assert one.event()["history"] == []
        here.run(end_row)
        while not (rows := one.event()["history"]):
            pass
        assert [(row["output_tokens_per_s"], row["hit_rate"], row["ttft_p50_s"]) for row in rows] == [(0.0, None, None)]
        one.leave()


def test_of_all_that_clients_say_and_are_told_nothing_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    alice, boss = add_key(path, "alice"), add_key(path, "boss", admin=True)
    words = "xylophone quartz zebra"
    with house(models={"oracle": talker()}, keys_file=path) as here:
        one = Reader(here, key=boss)
        body = {**BODY, "prompt": f"{words} and so on, over and over", "logprobs": 1}
        answer = here.post("/v1/completions", body, authorization=f"Bearer {alice}").json["choices"][0]
        seen = one.event()
        while not seen["totals"]["num_requests"] or not seen["tree"]["nodes"]:
            seen = one.event()
        blocks = [here.get(f"/v1/admin/blocks/{at}", authorization=f"Bearer {boss}").data for at in range(1, 20)]
        one.leave()
        told = json.dumps(seen) + b"".join(blocks).decode()
        assert "alice" in told
        for word in (*words.split(), *(part for part in answer["text"].split() if len(part) > 3)):
            assert word not in told
        names = {name for part in (seen, json.loads(blocks[0])) for name in _names_in(part)}
        assert not {name for name in names if "text" in name or "token_id" in name or "prompt_ids" in name}


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _names_in(one)


def test_a_server_that_ends_ends_the_stream() -> None:
    with house() as here:
        one = Reader(here)
        event_with_pool(one)
        here.loop.call_soon_threadsafe(here.shutdown.request)
        while one.response.readline():
            pass
        here.wait_for_end()
        one.leave()
