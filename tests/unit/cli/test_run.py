"""`quire pull` and `quire run`: from a model's name to a conversation."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire import cli
from quire.checkpoints.hub import download as hub_download
from quire.cli.serve.run import name_for, show_page
from quire.config import OnDemandModel, Settings
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code
from tests.support.fleet.hub_stand_in import Shelf, standing_in
from tests.support.models.tiny_models import Tiny, write_gguf


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, str], Any]]:
    """What would be served, and who hears of it."""
    told: list[tuple[dict[str, str], Any]] = []

    def serve_models(models: Sequence[OnDemandModel], _settings: Settings, **options: Any) -> None:
        told.append(({one.name: one.model for one in models if one.is_kept}, options["on_ready"]))

    monkeypatch.setattr(sys.modules["quire.cli.serve.serve"], "serve_models", serve_models)
    return told


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_a_pull_prints_the_path_and_says_why_it_took_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_download, "_pause", lambda _seconds: None)
    data = bytes(3000)
    with standing_in() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        hub.shelves["org/name"] = Shelf({"a-Q8_0.gguf": data, "a-Q4_0.gguf": data[:2000], "a-F16.gguf": data * 2})
        code, out, err = run("pull", "org/name", "--memory", "4GiB")
        sent = hub.num_bytes_sent
        assert run("pull", "org/name")[:2] == (0, out)
        assert hub.num_bytes_sent == sent  # it is here
        hub.shelves["org/name"] = Shelf({"a-Q8_0.gguf": data + b"newer"}, commit="f" * 40)
        newer = run("pull", "org/name")[1]
        assert Path(newer.strip()).read_bytes() == data + b"newer"
    assert code == 0
    assert Path(out.strip()).read_bytes() == data
    assert [line.split()[:2] for line in err.splitlines() if "GB" in line] == [
        ["Q4_0", "0.00"],
        [">", "Q8_0"],
        ["F16", "0.00"],
    ]
    assert "selected: the best that fits" in err


def test_what_is_no_hub_id_is_not_pulled() -> None:
    with raises_code(CheckpointError, "invalid_model_name"):
        run("pull", "model.gguf")


def test_a_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        run("pull", "org/name", "--memory", "lots")
    assert refused.value.settings == ("memory",)


def test_a_file_is_served_under_its_name_and_the_page_is_opened(served: list[Any], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny-F32.gguf", Tiny())
    assert run("run", str(file))[0] == 0
    assert run("run", str(file), "--no-browser")[0] == 0
    assert [names for names, _ in served] == [{"tiny-F32": str(file)}] * 2
    assert [heard for _, heard in served] == [show_page, None]


def test_with_chat_there_is_no_server(served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks: list[Any] = []
    monkeypatch.setattr(sys.modules["quire.cli.chat.chat"], "talk_in_terminal", talks.append)
    file = write_gguf(tmp_path / "tiny-F32.gguf", Tiny(hidden=128, intermediate=128))
    assert run("run", str(file), "--chat", "--memory", "4GiB")[0] == 0
    assert (len(talks), served) == (1, [])


def test_a_model_without_a_chat_template_cannot_be_talked_to(tmp_path: Path) -> None:
    tiny = Tiny(hidden=128, intermediate=128, metadata={"tokenizer.chat_template": None})
    file = write_gguf(tmp_path / "tiny-F32.gguf", tiny)
    with raises_code(ConfigError, "template_missing"):
        run("run", str(file), "--chat", "--memory", "4GiB")


def test_a_repository_is_called_by_its_name_and_quantisation() -> None:
    assert name_for("org/name:Q4_K_M") == "name:Q4_K_M"
    assert name_for("./models/llama/") == "llama"


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000/"),
        ("http://[::]:8000", "http://[::1]:8000/"),
    ],
)
def test_the_page_is_opened_where_there_is_a_screen(monkeypatch: pytest.MonkeyPatch, url: str, opened: str) -> None:
    seen: list[str] = []
    monkeypatch.setattr(webbrowser, "open", seen.append)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    show_page(url)
    monkeypatch.delenv("DISPLAY")
    monkeypatch.setattr("sys.platform", "linux")
    show_page(url)
    assert seen == [opened]
    assert "DISPLAY" not in os.environ
