"""`quire generate` and `quire chat` on an oracle: what is printed where, and what the commands of a chat do."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.chat.chat import BAR_LABEL, HELP, ChatSession, prompt_bar
from quire.cli.chat.generate import AnswerPrinter
from quire.cli.chat.remote import _StreamState
from quire.client.engines.llm import LLM
from quire.client.reply.outputs import REASONING, TEXT, Piece
from quire.client.request.params import SamplingParams
from quire.config import Settings
from tests.support.sampling_page import params_page
from tests.support.servers.talkers import talker
from tests.support.servers.thinkers import thinker

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(_model: str, _settings: Settings) -> Iterator[LLM]:
        with LLM(talker()) as llm:
            yield llm

    # The package's own names `generate` and `chat` are the commands; the rooms have to be asked for.
    for room in ("quire.cli.chat.generate", "quire.cli.chat.chat"):
        monkeypatch.setattr(import_module(room), "open_llm", opened)


def test_an_answer_goes_to_stdout_and_talk_to_stderr() -> None:
    done = CliRunner().invoke(app, ["generate", "m", "the cat", "--max-tokens", "9", "--temperature", "0"])
    with LLM(talker()) as llm:
        completion = llm.generate("the cat", SamplingParams(max_tokens=9, temperature=0.0))[0]
        expected, num_prompt = completion.text, len(completion.prompt_token_ids)
    assert done.exit_code == 0
    assert done.stdout == expected + "\n"
    assert "9 tokens, " in done.stderr
    assert f"0 of {num_prompt} prompt tokens cached, length" in done.stderr


def test_a_prompt_may_come_from_stdin_and_the_answer_be_json() -> None:
    args = ["generate", "m", "-", "--max-tokens", "3", "--json", "--seed", "4", "--stop", "zzz", "--chat"]
    done = CliRunner().invoke(app, args, input="hello")
    told = json.loads(done.stdout)
    assert told["finish_reason"] == "length"
    assert len(told["token_ids"]) == 3
    assert told["seed"] == 4


def test_a_chat_answers_obeys_and_ends() -> None:
    lines = "hello\n/stats\n/help\n/nonsense\n\n/system be brief\nhello again\n/reset\n/exit\n"
    done = CliRunner().invoke(app, ["chat", "m", "--max-tokens", "5", "--temperature", "0"], input=lines)
    assert done.exit_code == 0
    assert "1 responses, 5 tokens" in done.stderr
    assert "/save FILE" in done.stderr
    assert "unknown command /nonsense" in done.stderr
    assert done.stderr.count("prompt tokens cached") == 3


def test_a_chat_ends_with_its_input() -> None:
    assert CliRunner().invoke(app, ["chat", "m"], input="").exit_code == 0


def talk(max_tokens: int = 5) -> ChatSession:
    return ChatSession(LLM(talker()), SamplingParams(max_tokens=max_tokens, temperature=0.0))


def test_a_chat_is_told_after_every_step_how_much_of_its_prompt_is_computed() -> None:
    counts: list[tuple[int, int]] = []
    with LLM(talker()) as llm:
        ids = llm.text.prompt("the cat sat on the mat " * 20)
        list(llm.stream(ids, SamplingParams(max_tokens=3), on_progress=lambda *pair: counts.append(pair)))
    assert counts == [(done, len(ids)) for done in range(64, len(ids), 64)]


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("quire.checkpoints.progress.BARS.show", lambda *call: shown.append(call))
    monkeypatch.setattr("quire.checkpoints.progress.BARS.end", shown.append)
    with prompt_bar() as show_bar:
        show_bar(1, 2)
    assert not shown
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with prompt_bar() as show_bar:
        show_bar(1, 2)
    assert shown == [(BAR_LABEL, 1, 2), BAR_LABEL]


def test_the_second_turn_finds_the_first_in_the_cache() -> None:
    one = talk(max_tokens=12)
    one.handle("tell me about the cat on the mat")
    one.handle("and then?")
    assert one.completions[1].num_cached_tokens >= len(one.completions[0].prompt_token_ids) // 4 * 4
    assert [turn["role"] for turn in one.turns] == ["user", "assistant", "user", "assistant"]


def test_a_conversation_can_be_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = talk()
    one.handle("/system be brief")
    one.handle("hello")
    one.handle(f"/save {tmp_path / 'talk.json'}")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    one.handle("/save")
    one.handle(f"/save {tmp_path}")
    assert capsys.readouterr().err.count("hint:") == 2


def test_ctrl_c_stops_an_answer_and_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    one = talk(max_tokens=300)
    llm = one.llm
    assert isinstance(llm, LLM)
    stream, opened = llm.stream, llm._opened

    def pressed(*args: Any, **asked: Any) -> Iterator[object]:
        for count, piece in enumerate(stream(*args, **asked)):
            if count == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    llm.stream = pressed  # type: ignore[method-assign, assignment]
    before = signal.getsignal(signal.SIGINT)
    assert one.handle("go on for ever")
    assert "(stopped)" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    assert one.turns[-1]["role"] == "assistant"
    stopped = one.completions[-1]
    assert stopped.finish_reason == "cancelled"
    assert 0 < stopped.timings.first_token_s <= stopped.timings.total_s
    llm.stream = stream  # type: ignore[method-assign]
    one.params = SamplingParams(max_tokens=3)
    assert one.handle("still there?")
    assert one.completions[-1].num_output_tokens == 3
    assert not opened.engine.scheduler.live


def test_thoughts_are_written_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    spoken = AnswerPrinter()
    for delta, part in (("", TEXT), ("2 and ", REASONING), ("2", REASONING), ("four", TEXT), ("!", TEXT)):
        spoken.write(Piece(0, delta, part=part))
    spoken.end()
    written = capsys.readouterr()
    assert written.out == "four!"
    assert written.err == "(thinking)\n2 and 2\n(answering)\n"


def test_a_chat_with_a_model_that_thinks_keeps_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(thinker()) as llm:
        one = ChatSession(llm, SamplingParams(max_tokens=40, temperature=1.0, seed=3))
        one.handle("hello")
    answer = one.completions[0].answers[0]
    written = capsys.readouterr()
    assert answer.reasoning
    assert f"(thinking)\n{answer.reasoning}\n(answering)\n" in written.err
    assert written.out == answer.text + "\n"
    assert one.turns[-1] == {"role": "assistant", "content": answer.text}


def test_thoughts_of_a_server_are_told_apart() -> None:
    heard = _StreamState()
    deltas: list[dict[str, str]] = [{"role": "assistant"}, {"reasoning": "2 and 2"}, {"content": "four"}]
    pieces = [piece for delta in deltas for piece in heard.add({"choices": [{"delta": delta}]})]
    assert [(piece.delta, piece.part) for piece in pieces] == [("2 and 2", REASONING), ("four", TEXT)]
    answer = heard.completion().answers[0]
    assert (answer.text, answer.reasoning) == ("four", "2 and 2")


def test_a_question_too_long_is_refused_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    one = talk()
    one.handle("word " * 600)
    assert "hint: /reset" in capsys.readouterr().err
    assert one.turns == []


def test_the_reference_page_is_made_from_the_code() -> None:
    assert (ROOT / "docs/reference/sampling.md").read_text() == params_page()


def test_help_lists_every_command_of_a_chat() -> None:
    assert all(word in HELP for word in ("/system", "/save", "/stats", "/reset", "/exit"))
