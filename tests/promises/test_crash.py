"""What survives what, over HTTP: workers that are killed, stopped, poisoned or lie, and a parent that goes.

The model is an oracle in a real worker, so that a new one is there in a second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises.conftest import Served
from tests.promises.registry import ROOT
from tests.support.servers.live_server import Server, oracle, until

ROW_SEED, POISON_SEED = 5, 666
COMPLETE = "/v1/completions"
STUCK_S = 3.0


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which a row with one seed fails, and one with another ends the worker."""
    faults = [{"kind": "row", "seed": ROW_SEED, "after": 3}, {"kind": "abort", "seed": POISON_SEED, "after": 3}]
    with oracle(tmp_path_factory.mktemp("fragile"), "--step-s", "0.02", "--faults", json.dumps(faults)) as server:
        yield server


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 60, "temperature": 1, "seed": 1, "stream": True, "ignore_eos": True, **more}


def text_when_disturbed(server: Server, asked: dict[str, object], number: int) -> str:
    """The answer to a stream whose worker gets a signal in the middle."""
    streaming = server.later(COMPLETE, asked)
    until(lambda: "running" in server.states())
    server.signal_worker(number)
    return streaming.result().text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP], ids=["killed", "aborted", "stuck"])
def test_a_worker_that_dies_or_hangs_is_replaced_under_its_streams(fragile: Server, number: int) -> None:
    """Streams go on with the next byte; what is kept: seed, log-probabilities, number of answers, usage."""
    asked = body(f"a question for signal {number}", n=2, logprobs=1, stream_options={"include_usage": True})
    disturbed = text_when_disturbed(fragile, asked, number)
    assert disturbed == fragile.post(COMPLETE, asked).text
    assert "starting a new one" in "\n".join(fragile.lines)


def test_a_worker_in_a_long_step_is_busy_and_goes_on(tmp_path: Path) -> None:
    """It was called restarting, and `/ready` turned 503."""
    with oracle(tmp_path, "--step-s", "4") as server:
        (before,) = server.workers()
        asked = server.later(COMPLETE, {"prompt": "a long step", "max_tokens": 2, "temperature": 0})
        seen: list[str] = []

        def look() -> bool:
            assert server.ask("GET", "/ready").status == 200
            (model,) = server.ask("GET", "/v1/models").json["data"]
            seen.append(model["meta"]["state"])
            return bool(asked.done())

        until(look)
        assert set(seen) == {"ready", "busy"}
        assert asked.result().status == 200
        assert server.workers() == [before]


def test_a_pause_of_the_whole_container_is_a_pause_and_nothing_more(tmp_path: Path) -> None:
    """Parent and worker stand still for longer than a step may take."""
    with oracle(tmp_path, "--step-s", "0.02", "--stuck-step-s", str(STUCK_S)) as server:
        streaming = server.later(COMPLETE, body("go on after this"))
        until(lambda: "running" in server.states())
        pids = [server.process.pid, *server.workers()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(STUCK_S + 1.0 if number == signal.SIGSTOP else 0.0)
        assert streaming.result().text == server.post(COMPLETE, body("go on after this")).text
        assert server.workers() == pids[1:]


def test_an_answer_that_has_ended_stays_so_when_the_worker_dies(fragile: Server) -> None:
    """One of three answers ends at a stop string; the next worker is asked for the two others."""
    asked = body("which of them ends first", n=3, stream=False, max_tokens=40)
    first = fragile.post(COMPLETE, asked).json["choices"][0]["text"]
    asked["stop"] = [first[4:8]]
    expected = fragile.post(COMPLETE, asked).json["choices"]
    assert "stop" in {choice["finish_reason"] for choice in expected}
    streaming = fragile.later(COMPLETE, asked)
    until(lambda: "running" in fragile.states())
    fragile.signal_worker(signal.SIGKILL)
    assert streaming.result().json["choices"] == expected


def test_what_is_lost_with_a_worker_is_its_cache(fragile: Server) -> None:
    prompt = "a rather long prompt that is cached before the worker is gone, and not any more afterwards"
    for cached in (False, True):
        usage = fragile.complete(prompt).json["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == cached
    before = fragile.workers()
    fragile.signal_worker(signal.SIGKILL)
    until(lambda: fragile.workers() not in ([], before))
    assert fragile.complete(prompt).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_row_that_cannot_be_computed_ends_that_request_alone(fragile: Server) -> None:
    workers = fragile.workers()
    neighbour = fragile.later(COMPLETE, body("a neighbour of a bad row"))
    failed = fragile.post(COMPLETE, body("a bad row", seed=ROW_SEED, stream=False))
    assert (failed.status, failed.json["error"]["code"]) == (500, "model_error")
    assert neighbour.result().text == fragile.post(COMPLETE, body("a neighbour of a bad row")).text
    assert fragile.workers() == workers


def test_a_request_that_ends_its_worker_each_time_is_found_and_ended(fragile: Server) -> None:
    """Suspects run alone; the one that does it ends with an error, and its neighbours with their answers."""
    neighbours = [fragile.later(COMPLETE, body(f"neighbour {at}", max_tokens=120)) for at in range(3)]
    poison = fragile.post(COMPLETE, body("poison", seed=POISON_SEED, stream=False))
    assert (poison.status, poison.json["error"]["code"]) == (500, "model_error")
    texts = [one.result().text for one in neighbours]
    assert texts == [fragile.post(COMPLETE, body(f"neighbour {at}", max_tokens=120)).text for at in range(3)]


def test_a_worker_that_lies_is_replaced_and_the_parents_death_takes_all_with_it(tmp_path: Path) -> None:
    lie = json.dumps([{"kind": "garbage", "step": 30}])
    with oracle(tmp_path, "--faults", lie) as server:
        # Twenty tokens are there when it lies; the next worker needs fewer steps than that for the rest.
        assert server.post(COMPLETE, body("tell me", max_tokens=40)).text
        assert "sent an invalid message" in "\n".join(server.lines)
        (worker,) = server.workers()
        os.kill(server.process.pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{worker}").exists())


def test_a_worker_that_brings_nothing_again_and_again_is_given_up(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    with oracle(tmp_path, "--needs", str(weights), "--step-s", "0.05") as server:
        asked = server.later(COMPLETE, body("anything", stream=False))
        until(lambda: "running" in server.states())
        weights.unlink()
        server.signal_worker(signal.SIGKILL)
        assert (asked.result().status, asked.result().json["error"]["code"]) == (503, "engine_dead")
        assert server.ask("GET", "/health").status == 503
        assert "giving up: 5 consecutive workers made no progress" in "\n".join(server.lines)


def test_a_model_that_cannot_be_loaded_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nothing that follows is true")
    command = [sys.executable, "-m", "quire", "serve", str(tmp_path / "broken.gguf"), "--port", "0"]
    around = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=around)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_server_that_is_told_to_stop_lets_what_runs_finish(tmp_path: Path) -> None:
    with oracle(tmp_path, "--step-s", "0.02") as server:
        streaming = server.later(COMPLETE, body("let me finish"))
        until(lambda: "running" in server.states())
        server.process.send_signal(signal.SIGTERM)
        assert streaming.result().text
        assert server.stop() == 0


def test_several_models_have_a_worker_each_within_one_memory_budget(served: Served) -> None:
    server = served.server
    assert len(server.workers()) == 2
    for model in ("one", "two"):
        assert server.complete("hello", served.alice, model=model).json["model"] == model
    lines = [line for line in server.lines if line.startswith(("one: ", "two: "))]
    assert len(lines) == 2
    assert all("memory 0.5" in line for line in lines), "an equal part each"


def test_faults_on_purpose_need_a_second_variable(tmp_path: Path, tiny_model: Path) -> None:
    """Without the first variable the second is refused; with it, see the request that ends its worker."""
    around = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": str(tmp_path)}
    around |= {"QUIRE_FAULTS": '[{"kind": "abort", "step": 50}]'}
    command = [sys.executable, "-m", "quire", "serve", str(tiny_model), "--port", "0", "--memory", "1GiB"]
    done = subprocess.run(command, capture_output=True, text=True, env=around)
    assert done.returncode == 2
    assert "expected QUIRE_TESTING=1" in done.stderr
