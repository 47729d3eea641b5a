"""What a new user meets first: loading that says it is done, and an estimate for the type that was asked for."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.client.engines.opening import open_model
from quire.config import ModelSettings
from tests.support.models.tiny_models import Tiny, make_directory


@pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(Tiny(hidden=128, intermediate=128), id="cpu"),
        pytest.param(
            Tiny(), id="torch", marks=pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
        ),
    ],
)
def test_the_last_word_of_loading_is_that_all_is_loaded(tiny: Tiny, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    settings = ModelSettings(memory_bytes=16 << 30, max_sequence_tokens=64, max_running=2, max_step_tokens=64)
    opened = open_model(
        str(make_directory(tmp_path / "model", tiny=tiny)),
        settings,
        progress=lambda label, done, total: told.append((label, done, total)),
    )
    opened.engine.close()
    label, done, total = told[-1]
    assert label == "loading weights"
    assert done == total > 0, told[-3:]


def fits(folder: Path, *flags: str) -> list[int]:
    result = CliRunner().invoke(app, ["info", str(folder), "--json", *flags])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return [one["kv_tokens"] for one in told["fits"]]


def test_what_fits_is_estimated_for_the_type_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_directory(tmp_path / "model", tiny=Tiny())
    wide = fits(folder)
    monkeypatch.setenv("QUIRE_DTYPE", "bfloat16")
    narrow = fits(folder)
    assert all(1.9 < one / other < 2.1 for one, other in zip(narrow, wide, strict=True)), (narrow, wide)
    monkeypatch.delenv("QUIRE_DTYPE")
    assert fits(folder, "--dtype", "bfloat16") == narrow
