"""How an answer is written in a terminal: what it says on stdout, what the model thinks before it on stderr."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from quire.client.reply.outputs import Piece


@dataclass
class Spoken:
    """Writes pieces as they come."""

    is_thinking: bool = False

    def say(self, piece: "Piece") -> None:
        """Write one. Thoughts begin and end with a line that says so, so that nobody takes them for the answer."""
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
        """No thought goes on behind this."""
        if self.is_thinking:
            typer.echo("\n(answering)", err=True)
        self.is_thinking = False
