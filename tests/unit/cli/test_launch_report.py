"""What `quire launch` prints around the agent: the load, the first prompt's duration, its progress, and the ending."""

import json
import os
import pty
import termios
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.agents.agent_clients import AGENTS, MAX_WAIT_MS, Server
from quire.cli.agents.ending_report import AgentEnd, ServedWork, report_lines, settled_state
from quire.cli.agents.first_answer import (
    ERASE_LINE,
    FirstPrompt,
    first_prompt_progress,
    is_in_normal_mode,
    show_progress_line,
)
from quire.cli.agents.launched_server import LoadBars
from quire.cli.agents.prompt_speeds import PromptSpeeds, duration_text, smaller_choices, start_line, timed_speed
from quire.cli.shared.found_servers import FoundModel, FoundServer
from quire.cli.watch.watch_source import WatchSource
from quire.observe.served_totals import ServedTotals

SERVER = Server("http://127.0.0.1:1", "coder", "none")
SPEEDS = st.dictionaries(st.sampled_from(["own", "org/a", "org/b", "org/c"]), st.floats(0.5, 1e5), min_size=1)


def server(*, computed: int = 0, cached: int = 0, prompt: int = 0, num_open: int = 0, **served: float) -> FoundServer:
    model = FoundModel("coder", "/models/coder.gguf", True, "ready", 8192, computed)
    totals = ServedTotals(**served)  # type: ignore[arg-type]
    return FoundServer(Path("a.sock"), "http://127.0.0.1:1", False, (model,), prompt, cached, num_open, totals)


# -- the first prompt's duration ---------------------------------------------------------------------------------------


@given(SPEEDS, st.sampled_from(sorted(AGENTS)))
def test_a_smaller_choice_takes_at_most_half_as_long(speeds: dict[str, float], agent: str) -> None:
    own = next(iter(speeds))
    kept = PromptSpeeds(Path("unused"), "machine", speeds)
    needed_s = AGENTS[agent].num_first_tokens / speeds[own]
    choices = [*smaller_choices(AGENTS[agent], own, kept)]
    assert all(choice_s <= needed_s / 2 for _, choice_s in choices)
    assert {name for name, _ in choices} <= (set(AGENTS) | set(speeds)) - {agent, own}
    assert len(choices) <= 2
    assert bool([name for name, _ in choices if name in speeds]) == (max(speeds.values()) >= 2 * speeds[own])


def test_the_line_before_the_agent_names_address_duration_and_smaller_choices(tmp_path: Path) -> None:
    speeds = PromptSpeeds.read(tmp_path / "speeds.json", "machine")
    claude = AGENTS["claude"]
    assert start_line(SERVER, "/own.gguf", claude, speeds) == "coder at http://127.0.0.1:1"
    line = start_line(SERVER, "/own.gguf", claude, speeds.keep("/own.gguf", 50.0).keep("org/small", 1000.0))
    assert "http://127.0.0.1:1" in line
    assert "25,800 tokens" in line
    assert "9 min at 50 tokens/s (codex: 3 min, org/small: 26 s)" in line
    assert "is slow on this machine" in line


def test_speeds_are_kept_by_model_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "state" / "speeds.json"
    PromptSpeeds.read(path, "one").keep("a", 10.0).keep("b", 20.0)
    PromptSpeeds.read(path, "two").keep("a", 30.0)
    assert PromptSpeeds.read(path, "one").by_model == {"a": 10.0, "b": 20.0}
    assert PromptSpeeds.read(path, "two").by_model == {"a": 30.0}
    assert [entry.name for entry in path.parent.iterdir()] == ["speeds.json"]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"one": 3}', b'{"one": {"a": "fast", "b": 0}}'])
def test_a_damaged_file_of_speeds_has_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    path.write_bytes(content)
    assert PromptSpeeds.read(path, "one").by_model == {}
    assert PromptSpeeds.read(path, "one").keep("a", 1.0).by_model == {"a": 1.0}
    assert PromptSpeeds.read(path, "one").by_model == {"a": 1.0}


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert PromptSpeeds.read(tmp_path / "file" / "speeds.json", "one").keep("a", 1.0).by_model == {"a": 1.0}


def test_a_server_that_does_not_answer_has_no_speed() -> None:
    assert timed_speed(SERVER) is None


def test_durations_are_rounded_for_persons() -> None:
    assert [duration_text(one) for one in (0.1, 40.4, 100, 3600, 8000)] == [
        "1 s",
        "40 s",
        "2 min",
        "60 min",
        "2 h 13 min",
    ]


# -- the load ----------------------------------------------------------------------------------------------------------


def test_bars_of_the_load_end_although_a_poll_misses_their_end() -> None:
    shown: list[tuple[str, int, int]] = []
    bars = LoadBars(lambda *progress: shown.append(progress))

    def loading(*progress: tuple[str, int, int]) -> FoundServer:
        models = tuple(FoundModel("a", "a", False, "loading", None, 0, one) for one in progress)
        return FoundServer(Path("a.sock"), "", False, models, 0, 0)

    assert bars.update(loading(("download", 1, 9)))
    assert not bars.update(loading(("download", 1, 9)))
    assert bars.update(loading(("weights", 2, 5)))
    assert bars.update(loading())
    assert shown == [("download", 1, 9), ("download", 1, 9), ("download", 9, 9), ("weights", 2, 5), ("weights", 5, 5)]


# -- progress above the first answer -----------------------------------------------------------------------------------


def row(name: str, computed: int, prompt: int, phase: str = "prompt") -> dict[str, object]:
    return {"request_id": name, "computed": computed, "prompt_tokens": prompt, "phase": phase}


def test_the_longest_prompt_is_shown_until_its_answer_begins() -> None:
    times = iter([0.0, 0.0, 0.5, 10.0])
    prompt = FirstPrompt(lambda: next(times))
    assert prompt.update([]) == ""
    assert prompt.update([row("title", 0, 300)]) == ""
    assert prompt.update([row("title", 300, 300, "answer"), row("main", 0, 10_000)]).startswith("prompt: 0 of 10,000")
    assert not prompt.is_over
    assert prompt.update([row("main", 2_500, 10_000)]) == "prompt: 2,500 of 10,000 tokens (25%), about 30 s left"
    assert prompt.update([row("main", 10_000, 10_000, "answer")]) == ""
    assert prompt.is_over


def test_a_prompt_whose_request_ended_is_shown_no_longer() -> None:
    prompt = FirstPrompt(lambda: 0.0)
    assert prompt.update([row("main", 0, 10_000)])
    assert prompt.update([]) == ""
    assert prompt.is_over


def test_a_program_that_draws_on_the_terminal_gets_no_line() -> None:
    parent, child = pty.openpty()
    with os.fdopen(parent, "rb"), os.fdopen(child, "r") as terminal:
        assert is_in_normal_mode(terminal)
        modes = termios.tcgetattr(terminal.fileno())
        modes[3] &= ~termios.ICANON
        termios.tcsetattr(terminal.fileno(), termios.TCSANOW, modes)
        assert not is_in_normal_mode(terminal)
    with open(os.devnull) as no_terminal:
        assert not is_in_normal_mode(no_terminal)


class StandIn(WatchSource):
    """Snapshots of a prompt that is computed, and then answered."""

    def snapshots(self, model: str | None = None) -> Generator[bytes, None, None]:
        rows = [row("main", 0, 2_000), row("main", 1_000, 2_000), row("main", 2_000, 2_000, "answer")]
        yield from (json.dumps({"running": [one]}).encode() for one in rows)
        pytest.fail("the answer has begun, and snapshots are still read")


def test_the_line_is_drawn_above_the_answer_and_erased() -> None:
    parent, child = pty.openpty()
    with os.fdopen(parent, "rb", buffering=0) as screen, os.fdopen(child, "w") as terminal:
        show_progress_line(StandIn("http://127.0.0.1:1"), "coder", terminal, threading.Event())
        assert screen.read(4096).decode() == (
            f"{ERASE_LINE}prompt: 0 of 2,000 tokens (0%){ERASE_LINE}prompt: 1,000 of 2,000 tokens (50%){ERASE_LINE}"
        )


def test_without_a_terminal_no_snapshot_is_read(tmp_path: Path) -> None:
    source = WatchSource("http://127.0.0.1:1", tmp_path / "missing.sock")
    with open(tmp_path / "output", "w") as output, first_prompt_progress(source, "coder", output):
        pass
    assert (tmp_path / "output").read_text() == ""


# -- the ending --------------------------------------------------------------------------------------------------------


def test_an_interrupted_task_is_reported_with_its_work_and_speeds() -> None:
    after = server(
        computed=9_100, cached=8_704, prompt=37_494, num_requests=2, num_aborted=1, num_output_tokens=100,
        prompt_s=60.0, output_s=10.0,
    )  # fmt: skip
    work = ServedWork.between(server(), after, "coder")
    first, second = report_lines(AgentEnd("claude", 0, is_interrupted=True), work)
    assert first == ("claude was interrupted; answered 1 of 2 requests: its task did not finish")
    assert second == (
        "8,704 of 37,494 prompt tokens were cached (23%); computed 9,000 at 150.0 tokens/s; output 100 at 10.0 tokens/s"
    )


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from([0, 1, 130, -2]), st.booleans())
def test_a_task_is_called_unfinished_only_after_an_interrupt_or_an_error(
    num_answered: int, num_cut: int, code: int, is_interrupted: bool
) -> None:
    after = server(num_requests=num_answered + num_cut, num_aborted=num_cut)
    work = ServedWork.between(server(), after, "coder")
    text = " ".join(report_lines(AgentEnd("codex", code, is_interrupted), work))
    assert ("did not finish" in text) == (num_cut > 0 and (is_interrupted or code != 0))
    assert ("was interrupted" in text) == (is_interrupted or code in (130, -2))


def test_a_request_that_is_still_open_has_no_answer() -> None:
    work = ServedWork.between(server(num_open=1), server(num_open=2, num_requests=3), "coder")
    assert (work.num_requests, work.num_unanswered) == (4, 1)


def test_a_server_gets_time_to_notice_that_the_agent_has_left() -> None:
    states = iter([server(num_open=1), server(num_open=1), server()])
    settled = settled_state(lambda: next(states), 0, lambda: 0.0)
    assert settled is not None
    assert settled.num_open_requests == 0
    times = iter([0.0, 1.0, 3.0])
    late = settled_state(lambda: server(num_open=1), 0, lambda: next(times))
    assert late is not None
    assert late.num_open_requests == 1
    assert settled_state(lambda: None, 0) is None


# -- time limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_waits_for_hours(agent: str, tmp_path: Path) -> None:
    setup = AGENTS[agent].setup(SERVER, tmp_path)
    text = " ".join([*setup.variables.values(), *setup.files.values()])
    assert str(MAX_WAIT_MS) in text or setup.variables.get("AIDER_TIMEOUT") == str(MAX_WAIT_MS // 1000)
