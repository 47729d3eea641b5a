"""Opening a model for a command: progress while it loads, and one line on stderr with what fits."""

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire.client.engines.llm import LLM
    from quire.config import Settings


@contextmanager
def opened(model: str, settings: "Settings") -> "Iterator[LLM]":
    """The loaded model; closed at the end."""
    from quire.checkpoints import resolve
    from quire.checkpoints.progress import show_progress
    from quire.cli.shared.background import in_background
    from quire.client.engines.llm import LLM
    from quire.client.engines.opening import open_model
    from quire.config.machine import beyond_the_machine

    for warning in beyond_the_machine(settings.model.memory_bytes, settings.model.num_threads):
        typer.echo(warning, err=True)
    with show_progress() as progress:
        checkpoint = in_background(lambda report: resolve(model, progress=report), progress).result()
        loaded = open_model(checkpoint, settings.model, serving=settings.serving, progress=progress)
    for line in (loaded.text.info.line, *loaded.text.notes):
        typer.echo(line, err=True)
    with LLM(loaded) as llm:
        yield llm
