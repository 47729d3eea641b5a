"""`quire top` beside a server: how it is found, asked, refused and waited for."""

import io
import json
import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quire.api.access.keys import add_key
from quire.cli import app
from quire.cli.watch import top_terminal, top_watcher
from quire.cli.watch.top_figures import TopMetrics
from quire.cli.watch.top_terminal import show_in_terminal, typed_keys
from quire.cli.watch.top_watcher import TopWatcher
from quire.cli.watch.watch_source import WatchSource, choose_source
from quire.errors import ConfigError, MessageError, RequestError
from tests.support.errors import raises_code
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.watch_stand_in import Answer, StandIn, event, snapshot, stand_in

REFUSED = json.dumps({"error": {"message": "expected an admin key; create one", "code": "admin_key_needed"}}).encode()


def always(*told: dict[str, Any]) -> Callable[[str, dict[str, str]], Answer]:
    return lambda path, headers: map(event, told)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A server of this user, found where quire looks."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "quire").mkdir()
    card = {"name": "coder", "root": "coder", "is_ready": True, "state": "ready", "max_model_len": 512}
    stats = {"url": "http://127.0.0.1:8000", "is_locked": True, "models": [card]}
    whole = json.dumps(stats | {"num_prompt_tokens": 0, "num_cached_tokens": 0}).encode()

    def answer(path: str, headers: dict[str, str]) -> Answer:
        return (200, whole) if path == "/stats" else [event(snapshot())]

    with stand_in(answer, tmp_path / "quire" / "admin-8000.sock") as here:
        yield here


def test_a_server_of_this_user_is_found_and_asked_without_a_key(own: StandIn) -> None:
    done = CliRunner().invoke(app, ["top", "--once", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == "coder"
    assert [path for _, path, _ in own.asked] == ["/stats", "/watch"]
    assert all("authorization" not in headers for _, _, headers in own.asked)


def test_named_by_its_address_it_is_still_asked_on_its_socket(own: StandIn) -> None:
    assert choose_source("http://127.0.0.1:8000", None).socket_path == own.socket_path
    assert choose_source("http://127.0.0.1:8000/v1", None).socket_path == own.socket_path
    assert choose_source("http://127.0.0.1:8001", None).socket_path is None
    assert choose_source("http://127.0.0.1:8000", "a-key").socket_path is None, "whoever gives a key wants it used"


def test_one_elsewhere_is_asked_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(always(snapshot())) as here:
        done = CliRunner().invoke(app, ["top", "--once", "--server", here.url, "--key", "k", "--model", "a b/c"])
        assert done.exit_code == 0, done.output
        monkeypatch.setenv("QUIRE_ADMIN_KEY", "from-the-environment")
        CliRunner().invoke(app, ["top", "--once", "--server", here.url])
    assert "812 tokens/s" in done.stdout
    assert "\x1b" not in done.stdout
    assert [path for _, path, _ in here.asked] == ["/v1/admin/watch?model=a%20b%2Fc", "/v1/admin/watch"]
    keys = [headers["authorization"] for _, _, headers in here.asked]
    assert keys == ["Bearer k", "Bearer from-the-environment"]


@pytest.mark.parametrize(("status", "hint"), [(401, "--key"), (403, "--key"), (404, "update it"), (400, "admin key")])
def test_a_refusal_is_told_with_what_helps(status: int, hint: str) -> None:
    with stand_in(lambda path, headers: (status, REFUSED)) as here:
        done = CliRunner().invoke(app, ["top", "--once", "--server", here.url])
    assert isinstance(done.exception, RequestError)
    assert done.exception.code == "admin_key_needed"
    assert hint in str(done.exception)


def test_where_nobody_is_it_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for words, code in (
        (["top"], "no_server_running"),
        (["top", "--once"], "no_server_running"),
        (["top", "--server", "http://127.0.0.1:1"], "server_unreachable"),
    ):
        with raises_code(ConfigError, code):
            CliRunner().invoke(app, words, catch_exceptions=False)
    with raises_code(ConfigError, "invalid_server_address"):
        choose_source("127.0.0.1:8000", None)
    with raises_code(ConfigError, "json_without_once"):
        CliRunner().invoke(app, ["top", "--json"], catch_exceptions=False)


@pytest.mark.parametrize(
    "data", [b"", b"event: snapshot\ndata: {}\n\n", b"event: snapshot\ndata: \xff\n\n", b"data: 1\n\n", b"\n" * 99]
)
def test_a_stream_without_a_snapshot_is_an_error_that_names_the_server(data: bytes) -> None:
    with stand_in(lambda path, headers: [data]) as here:
        done = CliRunner().invoke(app, ["top", "--once", "--server", here.url])
    assert isinstance(done.exception, ConfigError), done.output


def test_the_first_snapshot_that_has_a_pool_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(always(snapshot(pool=None), snapshot(pool=None), snapshot(at_s=1001.0))) as here:
        told = json.loads(CliRunner().invoke(app, ["top", "--once", "--json", "--server", here.url]).stdout)
        assert told["pool"]["num_blocks"] == 1000
    with stand_in(always(snapshot(pool=None))) as here:
        told = json.loads(CliRunner().invoke(app, ["top", "--once", "--json", "--server", here.url]).stdout)
        assert told["pool"] is None


def test_a_line_of_the_stream_that_never_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.watch.watch_source.MAX_EVENT_BYTES", 1000)
    with (
        stand_in(lambda path, headers: [b"event: snapshot\ndata: " + b"x" * 5000]) as here,
        raises_code(ConfigError, "server_unreachable") as refused,
    ):
        CliRunner().invoke(app, ["top", "--once", "--server", here.url], catch_exceptions=False)
    gone = refused.value.__cause__
    assert gone is not None
    assert isinstance(gone.__cause__, MessageError)
    assert gone.__cause__.code == "event_too_long"


# -- while it goes on --------------------------------------------------------------------------------------------------


def looked(watcher: TopWatcher, is_so: Callable[[TopMetrics, str | None], bool]) -> None:
    """Wait until it is so."""
    seen: list[bool] = []
    while not any(seen):
        assert watcher.wait(PATIENCE_S)
        watcher.show(lambda figures, trouble: seen.append(is_so(figures, trouble)))


class Lives:
    """A server that goes and comes back: each connection gets what is next, which the test lets go."""

    def __init__(self, *lives: Answer) -> None:
        self._lives = list(lives)

    def __call__(self, path: str, headers: dict[str, str]) -> Answer:
        return self._lives.pop(0) if len(self._lives) > 1 else self._lives[0]


def test_a_server_that_is_started_again_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_watcher, "RETRY_S", 0.0)
    before, after = event(snapshot()), event(snapshot(at_s=5.0, steps=[], history=[]))
    starting = (503, b'{"error": {"message": "the model is loaded"}}')
    troubles: list[str] = []

    def has_come_back(figures: TopMetrics, trouble: str | None) -> bool:
        troubles.extend([trouble] if trouble else [])
        return figures.snapshot is not None and figures.snapshot.at_s == 5.0

    with (
        stand_in(Lives([before], starting, [before[:40]], [after])) as here,
        TopWatcher(WatchSource(here.url)) as watcher,
    ):
        looked(watcher, has_come_back)
        watcher.show(lambda figures, trouble: troubles.append(str(len(figures.steps))))
    assert troubles[-1] == "0", "what was seen before the restart says nothing of the time after it"


def test_a_key_that_is_revoked_meanwhile_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_watcher, "RETRY_S", 0.0)
    lives = Lives([event(snapshot())], (401, REFUSED))
    with (
        stand_in(lives) as here,
        TopWatcher(WatchSource(here.url)) as watcher,
        raises_code(RequestError, "admin_key_needed"),
    ):
        looked(watcher, lambda figures, trouble: False)


def typing(monkeypatch: pytest.MonkeyPatch, keys: Callable[[], str]) -> None:
    @contextmanager
    def typed() -> Iterator[Callable[[float], str]]:
        yield lambda timeout_s: keys()

    monkeypatch.setattr(top_terminal, "typed_keys", typed)


def test_in_a_terminal_m_shows_the_next_model_and_q_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_watcher, "RETRY_S", 0.0)

    def answer(path: str, headers: dict[str, str]) -> Answer:
        name = path.partition("model=")[2] or "coder"
        return (event(snapshot(model=name, at_s=1000.0 + at)) for at in range(10**9))

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=90, height=25)
    with stand_in(answer) as here, TopWatcher(WatchSource(here.url)) as watcher:

        def keys() -> str:
            if "[writer loaded]" in out.getvalue():
                return "q"
            return "m" if "[coder ready]" in out.getvalue() and len(here.asked) == 1 else ""

        typing(monkeypatch, keys)
        show_in_terminal(watcher, console)
    assert here.asked[1][1] == "/v1/admin/watch?model=writer"
    assert out.getvalue().count("\x1b[?1049h") == out.getvalue().count("\x1b[?1049l") == 1, "the screen is given back"
    assert out.getvalue().rstrip().endswith(("\x1b[?25h", "\x1b[?1049l"))


def test_it_takes_the_size_the_terminal_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(80, 30), (50, 12)]
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
    frames: list[tuple[int, int]] = []

    def noted(figures: TopMetrics, frame: Any, *more: Any) -> list[Any]:
        frames.append((frame.width, frame.height))
        return []

    def keys() -> str:
        console.size = sizes[1]
        return "q" if sizes[1] in frames else ""

    monkeypatch.setattr(top_terminal, "screen_lines", noted)
    typing(monkeypatch, keys)
    with stand_in(always(snapshot())) as here, TopWatcher(WatchSource(here.url)) as watcher:
        show_in_terminal(watcher, console)
    assert frames[0] == sizes[0]
    assert frames[-1] == sizes[1]


def test_a_key_is_heard_at_once_and_the_keyboard_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with open(slave, closefd=True) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        before = termios.tcgetattr(slave)
        with typed_keys() as typed:
            assert not termios.tcgetattr(slave)[3] & termios.ICANON
            os.write(master, b"q")
            assert typed(PATIENCE_S) == "q"
        assert termios.tcgetattr(slave) == before
    os.close(master)


def test_without_a_terminal_lines_are_written_and_trouble_is_told_once_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top_watcher, "RETRY_S", 0.0)
    gone = (503, b'{"error": {"message": "the server is\\u001b[31m shutting down"}}')
    lives = Lives([event(snapshot())], gone, gone, gone, [event(snapshot(at_s=5.0))], (401, REFUSED))
    with stand_in(lives) as here, TopWatcher(WatchSource(here.url)) as watcher, pytest.raises(RequestError):
        top_terminal.write_lines(watcher, 0.0)
    told = capsys.readouterr()
    assert all("pool 20% in use" in line for line in told.out.splitlines())
    assert "\x1b" not in told.out + told.err


# -- beside a real server ----------------------------------------------------------------------------------------------


def test_what_a_script_gets_is_what_the_server_counts() -> None:
    with house() as here:
        _compare_with_counts(here)


def _compare_with_counts(here: LiveServer) -> None:
    asked = {"model": "oracle", "prompt": list(range(100, 140)), "max_tokens": 4, "ignore_eos": True}
    assert [here.post("/v1/completions", asked).status for _ in range(2)] == [200, 200]
    done = CliRunner().invoke(app, ["top", "--once", "--json", "--server", here.url, "--model", "oracle"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    pool = told["pool"]
    assert pool["num_blocks"] == sum(count for name, count in pool.items() if name not in ("num_blocks", "block_size"))
    assert pool["cached"] >= 9
    assert (told["model"], told["num_running"], told["num_waiting"]) == ("oracle", 0, 0)
    totals = told["totals"]
    assert (totals["num_requests"], totals["num_prompt_tokens"], totals["num_cached_tokens"]) == (2, 80, 36)
    assert totals["num_output_tokens"] == 8
    here.wait_until(lambda: not here.admission.watchers.num_subscribers)


def test_a_model_that_is_not_there_is_told_by_the_server(here: LiveServer) -> None:
    with raises_code(RequestError, "model_not_found"):
        CliRunner().invoke(app, ["top", "--once", "--server", here.url, "--model", "nobody"], catch_exceptions=False)


def test_with_keys_only_an_admin_key_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    tenant, boss = add_key(path, "alice"), add_key(path, "boss", admin=True)
    with house(keys_file=path) as server:
        runs = [
            CliRunner().invoke(app, ["top", "--once", "--server", server.url, *words])
            for words in ([], ["--key", tenant], ["--key", boss])
        ]
        server.wait_until(lambda: not server.admission.watchers.num_subscribers)
    codes = [getattr(run.exception, "code", None) for run in runs]
    assert codes == ["invalid_api_key", "admin_key_needed", None]
    assert "[oracle ready]" in runs[2].stdout
