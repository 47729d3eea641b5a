"""A name leads to a directory, a file or the hub, or to a sentence that says what a name may be."""

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import quire.checkpoints
from quire.checkpoints import CheckpointError, names, resolve
from quire.checkpoints.hub.files import HubName
from quire.checkpoints.hub.listing import hub_errors
from tests.support.errors import raises_code
from tests.support.models.tiny_models import make_directory


def test_a_directory_is_resolved_to_itself(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "model")
    checkpoint = resolve(str(folder))
    assert (checkpoint.name, checkpoint.directory) == (str(folder), folder.resolve())


def test_what_is_fetched_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HubName] = []

    def pull(wanted: HubName, *_others: object) -> Path:
        asked.append(wanted)
        return make_directory(tmp_path / "model")

    monkeypatch.setattr(names, "find_local", lambda *_any: None)
    monkeypatch.setattr(names, "pull", pull)
    assert resolve("org/model:Q4_0").name == "org/model:Q4_0"
    assert asked == [HubName("org/model", "Q4_0")]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LocalEntryNotFoundError("x"), "hub_offline"),
        (ConnectionError("no route"), "hub_not_reachable"),
        (RuntimeError("odd"), "download_failed"),
    ],
)
def test_a_download_that_fails_is_refused_by_its_reason(error: Exception, code: str) -> None:
    with raises_code(CheckpointError, code), hub_errors("org/model"):
        raise error


def test_offline_only_what_is_cached_is_looked_at(tmp_path: Path) -> None:
    program = "from quire.checkpoints import *\ntry: resolve('org/absent')\nexcept CheckpointError as e: print(e.code)"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(quire.checkpoints.__file__).parents[2])
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.stdout == "hub_offline\n", run.stderr


@pytest.mark.parametrize("name", ["", "no such model", "a/b/c", "../x", "org/", "x\0y", "x" * 10_000, "~nobody/model"])
def test_what_is_no_name_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        resolve(name)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with raises_code(CheckpointError, "not_a_model"):
        resolve(str(tmp_path / "model.bin"))


def test_resolving_imports_no_tensor_library(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "model")
    program = (
        "import sys; from quire.checkpoints import resolve; resolve(sys.argv[1])\n"
        "print([name for name in ('torch', 'mlx', 'transformers', 'numpy', 'gguf') if name in sys.modules])"
    )
    source = str(Path(quire.checkpoints.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", program, folder], env={"PYTHONPATH": source}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[]", run.stderr
