"""Prints an answer in a terminal: the answer on stdout, the reasoning before it on stderr."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from quire.client.reply.outputs import Piece


@dataclass
class AnswerPrinter:
    """Writes pieces as they arrive."""

    is_thinking: bool = False

    def write(self, piece: "Piece") -> None:
        """Write one piece. Marker lines surround reasoning, so that it is not mistaken for the answer."""
        from quire.client.reply.outputs import ReasoningPart

        is_thought = isinstance(piece.part, ReasoningPart)
        if is_thought and piece.delta and not self.is_thinking:
            self.is_thinking = True
            typer.echo("(thinking)", err=True)
        if self.is_thinking and not is_thought:
            self.end()
        if piece.delta:
            typer.echo(piece.delta if is_thought else piece.text, nl=False, err=is_thought)

    def end(self) -> None:
        """End the reasoning, if any is open."""
        if self.is_thinking:
            typer.echo("\n(answering)", err=True)
        self.is_thinking = False
