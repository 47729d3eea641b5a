"""A limit beyond the machine, or beyond what the model was made for, is warned of once; others are not."""

from pathlib import Path

from typer.testing import CliRunner

from quire.cli import app
from tests.support.models.tiny_models import Tiny, write_gguf

MEMORY = "3GiB"
"""This process is in it, with all that tests before have loaded."""
TINY = Tiny(hidden=128, intermediate=128, metadata={"llama.context_length": 128})


def said(folder: Path, *flags: str) -> str:
    file = write_gguf(folder / "tiny.gguf", TINY)
    ran = CliRunner().invoke(app, ["generate", str(file), "one two", "--max-tokens", "2", *flags])
    assert ran.exit_code == 0, ran.output
    return ran.stderr


def test_memory_and_threads_that_the_machine_does_not_have_are_warned_of(tmp_path: Path) -> None:
    told = said(tmp_path, "--memory", MEMORY, "--threads", "4000", "--max-running", "2")
    assert told.count("4000 threads exceed the ") == 1
    assert "memory 3.00 GiB exceeds" not in told


def test_a_context_that_the_model_was_not_made_for_is_warned_of(tmp_path: Path) -> None:
    flags = ("--memory", MEMORY, "--max-running", "2", "--max-model-len")
    told = said(tmp_path, *flags, "100000")
    assert told.count("max_model_len 100,000 is more than the model supports; using 128") == 1
    assert "than the model supports" not in said(tmp_path, *flags, "64")
