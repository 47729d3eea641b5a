"""The parts of the comparison with peers that need no peer."""

import os
import subprocess
import sys
import zipfile
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import llamacpp
from benchmarks.peers.__main__ import Ratios, _check_complete
from benchmarks.peers.workers import working
from benchmarks.servers import Command, Running, null_command, started

ROOT = Path(__file__).parents[3]
WORKER = """
import json, sys
print("a library talks", flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    print(json.dumps({"seconds": 0.5, "output_tokens": len(ask["prompts"]) * min(ask["max_tokens"], 4)}), flush=True)
"""
METADATA = """Metadata-Version: 2.1
Name: peer
Requires-Dist: torch==9
Requires-Dist: numpy>=2; python_version > "3"
Requires-Dist: winpath; sys_platform == "win32"
Requires-Dist: pandas; extra == "bench"
"""


def test_a_ratio_is_the_median_of_the_rounds_with_the_extremes_beside_it() -> None:
    ratios = Ratios()
    for ours, theirs in ((10.0, 10.0), (30.0, 10.0), (20.0, 10.0)):
        ratios.take("peer_8", ours, theirs)
    told = ratios.record()["peer_8"]
    assert (told["ratio"], told["between"], told["rounds"]) == (2.0, [1.0, 3.0], 3)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that think nothing stand for both sides, and no model is needed."""

    def stand_in(_command: Command) -> AbstractContextManager[Running]:
        return started(null_command(first_ms=0.5, gap_ms=0.1))

    monkeypatch.setattr(peers, "started", stand_in)
    monkeypatch.setattr(peers, "_python", Path)
    monkeypatch.setattr(peers, "smollm2_directory", lambda: Path("model"))
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["vllm", "vllm_all_cores", "transformers"])
def test_a_round_measures_every_figure_that_has_a_bound(name: str) -> None:
    ratios = Ratios()
    peers.PEERS[name](ratios, 1)
    peer = name.partition("_")[0]
    bounded = {key.replace(peer, name, 1) for key in (*peers.MIN_RATIOS, *peers.MAX_RATIOS) if key.startswith(peer)}
    assert bounded
    assert bounded <= ratios.record().keys()


def test_engines_in_process_are_measured_in_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_python", lambda _: Path(sys.executable))
    monkeypatch.setattr(peers, "smollm2_directory", lambda: Path("model"))
    monkeypatch.setattr(peers, "smollm2_file", lambda: Path("file"))
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    program = WORKER.replace('min(ask["max_tokens"], 4)', 'ask["max_tokens"]')
    stand_in = partial(working, (sys.executable, "-c", program), {})
    monkeypatch.setattr(peers, "working", lambda _words, _env: stand_in())
    monkeypatch.setattr(peers, "quire_working", lambda _model, _settings: stand_in())
    ratios = Ratios()
    peers.PEERS["openvino"](ratios, 1)
    assert {key for key in peers.MIN_RATIOS if key.startswith("openvino")} <= ratios.record().keys()


def test_llama_cpp_is_measured_in_every_size_that_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    program = WORKER.replace('min(ask["max_tokens"], 4)', 'ask["max_tokens"]').replace("0.5,", '0.5, "first_s": 0.1,')
    stand_in = partial(working, (sys.executable, "-c", program), {})
    monkeypatch.setattr(llamacpp, "python", lambda _set: Path(sys.executable))
    monkeypatch.setattr(llamacpp, "working", lambda _words, _env: stand_in())
    monkeypatch.setattr(llamacpp, "quire_working", lambda _model, _settings: stand_in())
    monkeypatch.setattr(llamacpp, "SETTLE_S", 0.0)
    monkeypatch.setattr(peers, "coder_file", lambda: Path("file"))
    ratios = Ratios()
    peers.PEERS["llamacpp"](ratios, 1)
    told = ratios.record()
    assert {key for key in peers.MIN_RATIOS if key.startswith("llamacpp")} <= told.keys()
    assert told["llamacpp_4_coder"]["ours"] == pytest.approx(4 * 32 / 0.4)
    assert told["llamacpp_prefill_coder"]["theirs"] == pytest.approx(512 / 0.5)


def test_a_decode_rate_needs_the_time_of_the_first_tokens() -> None:
    program = WORKER.replace('min(ask["max_tokens"], 4)', 'ask["max_tokens"]')
    with working((sys.executable, "-c", program), {}) as worker, pytest.raises(RuntimeError, match="first tokens"):
        llamacpp.decode_rate(worker, [[1]], 2)


def test_answers_that_are_short_or_missing_stop_the_run() -> None:
    good = {"failed": 0, "error_kinds": {}, "total_output_tokens": 8}
    assert _check_complete(good, 8) is good
    for bad, wanted in (({**good, "failed": 1}, 8), (good, 9)):
        with pytest.raises(RuntimeError):
            _check_complete(bad, wanted)


def test_a_worker_is_asked_over_pipes_and_ends_with_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    with working((sys.executable, "-c", WORKER), {}) as worker:
        assert worker.run([[1], [2]], 3).output_tokens == 6
        with pytest.raises(RuntimeError, match="2 x 5 tokens"):
            worker.run([[1], [2]], 5)
        pid = worker._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(RuntimeError), working((sys.executable, "-c", ""), {}):
        pass


def test_a_server_is_started_on_loopback_and_stopped_by_its_id() -> None:
    with started(null_command()) as running:
        assert running.url.startswith("http://127.0.0.1:")
        assert running.card.name == "null"
        os.kill(running.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(running.pid, 0)


def test_a_server_that_ends_before_it_answers_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command((sys.executable, "-c", "print('no such model'); raise SystemExit(3)"))
    with pytest.raises(RuntimeError), started(command):
        pass
    assert "no such model" in capsys.readouterr().err


def test_what_a_wheel_requires_here_is_listed_without_what_is_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "peer-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer-1.dist-info/METADATA", METADATA)
    script = ROOT / "benchmarks" / "peers" / "requirements_of.py"
    run = subprocess.run([sys.executable, script, wheel, "--without", "torch"], capture_output=True, text=True)
    assert run.stdout.split() == ["numpy>=2"], run.stderr
