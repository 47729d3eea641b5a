"""An error ends with a hint only where the hint leads further than the error itself."""

import sys

import pytest

from quire import cli


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["top", "--server", "nonsense://x"], ""),
        (["launch", "nobody"], ""),
        (["bench", "engine", "no/such/file.gguf"], "hint: quire models lists what is on this machine"),
    ],
)
def test_no_error_sends_to_the_general_help(
    words: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "quire --help" not in said
    assert hint in said
    assert hint or "hint" not in said
