"""Opening a model for a command: progress while it loads, and one line on stderr that says what fits."""

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire.config import Settings
    from quire.engine.llm import LLM


@contextmanager
def opened(model: str, settings: "Settings") -> "Iterator[LLM]":
    """The model, ready to be asked; closed at the end."""
    from quire.checkpoints.progress import shown
    from quire.engine.llm import LLM
    from quire.engine.opening import open_model

    with shown() as progress:
        loaded = open_model(model, settings.model, serving=settings.serving, progress=progress)
    for line in (loaded.line, *loaded.notes):
        typer.echo(line, err=True)
    with LLM(loaded) as llm:
        yield llm
