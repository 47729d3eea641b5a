"""What a person sees."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import __version__, cli
from quire.config import SETTINGS, Group
from quire.core.scheduling.scheduler import Scheduler
from quire.errors import ConfigError
from tests.support.commands import leaf_commands


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_help_lists_the_commands() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "sim" in out


def test_the_version_is_printed() -> None:
    assert run("--version") == (0, f"quire {__version__}\n", "")


def test_sim_prints_a_summary_a_person_can_read() -> None:
    code, out, err = run("sim", "--scenario", "tenants", "--seed", "2", "--requests", "30")
    assert (code, err) == (0, "")
    for words in ("tenants, seed 2", "prompt tokens reused", "median wait", "greedy"):
        assert words in out


def test_sim_prints_json_for_machines() -> None:
    code, out, _ = run("sim", "--scenario", "chat", "--requests", "10", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["requests"], report["violations"]) == (10, [])


def test_sim_lists_its_scenarios() -> None:
    assert "agents" in run("sim", "--list")[1]


def test_a_violation_ends_with_the_line_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_admit", lambda self: None)
    code, _, err = run("sim", "--requests", "2")
    assert code == 1
    assert "hint: replay it with: quire sim --scenario chat --seed 1 --requests 2" in err


def test_an_error_is_one_line_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", "sim", "--scenario", "quiet"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: expected a scenario of ")
    assert "Traceback" not in err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, quire.cli; print(sorted({'quire.sim', 'quire.core', 'rich', 'torch'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert out.stdout.strip() == "[]", out.stderr


def test_serve_shows_the_ten_options_that_matter_first_and_the_others_in_groups() -> None:
    code, out, _ = run("serve", "--help")
    _, *sections = re.split(r"\n(?=[A-Z][A-Za-z ]*:\n)", out)
    headings = [section.partition(":")[0].strip() for section in sections]
    assert code == 0
    assert headings[:2] == ["Arguments", "Options"]
    assert set(headings[2:6]) == {group.value for group in Group}
    flags = [re.findall(r"^  (--[a-z-]+)", section, re.MULTILINE) for section in sections]
    assert len(flags[1]) == 11  # ten, and --help
    assert {"--memory", "--host", "--port", "--keys-file"} <= set(flags[1])
    everywhere = [flag for section in flags for flag in section]
    assert sorted(everywhere) == sorted(set(everywhere))
    assert {setting.flag for setting in SETTINGS} <= set(everywhere)


@pytest.mark.parametrize("words", leaf_commands(), ids=" ".join)
def test_every_command_takes_a_known_instruction_set_and_rejects_others_with_the_list(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_INSTRUCTION_SET", "avx2")
    assert run(*words, "--help")[0] == 0
    monkeypatch.setenv("QUIRE_INSTRUCTION_SET", "quantum")
    rejected = CliRunner().invoke(cli.app, [*words, "--help"])
    assert isinstance(rejected.exception, ConfigError)
    assert rejected.exception.settings == ("instruction_set",)
    assert "portable, avx2, avxvnni, avx512, avx512vnni, neondot" in str(rejected.exception)
